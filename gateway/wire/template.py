"""The ordinary chunk of one stream, learned from the first one: what comes before its text and what comes after.

Chunks of a phase differ in a few characters: id, time, model, choice and the tail are the same bytes every time. A
chunk that begins and ends as the last one did, with text between that holds no quote, backslash, `<` or line end,
is one more token of the same kind and needs no parsing (which is most of what a chunk costs us beside system calls).
Everything else takes the long way. A `<` may open or close a thinking span, so such text is looked at too.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

MAX_TRIES: Final = 8  # a stream whose chunks never repeat (log probabilities, token ids) is not tried for ever
MAX_TEMPLATE: Final = 4096  # bytes kept per stream; vLLM's ordinary chunk has 230

_MARKS: Final = (b'"content":"', b'"text":"', b'"reasoning":"', b'"reasoning_content":"')
_VARYING: Final = (b'"usage":{', b'"timings":{', b'"metrics":{')
_PLAIN_TEXT: Final = re.compile(rb'[^"\\<\r\n]++')
is_plain_text = _PLAIN_TEXT.fullmatch


class Template(NamedTuple):
    """`before` and `after` the text, and what kind of token it is."""

    before: bytes
    after: bytes
    kind: int


def learn(data: bytes, kind: int) -> Template | None:
    """From one whole chunk that was a token of `kind`; None when its text cannot be told apart from the rest."""
    if not data.startswith(b"data: {") or not data.endswith(b"}\n\n") or len(data) > MAX_TEMPLATE:
        return None
    if data.count(b"\n") != 2 or data.find(b"\r") >= 0 or any(mark in data for mark in _VARYING):
        return None
    found = [(mark, at) for mark in _MARKS if (at := data.find(mark)) >= 0]
    if len(found) != 1 or data.count(found[0][0]) != 1:
        return None
    start = found[0][1] + len(found[0][0])
    end = data.find(b'"', start)
    if is_plain_text(data, start, end) is None:
        return None
    return Template(data[:start], data[end:], kind)

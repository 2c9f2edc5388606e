"""Bodies that are relayed unread, but for the model they name: it chooses the route (C078).

Linear in the length of the body, whatever it holds: only member by member, or part by part of a form, with `find`.
A model named twice is refused, since the route (and what a key may use) would be decided on one of the two and the
server might take the other (C051).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gateway.errors import BadRequest
from gateway.wire.body import RequestBody, read_object
from gateway.wire.spans import SpliceError, loads, members

MAX_NAME: Final = 256
MAX_PART_HEAD: Final = 4096  # bytes; a form part's header fields are a line or three
MAX_PARTS: Final = 1000
_BOUNDARY: Final = re.compile(rb"--[^\r\n]{1,200}\r\n")  # RFC 2046: 70 characters, some clients use more
_UTF8_MARK: Final = b"\xef\xbb\xbf"
_IS_MODEL: Final = re.compile(
    rb'content-disposition:[ \t]*form-data[ \t]*;[ \t]*name="?model"?[ \t]*(?:\r\n|\Z)', re.IGNORECASE
)


def model_in(raw: bytes) -> str | None:
    """The `model` field of a JSON object or of a multipart form; None when there is none to be found.

    Raises BadRequest (duplicate_key) when it stands there twice.
    """
    start = raw[:64].lstrip().removeprefix(_UTF8_MARK)
    if start.startswith(b"{"):
        found = list(_in_object(raw.removeprefix(_UTF8_MARK)))
    elif start.startswith(b"--"):
        found = list(_in_form(raw))
    else:
        return None
    if len(found) > 1:
        raise BadRequest(
            f"`model` stands {len(found)} times in the request, and programs differ in which one they take. "
            "Send it once.",
            code="duplicate_key",
        )
    return found[0] if found else None


def _in_object(raw: bytes) -> Iterator[str | None]:
    try:
        for member in members(raw):
            if member.key == "model":
                value = loads(raw[member.start : member.end])
                yield value[:MAX_NAME] if isinstance(value, str) else None
    except SpliceError:
        return  # not JSON: the upstream's to refuse


def _in_form(raw: bytes) -> Iterator[str]:
    """Values of the fields called `model`. A file's content is never taken for fields: parts end at the boundary."""
    opening = _BOUNDARY.search(raw, 0, 256)
    if opening is None:
        return
    mark = b"\r\n" + opening.group()[:-2]
    start = opening.end()
    for _ in range(MAX_PARTS):
        end = raw.find(mark, start - 2)
        if end < 0:
            return
        blank = raw.find(b"\r\n\r\n", start, min(end, start + MAX_PART_HEAD))
        if blank >= 0 and end - blank <= MAX_NAME + 4 and _IS_MODEL.search(raw, start, blank):
            yield raw[blank + 4 : end].decode("utf-8", "replace").strip()
        start = end + len(mark) + 2


def readable(raw: bytes) -> RequestBody | None:
    """The body for a route's own fields (`model`, `defaults`), when it is a JSON object; None: it goes on unread."""
    if not raw[:64].lstrip().startswith(b"{"):
        return None
    try:
        return read_object(raw, frozenset())
    except BadRequest:
        return None

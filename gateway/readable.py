"""A model server's own errors, in words that every SDK shows (client-contract §5, §6, §14.7).

`{"error": {"message", …}}` is the one shape that all of them read. Others are a bare number or status line to some,
and inside a stream an odd chunk or nothing at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from gateway.errors import UpstreamBadResponse, payload_of

if TYPE_CHECKING:
    from gateway.wire.answer import StreamError


def is_nested(data: bytes) -> bool:
    """Whether an error is already `{"error": {…}}`, the one shape that every SDK can read."""
    try:
        payload = orjson.loads(data)
    except ValueError:
        return False
    return isinstance(payload, dict) and isinstance(payload.get("error"), dict)


def with_readable_error(body: bytes) -> bytes:
    """A refusal as the server wrote it, and where it has words but no `error`, with one added.

    Flat errors (`{"message"}`, `{"detail"}`) are a bare number or status line to some SDKs (client-contract §6). What
    the server wrote stays as it is, for whoever reads that.
    """
    text = body.strip()
    if not (text.startswith(b"{") and text.endswith(b"}")):
        return body
    try:
        payload = orjson.loads(text)
    except ValueError:
        return body
    if not payload or "error" in payload:
        return body
    words = payload.get("message") or payload.get("detail")
    if isinstance(words, list):
        words = "; ".join(str(item.get("msg", item)) if isinstance(item, dict) else str(item) for item in words[:8])
    if not isinstance(words, str) or not words:
        return body
    code = payload.get("code")
    kind = payload.get("type")
    error = {
        "message": words,
        "type": kind if isinstance(kind, str) else "upstream_error",
        "param": None,
        "code": str(code) if isinstance(code, int | str) else "upstream_error",
    }
    return text[:-1] + b',"error":' + orjson.dumps(error) + b"}"


def with_readable_event(passed: bytes, error: StreamError, *, is_open: bool) -> bytes | None:
    """Bytes of a stream of OpenAI's API in which its error came, with that error readable.

    In its place where it is whole in them; once more before the end mark or behind them where its beginning went out
    before. None: not possible here, because they end inside another event (`is_open`).
    """
    if is_nested(error.data):
        return passed
    told = UpstreamBadResponse(error.message or "The model server reported an error.", code=error.code or None)
    payload = payload_of(told, "openai")
    if error.data and error.data in passed:
        return passed.replace(error.data, payload, 1)
    mark = passed.rfind(b"data: [DONE]")
    if mark < 0:
        if is_open:
            return None
        mark = len(passed)
    return passed[:mark] + b"data: " + payload + b"\n\n" + passed[mark:]

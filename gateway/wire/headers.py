"""Which header fields pass in each direction, and how text becomes a header value that cannot break one.

Fields pass as the bytes they came as. Hop-by-hop fields, fields that `Connection` nominates, framing, credentials
and our own names never pass (C136, C143, fault-catalogue B13).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

Headers = list[tuple[bytes, bytes]]

MAX_VALUE: Final = 1024  # characters of a value made by us; more would only fill other people's logs
_HOP_BY_HOP: Final = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"http2-settings",
})  # fmt: skip
_CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key", b"cookie"})
_NOT_UPSTREAM: Final = _HOP_BY_HOP | _CREDENTIALS | {
    b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id", b"traceparent", b"prefer",
    b"x-gateway-timing", b"x-gateway-pending",
}  # fmt: skip
_NOT_DOWNSTREAM: Final = _HOP_BY_HOP | _CREDENTIALS | {
    b"content-length", b"server", b"date", b"x-request-id", b"server-timing", b"location", b"alt-svc",
    b"strict-transport-security", b"www-authenticate", b"x-accel-buffering",
}  # fmt: skip
_SANE_ID: Final = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}\Z")
_TRACEPARENT: Final = re.compile(  # version ff and ids of zeros are invalid
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z"
)


def for_upstream(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The caller's fields that a model server may see (names in lower case)."""
    kept = [field for field in headers if field[0] not in _NOT_UPSTREAM and not field[0].startswith(b"x-gateway-")]
    nominated = _nominated(headers)
    return [field for field in kept if field[0] not in nominated] if nominated else kept


def as_json(headers: Headers) -> Headers:
    """The fields with a JSON content type; the same list when they have one.

    A body that was read as JSON is JSON, whatever the caller called it (curl says "a form" when nobody says otherwise),
    and vLLM refuses any other type with 400.
    """
    for name, value in headers:
        if name == b"content-type":
            if value[:16].lower() == b"application/json":
                return headers
            break
    return [*(field for field in headers if field[0] != b"content-type"), (b"content-type", b"application/json")]


def for_client(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """A model server's fields that the caller may see; framing, date and request id are ours."""
    kept = [
        field
        for field in headers
        if field[0] not in _NOT_DOWNSTREAM and not field[0].startswith((b"x-gateway-", b"access-control-"))
    ]
    nominated = _nominated(headers)
    return [field for field in kept if field[0] not in nominated] if nominated else kept


def _nominated(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Names that the `Connection` fields, all of them, call hop-by-hop."""
    found: frozenset[bytes] = frozenset()
    for name, value in headers:
        if name == b"connection" and value not in (b"keep-alive", b"close", b"Keep-Alive", b"Close"):
            found |= {token.strip().lower() for token in value.split(b",")}
    return found


def first(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """First value of a field, or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def sane_request_id(value: bytes | None) -> str | None:
    """The caller's request id, if it is short and plain; None otherwise."""
    if value is not None and _SANE_ID.match(value):
        return value.decode("ascii")
    return None


def sane_traceparent(value: bytes | None) -> bytes | None:
    """A W3C `traceparent` of valid form, or None."""
    return value if value is not None and _TRACEPARENT.match(value) else None


def header_value(text: str) -> bytes:
    """Any text as a header value: plain ASCII stays, the rest is percent-encoded, controls are gone, length is capped.

    Half a surrogate pair becomes `?` first, so that no text whatever costs a response (C141).
    """
    if text.isascii() and text.isprintable():
        return text[:MAX_VALUE].encode("ascii")
    printable = "".join(char if char >= " " and char != "\x7f" else " " for char in text[:MAX_VALUE])
    encodable = printable.encode("utf-8", "replace").decode("utf-8")
    return quote(encodable, safe=" !#$&'()*+,/:;<=>?@[]^_`{|}~-.")[:MAX_VALUE].encode("ascii")


def label_value(text: str, limit: int = 128) -> str:
    """Text that may stand in a log line or on a page: no surrogates, no controls, bounded (C109)."""
    cut = text[:limit]
    if cut.isascii() and cut.isprintable():
        return cut
    cut = cut.encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char >= " " and char != "\x7f" else "\ufffd" for char in cut)

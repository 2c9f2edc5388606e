"""HTTP/1.1 as a client, without I/O: request heads out, response events in. Parsing is llhttp's (httptools).

`ResponseParser.feed(data)` collects what arrived in `parts` (body bytes) and in the flags `head`, `is_complete`.
What a lenient client would let pass and an attacker could use is an error here (fault-catalogue part 5, B and C):
framing that contradicts itself, bytes beyond a complete response, floods of interim responses, heads without end.
One parser serves one connection; `start()` begins the next response.
"""

from __future__ import annotations

from collections.abc import Iterable

import httptools

MAX_HEAD_BYTES = 64 * 1024  # vLLM's heads are below 1 KiB; fault-catalogue 5.0
MAX_FIELDS = 200
MAX_INTERIM = 20  # 1xx responses before the final one
_VERSIONS = ("1.1", "1.0")
_HEAD_REASONS = (  # words of llhttp's messages, and what they mean in our logs
    ("Content-Length", "bad_framing"),
    ("Transfer-Encoding", "bad_framing"),
    ("status", "bad_status"),
    ("header", "bad_header"),
)

Headers = list[tuple[bytes, bytes]]


class ProtocolViolation(Exception):
    """The peer did not speak the HTTP that we accept. `reason` is a bounded word for logs and metrics."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class ResponseHead:
    """Status and header fields as they came, names in lower case, and what is asked of them more than once."""

    __slots__ = ("content_length", "headers", "is_chunked", "is_coded", "is_event_stream", "media_type", "status")

    def __init__(self, status: int, headers: Headers, content_length: int | None, is_chunked: bool) -> None:
        self.status = status
        self.headers = headers
        self.content_length = content_length
        self.is_chunked = is_chunked
        self.media_type = b""
        """`content-type` without parameters, in lower case; empty when there is none."""
        self.is_coded = False
        """A `content-encoding` other than identity: the bytes can be passed on and not looked into."""
        for name, value in headers:
            if name == b"content-type" and not self.media_type:
                self.media_type = value.partition(b";")[0].strip().lower()
            elif name == b"content-encoding":
                self.is_coded = value.lower() != b"identity"
        self.is_event_stream = self.media_type == b"text/event-stream"

    def __repr__(self) -> str:
        return f"<ResponseHead {self.status} {self.media_type.decode('latin-1')}>"

    def get(self, name: bytes) -> bytes | None:
        """First value of a field."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class ResponseParser:
    """One connection's responses. Not reusable after `ProtocolViolation`."""

    __slots__ = (
        "_expecting", "_field_bytes", "_fields", "_head_bytes", "_interim", "_keep_alive", "_length", "_parser",
        "_transfer", "_violation",
        "head", "is_complete", "parts", "surplus",
    )  # fmt: skip

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.parts: list[bytes] = []
        self.head: ResponseHead | None = None
        self.is_complete = False
        self.surplus = False  # bytes came that belong to no request: the connection must not be used again
        self._expecting = False
        self._keep_alive = False
        self._fields: Headers = []
        self._violation: ProtocolViolation | None = None
        self._head_bytes = 0
        self._field_bytes = 0
        self._interim = 0
        self._length: int | None = None
        self._transfer: bytes | None = None

    def start(self) -> None:
        """A request is about to be written: the next response is expected."""
        self.parts.clear()
        self.head = None
        self.is_complete = False
        self._expecting = True
        self._head_bytes = 0
        self._field_bytes = 0
        self._interim = 0

    def feed(self, data: bytes) -> None:
        """Takes bytes of any split. Raises `ProtocolViolation` after what was good was put into `parts`."""
        if not self._expecting:
            self.surplus = True
            raise ProtocolViolation("surplus_bytes", "bytes arrived without a request")
        if self.head is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise ProtocolViolation("unexpected_101", "the server switched protocols unasked") from None
        except httptools.HttpParserError as error:
            self._raise_parser_error(error)
        if self._violation is not None:
            raise self._violation
        if self.head is None and self._head_bytes > MAX_HEAD_BYTES:
            raise _head_too_large()

    def _raise_parser_error(self, error: httptools.HttpParserError) -> None:
        if self._violation is not None:
            raise self._violation from None
        if self.is_complete:
            self.surplus = True  # the response itself is whole; what follows is not ours
            return
        if self.head is None:
            text = str(error)
            reason = next((reason for words, reason in _HEAD_REASONS if words in text), "not_http")
            raise ProtocolViolation(reason, f"not a valid HTTP response head: {text}") from None
        raise ProtocolViolation("bad_framing", f"the response body is framed wrongly: {error}") from None

    def end_of_stream(self) -> bool:
        """The peer closed. True when that is where this response ends (no length and not chunked)."""
        if self.head is None or self.is_complete:
            return self.is_complete
        if self.head.is_chunked or self.head.content_length is not None:
            return False
        self.is_complete = True
        return True

    @property
    def can_reuse(self) -> bool:
        """The response ended at its framing, the server keeps the connection, and nothing came after it."""
        return self.is_complete and not self.surplus and self._keep_alive

    # Callbacks of httptools. An exception here would be wrapped, so violations are kept and raised by `feed`.

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.surplus = True  # this response is whole and is delivered; the connection is closed afterwards
        self._fields = []
        self._length = None
        self._transfer = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is not None:
            return  # a trailer field: dropped (C23); or of a second response, which is nobody's (A11)
        self._field_bytes += len(name) + len(value)
        if self._field_bytes > MAX_HEAD_BYTES:
            self._violate(_head_too_large())
            return
        if len(self._fields) >= MAX_FIELDS:
            self._fail("head_too_large", f"more than {MAX_FIELDS} header fields")
            return
        if b"\r" in value or b"\n" in value or b"\0" in value:
            self._fail("bad_header", "a header value holds a line end or NUL")
            return
        name = name.lower()
        if name == b"content-length":
            self._length = int(value)
        elif name == b"transfer-encoding":
            self._transfer = value if self._transfer is None else self._transfer + b", " + value
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        if self.head is not None:
            return  # a second response in the same read must not replace the first one's head
        version = self._parser.get_http_version()
        if version not in _VERSIONS:
            self._fail("not_http", "a version of HTTP that is neither 1.1 nor 1.0")
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._interim += 1
            if status < 100 or status == 101:
                self._fail("unexpected_101" if status == 101 else "bad_status", f"unexpected status {status}")
            elif self._interim > MAX_INTERIM:
                self._fail("interim_flood", f"more than {MAX_INTERIM} interim responses")
            return
        if status > 599:
            self._fail("bad_status", f"status {status} is outside 100 to 599")
            return
        if self._transfer is not None and self._transfer.strip().lower() != b"chunked":
            self._fail("bad_framing", "a transfer coding other than chunked")
            return
        if self._transfer is not None and (self._length is not None or version == "1.0"):
            self._fail("bad_framing", "Transfer-Encoding where it may not stand")
            return
        if self._violation is None:
            self.head = ResponseHead(status, self._fields, self._length, self._transfer is not None)

    def on_body(self, body: bytes) -> None:
        if not self.is_complete and self._violation is None:
            self.parts.append(body)

    def on_message_complete(self) -> None:
        if self.head is None or self._violation is not None:
            return  # an interim response
        self.is_complete = True
        self._expecting = False
        self._keep_alive = self._parser.should_keep_alive()  # llhttp only knows inside this callback

    def _fail(self, reason: str, detail: str) -> None:
        self._violate(ProtocolViolation(reason, detail))

    def _violate(self, violation: ProtocolViolation) -> None:
        self._violation = self._violation or violation


def _head_too_large() -> ProtocolViolation:
    return ProtocolViolation("head_too_large", f"the response head is larger than {MAX_HEAD_BYTES} bytes")


def request_head(
    method: bytes, target: bytes, fixed: bytes, headers: Iterable[tuple[bytes, bytes]], length: int
) -> bytes:
    """The bytes of a request head. `fixed` are ready-made lines (Host and what never changes for an upstream)."""
    lines = [b"%b %b HTTP/1.1\r\n%b" % (method, target, fixed)]
    lines += [b"%b: %b\r\n" % field for field in headers]
    lines.append(b"content-length: %d\r\n\r\n" % length if length or method != b"GET" else b"\r\n")
    return b"".join(lines)

"""Responses of model servers, byte by byte: what is taken, what is refused, and that no split changes the verdict."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from gateway.upstream.http1 import MAX_FIELDS, MAX_HEAD_BYTES, ProtocolViolation, ResponseParser, request_head
from tests.support.corpora import rows


@dataclass(frozen=True)
class Outcome:
    """What one connection's bytes came to."""

    status: int | None
    body: bytes
    is_complete: bool
    can_reuse: bool
    violation: str | None


def parse(pieces: Iterable[bytes], *, at_eof: bool = False) -> Outcome:
    parser = ResponseParser()
    parser.start()
    body, violation = b"", None
    try:
        for piece in pieces:
            parser.feed(piece)
            body += b"".join(parser.parts)
            parser.parts.clear()
    except ProtocolViolation as error:
        violation = error.reason
        body += b"".join(parser.parts)
    if at_eof and violation is None:
        parser.end_of_stream()
    if parser.is_complete:
        violation = None  # what follows a whole response is not its fault; the connection is closed
    status = parser.head.status if parser.head is not None else None
    return Outcome(status, body, parser.is_complete, violation is None and parser.can_reuse, violation)


def every_split(data: bytes) -> Iterable[list[bytes]]:
    yield [data[i : i + 1] for i in range(len(data))]
    for cut in range(1, len(data)):
        yield [data[:cut], data[cut:]]


def head(*lines: bytes, status: bytes = b"200 OK") -> bytes:
    return b"\r\n".join((b"HTTP/1.1 " + status, *lines, b"", b""))


CHUNKED = head(b"Transfer-Encoding: chunked")

WHOLE = [
    ("a length", head(b"Content-Length: 3") + b"abc", 200, b"abc", True),
    ("a length of nothing", head(b"Content-Length: 0"), 200, b"", True),
    ("chunks", CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", 200, b"abcde", True),
    ("chunks with extensions", CHUNKED + b'3;a=b;c="d"\r\nabc\r\n0\r\n\r\n', 200, b"abc", True),
    ("chunks and a trailer (C23)", CHUNKED + b"3\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\n", 200, b"abc", True),
    ("two interim responses first", head(status=b"100 Continue") * 2 + head(b"Content-Length: 1") + b"x", 200, b"x", True),
    ("no body at 204 (C24)", head(status=b"204 No Content"), 204, b"", True),
    ("no body at 304, whatever its length (C24)", head(b"Content-Length: 9", status=b"304 Not Modified"), 304, b"", True),
    ("Connection: close", head(b"Content-Length: 1", b"Connection: close") + b"x", 200, b"x", False),
    ("HTTP/1.0", b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, b"x", False),
    ("HTTP/1.0 that keeps alive", b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx", 200, b"x", True),
    ("no reason phrase", b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx", 200, b"x", True),
    ("a surplus byte (A11)", head(b"Content-Length: 3") + b"abcX", 200, b"abc", False),
    ("a body at 204 (C24)", head(status=b"204 No Content") + b"abc", 204, b"", False),
    (
        "a second response inside the first one's surplus (A11)",
        head(b"Content-Length: 3") + b"abc" + head(b"Content-Length: 3", status=b"202 Accepted") + b"def",
        200, b"abc", False,
    ),
    ("a second response after the last chunk", CHUNKED + b"1\r\na\r\n0\r\n\r\n" + head(status=b"204 No"), 200, b"a", False),
]  # fmt: skip


@pytest.mark.parametrize("name, data, status, body, can_reuse", WHOLE, ids=[row[0] for row in WHOLE])
def test_a_whole_response_is_the_same_for_every_split(
    name: str, data: bytes, status: int, body: bytes, can_reuse: bool
) -> None:
    expected = Outcome(status, body, True, can_reuse, None)
    assert parse([data]) == expected
    for pieces in every_split(data):
        assert parse(pieces) == expected, pieces


REFUSED = [
    ("an SSH banner (B4)", b"SSH-2.0-OpenSSH_9.2\r\n", "not_http"),
    ("a TLS alert (B4)", b"\x15\x03\x01\x00\x02\x02\x46", "not_http"),
    ("an HTML page without a head (B4)", b"<html>\r\n\r\n", "not_http"),
    ("HTTP/0.9 (B4)", b"HTTP/0.9 200 OK\r\n\r\n", "not_http"),
    ("HTTP/2.0 (B4)", b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n", "not_http"),
    ("bare LF (B11)", b"HTTP/1.1 200 OK\nContent-Length: 1\n\nx", "not_http"),
    ("a status in letters (B5)", head(status=b"abc OK"), "bad_status"),
    ("status 99 (B5)", head(status=b"099 Low"), "bad_status"),
    ("status 600 (B5)", head(b"Content-Length: 0", status=b"600 High"), "bad_status"),
    ("status 999 (B5)", head(b"Content-Length: 0", status=b"999 High"), "bad_status"),
    ("101 unasked (B7)", head(status=b"101 Switching Protocols"), "unexpected_101"),
    ("101 with an upgrade (B7)", head(b"Upgrade: x", b"Connection: upgrade", status=b"101 S"), "unexpected_101"),
    ("two lengths (B9)", head(b"Content-Length: 3", b"Content-Length: 4") + b"abc", "bad_framing"),
    ("the same length twice (B9)", head(b"Content-Length: 3", b"Content-Length: 3") + b"abc", "bad_framing"),
    ("a list of lengths (B9)", head(b"Content-Length: 3, 3") + b"abc", "bad_framing"),
    ("a negative length (B9)", head(b"Content-Length: -3") + b"abc", "bad_framing"),
    ("a length with a plus (B9)", head(b"Content-Length: +3") + b"abc", "bad_framing"),
    ("a length of 20 digits (B9)", head(b"Content-Length: 99999999999999999999") + b"abc", "bad_framing"),
    ("gzip, chunked (B9)", head(b"Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n", "bad_framing"),
    ("xchunked (B9)", head(b"Transfer-Encoding: xchunked") + b"0\r\n\r\n", "bad_framing"),
    ("identity (B9)", head(b"Transfer-Encoding: identity") + b"abc", "bad_framing"),
    ("chunked in HTTP/1.0", b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "bad_framing"),
    ("a length and chunked (B10)", head(b"Content-Length: 3", b"Transfer-Encoding: chunked") + b"0\r\n\r\n", "bad_framing"),
    ("chunked and a length (B10)", head(b"Transfer-Encoding: chunked", b"Content-Length: 3") + b"0\r\n\r\n", "bad_framing"),
    ("NUL in a value (B11)", head(b"X: a\0b"), "bad_header"),
    ("CR in a value (B11)", head(b"X: a\rb"), "bad_header"),
    ("a folded line (B11)", head(b"X: a", b" b"), "bad_header"),
    ("a space before the colon (B11)", head(b"X : a"), "bad_header"),
    ("a field without a name (B11)", head(b": a"), "bad_header"),
    ("a chunk size in letters (C6)", CHUNKED + b"zz\r\nabc\r\n", "bad_framing"),
    ("a negative chunk size (C6)", CHUNKED + b"-5\r\nhello\r\n", "bad_framing"),
    ("a chunk size with 0x (C6)", CHUNKED + b"0x5\r\nhello\r\n", "bad_framing"),
    ("a chunk size with an underscore (C6)", CHUNKED + b"5_0\r\nhello\r\n", "bad_framing"),
    ("a chunk size of 17 digits (C6)", CHUNKED + b"1" * 17 + b"\r\nhello\r\n", "bad_framing"),
    ("a chunk size that ends in LF only (C6)", CHUNKED + b"5\nhello\r\n", "bad_framing"),
    ("no line end after a chunk (C6)", CHUNKED + b"5\r\nhelloXX0\r\n\r\n", "bad_framing"),
]  # fmt: skip


@pytest.mark.parametrize("name, data, reason", REFUSED, ids=[row[0] for row in REFUSED])
def test_a_broken_response_is_refused_with_the_same_reason_for_every_split(name: str, data: bytes, reason: str) -> None:
    for pieces in ([data], *every_split(data)):
        outcome = parse(pieces)
        assert (outcome.violation, outcome.is_complete) == (reason, False), pieces


def test_body_bytes_before_a_framing_fault_are_still_delivered() -> None:
    """C6: what was good is relayed before the stream is told that it broke."""
    outcome = parse([CHUNKED + b"5\r\nhello\r\nzz\r\n"])
    assert (outcome.body, outcome.violation) == (b"hello", "bad_framing")


@pytest.mark.parametrize("count, reason", [(20, None), (21, "interim_flood"), (500, "interim_flood")])
def test_interim_responses_are_counted(count: int, reason: str | None) -> None:
    """B6."""
    data = head(status=b"103 Early Hints") * count + head(b"Content-Length: 1") + b"x"
    assert parse([data]).violation == reason
    assert parse(data[i : i + 7] for i in range(0, len(data), 7)).violation == reason


LARGE = b"a" * MAX_HEAD_BYTES


@pytest.mark.parametrize(
    "data",
    [
        head(b"X: " + LARGE, b"Content-Length: 0"),
        head(*[b"X: a"] * (MAX_FIELDS + 1)),
        b"HTTP/1.1 200 " + LARGE,
        head(b"X-" + LARGE + b": a"),
    ],
    ids=["one value", "many fields", "the reason phrase", "one name"],
)
@pytest.mark.parametrize("size", [10**9, 30_000, 997])
def test_a_head_beyond_the_limit_is_refused_however_it_arrives(data: bytes, size: int) -> None:
    """B8."""
    assert parse(data[i : i + size] for i in range(0, len(data), size)).violation == "head_too_large"


def test_a_large_body_in_the_read_that_ends_the_head_is_not_a_large_head() -> None:
    """A head that ends at the first byte of a read of 70 kB was once taken for a head of 70 kB."""
    data = head(b"Content-Length: 70000") + b"x" * 70_000
    for cut in range(30, data.index(b"\r\n\r\n") + 6):
        assert parse([data[:cut], data[cut:]]).is_complete


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    data = head() + b"abc"
    assert parse([data]) == Outcome(200, b"abc", False, False, None)
    assert parse([data], at_eof=True) == Outcome(200, b"abc", True, False, None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        head(b"Content-Length: 9") + b"abc",
        CHUNKED + b"5\r\nhel",
        CHUNKED + b"3\r\nabc\r\n",
    ],
)
def test_the_end_of_the_connection_does_not_complete_a_cut_response(data: bytes) -> None:
    """B2, B3, C1, C3, C4."""
    parser = ResponseParser()
    parser.start()
    if data:
        parser.feed(data)
    assert not parser.end_of_stream()
    assert not parser.can_reuse


def test_bytes_without_a_request_are_a_fault_and_the_connection_is_spent() -> None:
    """C146: unsolicited bytes are never part of the next answer."""
    parser = ResponseParser()
    with pytest.raises(ProtocolViolation, match="without a request"):
        parser.feed(head(b"Content-Length: 0"))
    assert not parser.can_reuse


def test_one_parser_serves_one_response_after_the_other() -> None:
    parser = ResponseParser()
    for i in range(3):
        parser.start()
        assert not parser.is_complete
        parser.feed(head(b"Content-Length: 1") + b"%d" % i)
        assert (parser.parts, parser.is_complete, parser.can_reuse) == ([b"%d" % i], True, True)


def test_field_names_are_in_lower_case_and_repeated_fields_stay_apart() -> None:
    parser = ResponseParser()
    parser.start()
    parser.feed(head(b"Set-Cookie: a", b"SET-COOKIE: b", b"Content-Length: 0"))
    assert parser.head is not None
    assert parser.head.headers[:2] == [(b"set-cookie", b"a"), (b"set-cookie", b"b")]
    assert parser.head.get(b"set-cookie") == b"a"
    assert parser.head.get(b"x") is None


@pytest.mark.parametrize("row", rows("http_llhttp_responses.jsonl"))
def test_llhttp_responses_have_one_outcome_at_every_split(row: dict[str, object]) -> None:
    """`reject` rows are refused; `accept` rows are taken, or refused where we are stricter; nothing depends on reads."""
    data = base64.b64decode(str(row["bytes_b64"]))
    at_eof = row.get("ends") == "eof"
    whole = parse([data], at_eof=at_eof)
    for pieces in every_split(data):
        assert parse(pieces, at_eof=at_eof) == whole, pieces
    if row["expect"] == "reject":
        assert whole.violation is not None or (whole.is_complete and not whole.can_reuse)
    if row["expect"] == "accept" and whole.violation is not None:
        assert whole.violation in ("unexpected_101", "bad_framing"), json.dumps(row)
    if row.get("responses") and whole.violation is None:
        assert whole.is_complete or row["expect"] == "unknown"


def test_random_bytes_never_raise_anything_but_a_violation() -> None:
    source = random.Random(7)
    seeds = [row[1] for row in WHOLE] + [row[1] for row in REFUSED]
    for _ in range(3000):
        data = bytearray(source.choice(seeds))
        for _ in range(source.randrange(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        parse([bytes(data)], at_eof=True)


@pytest.mark.parametrize(
    "method, length, expected",
    [
        (b"POST", 5, b"POST /v1/x HTTP/1.1\r\nhost: up\r\na: b\r\ncontent-length: 5\r\n\r\n"),
        (b"POST", 0, b"POST /v1/x HTTP/1.1\r\nhost: up\r\na: b\r\ncontent-length: 0\r\n\r\n"),
        (b"GET", 0, b"GET /v1/x HTTP/1.1\r\nhost: up\r\na: b\r\n\r\n"),
        (b"GET", 2, b"GET /v1/x HTTP/1.1\r\nhost: up\r\na: b\r\ncontent-length: 2\r\n\r\n"),
    ],
)
def test_a_request_has_exactly_one_framing(method: bytes, length: int, expected: bytes) -> None:
    assert request_head(method, b"/v1/x", b"host: up\r\n", [(b"a", b"b")], length) == expected

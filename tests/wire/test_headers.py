"""Which fields pass, and that no text can break a header, a log line or a label."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.headers import (
    MAX_VALUE,
    Headers,
    first,
    for_client,
    for_upstream,
    header_value,
    label_value,
    sane_request_id,
    sane_traceparent,
)


def fields(text: str) -> Headers:
    pairs = [line.partition(": ") for line in text.splitlines() if line]
    return [(name.lower().encode(), value.encode()) for name, _, value in pairs]


@pytest.mark.parametrize(
    "sent",
    [
        "Authorization: Bearer k", "X-Api-Key: k", "Api-Key: k", "Cookie: a=1", "Proxy-Authorization: x",  # C143
        "Connection: keep-alive", "Keep-Alive: timeout=5", "TE: trailers", "Upgrade: h2c", "HTTP2-Settings: x",  # C136
        "Transfer-Encoding: chunked", "Trailer: x", "Proxy-Connection: close", "Proxy-Authenticate: x",
        "Host: gateway", "Content-Length: 5", "Expect: 100-continue", "Accept-Encoding: gzip, br",
        "X-Request-Id: abc", "Traceparent: x", "Prefer: respond-async",
        "X-Gateway-Timing: trailer", "X-Gateway-Anything: 1",
    ],
)  # fmt: skip
def test_what_never_reaches_a_model_server(sent: str) -> None:
    """C136, C143: hop-by-hop, framing, the caller's credentials, what is ours."""
    assert for_upstream(fields(sent + "\nAccept: */*")) == [(b"accept", b"*/*")]


@pytest.mark.parametrize(
    "sent",
    [
        "Content-Type: application/json", "User-Agent: OpenAI/Python 2.54.0", "X-Stainless-Retry-Count: 1",
        "Anthropic-Version: 2026-10-21", "Anthropic-Beta: x", "OpenAI-Beta: assistants=v2", "Accept-Language: *",
    ],
)  # fmt: skip
def test_what_a_model_server_may_see(sent: str) -> None:
    assert for_upstream(fields(sent)) == fields(sent)


@pytest.mark.parametrize(
    "sent",
    [
        "Connection: close\nKeep-Alive: timeout=5\nTransfer-Encoding: chunked\nTrailer: x\nUpgrade: x",
        "Content-Length: 5\nServer: uvicorn\nDate: now",
        "X-Request-Id: theirs\nServer-Timing: x\nX-Accel-Buffering: yes",
        "X-Gateway-Route: forged\nX-Gateway-Upstream: forged",
        "Access-Control-Allow-Origin: *\nAlt-Svc: x\nStrict-Transport-Security: x",
        "Location: http://169.254.169.254/\nWWW-Authenticate: Bearer",
        "Authorization: Bearer upstream-key\nX-Api-Key: upstream-key\nCookie: x",
    ],
)
def test_what_never_reaches_the_caller(sent: str) -> None:
    """B12, B13, C143: our own names never come from upstream, and no key comes back."""
    assert for_client(fields(sent + "\nContent-Type: a/b")) == [(b"content-type", b"a/b")]


def test_what_the_caller_may_see_keeps_its_order_and_its_repetitions() -> None:
    """C132, C136: `Content-Encoding` goes with raw bytes; two `Set-Cookie` stay two; `Retry-After` is the server's word."""
    sent = fields(
        "Set-Cookie: a\nContent-Encoding: gzip\nSet-Cookie: b\nVary: x\nETag: y\nRetry-After: 7\nX-Should-Retry: false"
    )
    assert for_client(sent) == sent


@pytest.mark.parametrize(
    "connection",
    [
        "Connection: X-Secret",
        "Connection: keep-alive, X-Secret",
        "Connection: close,x-secret , other",
        "Connection: keep-alive\nConnection: X-Secret",
        "Connection: Other\nConnection: X-SECRET",
    ],
)
def test_fields_nominated_by_connection_do_not_pass(connection: str) -> None:
    """C136."""
    sent = fields(f"{connection}\nX-Secret: 1\nX-Up: 2")
    assert for_upstream(sent) == [(b"x-up", b"2")]
    assert for_client(sent) == [(b"x-up", b"2")]


def test_the_first_value_counts() -> None:
    assert first(fields("A: 1\nB: 2\nA: 3"), b"a") == b"1"
    assert first([], b"a") is None


@pytest.mark.parametrize(
    "value, expected",
    [
        (b"abc-1_2.3:4@5/6+7=", "abc-1_2.3:4@5/6+7="),
        (b"a" * 128, "a" * 128),
        (b"a" * 129, None),
        (b"", None),
        (b"a b", None),
        (b"a\n", None),
        (b'a"', None),
        ("日本".encode(), None),
        (b"\xff", None),
        (None, None),
    ],
)
def test_a_request_id_is_taken_only_when_it_is_short_and_plain(value: bytes | None, expected: str | None) -> None:
    """C140."""
    assert sane_request_id(value) == expected


TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "value, is_sane",
    [
        (TRACE, True),
        (TRACE.upper(), False),
        (TRACE + b"-x", False),
        (TRACE + b"\n", False),
        (TRACE[:-1], False),
        (b"ff" + TRACE[2:], False),
        (TRACE[:3] + b"0" * 32 + TRACE[35:], False),
        (TRACE[:36] + b"0" * 16 + TRACE[52:], False),
        (None, False),
    ],
)
def test_a_traceparent_is_taken_only_in_its_valid_form(value: bytes | None, is_sane: bool) -> None:
    assert sane_traceparent(value) == (value if is_sane else None)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("fast", b"fast"),
        ("thinking=off, max_tokens=64>256", b"thinking=off, max_tokens=64>256"),
        ("日本", b"%E6%97%A5%E6%9C%AC"),
        ("a\r\nx: y", b"a  x: y"),
        ("a\0b\x7fc", b"a b c"),
        ("half \ud83d", b"half ?"),
        ("100% 日", b"100%25 %E6%97%A5"),
        ("a" * 5000, b"a" * MAX_VALUE),
    ],
)
def test_any_text_becomes_a_header_value(text: str, expected: bytes) -> None:
    """C141, L10: CR, LF or a character beyond latin-1 once cost the whole response."""
    assert header_value(text) == expected


@given(st.text(st.characters(exclude_categories=()), max_size=2000))
def test_a_header_value_is_always_plain_and_short(text: str) -> None:
    value = header_value(text)
    assert len(value) <= MAX_VALUE
    assert all(0x20 <= byte < 0x7F for byte in value)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("中文模型", "中文模型"),
        ("a\nb", "a\ufffdb"),
        ("\ud83d", "?"),
        ("a" * 500, "a" * 128),
    ],
)
def test_any_text_becomes_a_label(text: str, expected: str) -> None:
    """C109, L7: one surrogate in a label once killed the whole metrics page."""
    assert label_value(text) == expected


@given(st.text(st.characters(exclude_categories=()), max_size=300), st.integers(1, 200))
def test_a_label_is_always_encodable_and_short(text: str, limit: int) -> None:
    value = label_value(text, limit)
    assert len(value) <= limit
    assert not any(character < " " or character == "\x7f" for character in value.encode().decode())

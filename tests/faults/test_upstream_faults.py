"""Tables A, B and C of the fault catalogue: one row per fault, each as a plain call and as a stream.

What must hold after every one of them is in `tests/support/faulty.py`.
"""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import pytest
import trustme

from tests.support.faulty import faulty
from tests.support.plays import End, sends, streams
from tests.support.raw import DONE, LAST_CHUNK, STREAM_HEAD, Handler, answer, chat, chunk, framed, whole
from tests.support.running import running_gateway, settings_for, until

HELLO = chunk({"content": "hello"})
STOP = chunk(finish="stop")
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["P", "S0"])


def head(*lines: bytes, status: bytes = b"200 OK") -> bytes:
    return b"\r\n".join((b"HTTP/1.1 " + status, *lines, b"", b""))


# --- A: reaching the upstream


@pytest.mark.parametrize(
    "url, reason",
    [
        ("http://nowhere.invalid:8000", "dns"),
        ("http://127.0.0.1:1", "connect_refused"),
        ("http://[::1]:1", "connect_refused"),
    ],
    ids=["A1", "A4", "A4-v6"],
)
@BOTH
async def test_a_server_that_cannot_be_reached(url: str, reason: str, stream: bool) -> None:
    """A1, A4: nothing was sent; told in our form, with the upstream's name and without its address."""
    async with running_gateway(settings_for(url)) as running:
        response = await running.ask(chat(stream=stream))
        assert (response.status, response.error["code"]) == (503, "upstream_unavailable")
        assert "`up`" in response.error["message"]
        assert "127.0.0.1" not in response.error["message"]
        record = await running.last_record()
        assert record["outcome"] == "upstream_error"
        assert record["reason"] in (reason, "connect_failed")
        assert record["attempts"] == 0
        assert await running.metric("gateway_upstream_connects_total", failed="true") == 1
        await running.settled()


class TlsServer:
    """A model server behind TLS, or one that is not, or one that says nothing at all."""

    def __init__(self, context: ssl.SSLContext | None, *, is_silent: bool = False) -> None:
        self._context = context
        self._is_silent = is_silent
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._context)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await until(lambda: not self._writers)
        await asyncio.sleep(0.01)  # closing takes a turn of the loop

    @property
    def open(self) -> int:
        return len(self._writers)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(65536):
                if not self._is_silent:
                    writer.write(whole(answer() if b"POST" in data else b"{}"))
        except ConnectionError:
            pass
        finally:
            writer.close()
            self._writers.discard(writer)


def context_of(authority: trustme.CA, *names: str, expired: bool = False) -> ssl.SSLContext:
    last = datetime.now(UTC) - timedelta(days=1) if expired else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names, not_before=datetime.now(UTC) - timedelta(days=9), not_after=last).configure_cert(
        context
    )
    return context


OURS, THEIRS = trustme.CA(), trustme.CA()
TLS_FAULTS = ["expired", "wrong host", "unknown authority", "plain HTTP"]


@pytest.mark.parametrize("fault", TLS_FAULTS)
async def test_tls_that_cannot_be_trusted(fault: str, tmp_path: Path) -> None:
    """A8: never a fallback to unverified or to plain."""
    contexts = {
        "expired": context_of(OURS, "127.0.0.1", expired=True),
        "wrong host": context_of(OURS, "other.test"),
        "unknown authority": context_of(THEIRS, "127.0.0.1"),
        "plain HTTP": None,
    }
    OURS.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with TlsServer(contexts[fault]) as server:
        tls = {"tls": {"ca_file": str(tmp_path / "ca.pem")}}
        async with running_gateway(settings_for(server.url), upstream=tls) as running:
            response = await running.ask(chat())
            assert (response.status, response.error["code"]) == (503, "upstream_unavailable")
            assert "TLS" in response.error["message"]
            assert "127.0.0.1" not in response.error["message"]
            assert (await running.last_record())["reason"] == "tls"
            await running.settled()


@pytest.mark.parametrize("name", [None, "model.test"], ids=["by address", "by server_name"])
async def test_tls_that_can_be_trusted_is_used(name: str | None, tmp_path: Path) -> None:
    """A8: with SNI and verification against the configured authority, and reused like any connection."""
    asked: list[str | None] = []
    context = context_of(OURS, name or "127.0.0.1")
    context.sni_callback = lambda connection, server_name, _: asked.append(server_name)
    OURS.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with TlsServer(context) as server:
        tls = {"tls": {"ca_file": str(tmp_path / "ca.pem"), "server_name": name}}
        async with running_gateway(settings_for(server.url), upstream=tls) as running:
            assert (await running.ask(chat(stream=False))).status == 200
            assert name is None or name in asked
            await running.settled()


async def test_a_tls_handshake_that_stalls_ends_within_the_connect_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A8."""
    monkeypatch.setattr("gateway.upstream.watch.PROBE_TIMEOUT_S", 0.1)
    async with TlsServer(None, is_silent=True) as server:
        settings = settings_for(server.url, route={"timeouts": {"connect_ms": 200}})
        async with running_gateway(settings) as running:
            response = await running.ask(chat())
            assert (response.status, response.error["code"]) == (503, "upstream_unavailable")
            assert (await running.last_record())["reason"] == "connect_timeout"
            await running.settled()
            await until(lambda: server.open <= 1)  # the health check's own


# --- B: the response's head. (id, bytes, how it ends, reason)

BAD_HEADS: list[tuple[str, bytes, End, str]] = [
    ("B1 reset", b"", "reset", "reset_no_bytes"),
    ("B2 close", b"", "close", "eof_no_bytes"),
    ("B3 cut", b"HTTP/1.1 200 OK\r\nContent-Le", "close", "eof_in_head"),
    ("B4 SSH", b"SSH-2.0-OpenSSH_9.2\r\n", "open", "not_http"),
    ("B4 TLS alert", b"\x15\x03\x01\x00\x02\x02\x46", "open", "not_http"),
    ("B4 HTTP/0.9", b"<html>hello</html>", "close", "not_http"),
    ("B5 letters", head(b"content-length: 0", status=b"abc OK"), "open", "bad_status"),
    ("B5 999", head(b"content-length: 0", status=b"999 Odd"), "open", "bad_status"),
    ("B5 600", head(b"content-length: 0", status=b"600 Odd"), "open", "bad_status"),
    ("B6", head(status=b"100 Continue") * 500 + whole(answer()), "open", "interim_flood"),
    ("B7", head(b"upgrade: x", b"connection: upgrade", status=b"101 Switching Protocols"), "open", "unexpected_101"),
    ("B8 value", head(b"x: " + b"a" * 400_000), "open", "head_too_large"),
    ("B8 fields", head(*[b"x: a"] * 5000), "open", "head_too_large"),
    ("B9 two lengths", head(b"content-length: 1", b"content-length: 2") + b"ab", "open", "bad_framing"),
    ("B9 negative", head(b"content-length: -1") + b"a", "open", "bad_framing"),
    ("B9 no digits", head(b"content-length: five") + b"a", "open", "bad_framing"),
    ("B9 unknown coding", head(b"transfer-encoding: xz") + b"a", "open", "bad_framing"),
    ("B9 gzip, chunked", head(b"transfer-encoding: gzip, chunked") + LAST_CHUNK, "open", "bad_framing"),
    ("B10", head(b"content-length: 5", b"transfer-encoding: chunked") + LAST_CHUNK, "open", "bad_framing"),
    ("B11 NUL", head(b"x: a\0b", b"content-length: 0"), "open", "bad_header"),
    ("B11 CR", head(b"x: a\rb", b"content-length: 0"), "open", "bad_header"),
    ("B12 inward", head(b"location: http://169.254.169.254/", b"content-length: 0", status=b"307 T"), "open", "redirect"),
    ("B12 same host", head(b"location: /v2/", b"content-length: 0", status=b"301 M"), "open", "redirect"),
    ("B18 HTML", whole(b"<html></html>", headers="content-type: text/html; charset=utf-8"), "open", "content_type"),
]  # fmt: skip


@pytest.mark.parametrize("name, data, end, reason", BAD_HEADS, ids=[row[0] for row in BAD_HEADS])
@BOTH
async def test_a_head_that_cannot_be_used(
    name: str, data: bytes, end: End, reason: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """B1 to B12, B18: 502 in our form, one upstream request, the connection never used again."""
    async with faulty(sends(data, end=end) if data else sends(end=end), caplog) as fault:
        response = await fault.ask(stream=stream)
        assert (response.status, response.error["code"]) == (502, "upstream_bad_response")
        assert response.error["type"] == "upstream_error"
        assert "`up`" in response.error["message"] or reason in ("redirect", "content_type")
        assert response.header("location") is None
        record = await fault.running.last_record()
        assert (record["reason"], record["status"]) == (reason, 502)
        assert len(fault.upstream.requests) == 1
        assert fault.running.gateway.runtime.upstreams["up"].pool.idle == 0 or reason in ("redirect", "content_type")
        assert await fault.running.metric("gateway_upstream_failures_total", reason=reason) == 1


@pytest.mark.parametrize(
    "name, data, reason",
    [(row[0], row[1], row[3]) for row in BAD_HEADS if 0 < len(row[1]) < 100],
    ids=[row[0] for row in BAD_HEADS if 0 < len(row[1]) < 100],
)
async def test_a_bad_head_one_byte_at_a_time(
    name: str, data: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The verdict is that of the bytes, not of the reads."""
    pieces = [data[i : i + 1] for i in range(len(data))]
    async with faulty(sends(*pieces, end="close"), caplog) as fault:
        assert (await fault.ask(stream=True)).status == 502
        assert (await fault.running.last_record())["reason"] == reason


async def test_a_few_interim_responses_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """B6, C146: a 1xx before the 200."""
    data = head(status=b"100 Continue") + head(b"link: x", status=b"103 Early Hints") + whole(answer())
    async with faulty(sends(data), caplog) as fault:
        response = await fault.ask(stream=False)
        assert (response.status, response.body) == (200, answer())


MISMATCHES: list[tuple[str, bool, bytes, str]] = [
    ("B20 JSON for a stream", True, whole(answer()), "mode_mismatch"),
    ("B20 a stream for JSON", False, STREAM_HEAD + framed(HELLO + STOP + DONE) + LAST_CHUNK, "mode_mismatch"),
    ("B18 no type, no JSON", False, whole(b"hello", headers=""), "content_type"),
    ("B18 text", False, whole(b"it works", headers="content-type: text/plain"), "content_type"),
    ("an empty body", False, whole(b""), "content_type"),
    ("an empty stream", True, STREAM_HEAD + LAST_CHUNK, "no_finish"),
]  # fmt: skip


@pytest.mark.parametrize("name, stream, data, reason", MISMATCHES, ids=[row[0] for row in MISMATCHES])
async def test_the_wrong_kind_of_answer_is_never_forwarded(
    name: str, stream: bool, data: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B18, B20: JSON in 2xx for a stream is zero chunks and no exception in every SDK (client-contract §1 rule 13)."""
    async with faulty(sends(data), caplog) as fault:
        response = await fault.ask(stream=stream)
        assert (response.status, response.error["code"]) == (502, "upstream_bad_response")
        assert (await fault.running.last_record())["reason"] == reason


# --- C: body and stream. (id, bytes, how it ends, reason of the plain call, reason of the stream)

PLAIN = head(b"content-type: application/json", b"transfer-encoding: chunked")
CUTS: list[tuple[str, bytes, End, str]] = [
    ("C1", whole(answer())[:-5], "close", "body_cut"),
    ("C3", PLAIN + b"5\r\nhel", "close", "body_cut"),
    ("C4", PLAIN + framed(answer()), "close", "body_cut"),
    ("C5", PLAIN + framed(answer()), "reset", "reset_mid"),
    ("C6 letters", PLAIN + framed(b"{") + b"zz\r\n", "open", "bad_framing"),
    ("C6 negative", PLAIN + framed(b"{") + b"-5\r\nhello\r\n", "open", "bad_framing"),
    ("C6 0x", PLAIN + framed(b"{") + b"0x5\r\nhello\r\n", "open", "bad_framing"),
    ("C6 underscore", PLAIN + framed(b"{") + b"5_0\r\nhello\r\n", "open", "bad_framing"),
    ("C6 17 digits", PLAIN + framed(b"{") + b"f" * 17 + b"\r\nhello\r\n", "open", "bad_framing"),
    ("C6 LF only", PLAIN + framed(b"{") + b"5\nhello\n", "open", "bad_framing"),
    ("C6 no CRLF after data", PLAIN + b"5\r\nhelloworld", "open", "bad_framing"),
]  # fmt: skip


@pytest.mark.parametrize("name, data, end, reason", CUTS, ids=[row[0] for row in CUTS])
async def test_a_plain_body_that_breaks_is_never_a_shorter_answer(
    name: str, data: bytes, end: End, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C1 to C6: nothing was forwarded yet, so the caller gets a 502 and no half JSON."""
    async with faulty(sends(data, end=end), caplog) as fault:
        response = await fault.ask(stream=False)
        assert (response.status, response.error["code"]) == (502, "upstream_bad_response")
        record = await fault.running.last_record()
        assert (record["outcome"], record["reason"]) == ("upstream_truncated", reason)


BROKEN_STREAMS: list[tuple[str, bytes, End, str]] = [
    ("C3", b"5\r\nhel", "close", "body_cut"),
    ("C4", b"", "close", "body_cut"),
    ("C5", b"", "reset", "reset_mid"),
    ("C6 letters", b"zz\r\n", "open", "bad_framing"),
    ("C6 0x", b"0x5\r\nhello\r\n", "open", "bad_framing"),
    ("C6 LF only", b"5\nhello\n", "open", "bad_framing"),
    ("C6 no CRLF after data", framed(b": x\n\n")[:-2] + b"XX", "open", "bad_framing"),
    ("C9", LAST_CHUNK, "open", "no_finish"),
]  # fmt: skip


@pytest.mark.parametrize("name, data, end, reason", BROKEN_STREAMS, ids=[row[0] for row in BROKEN_STREAMS])
async def test_a_stream_that_breaks_after_it_began(
    name: str, data: bytes, end: End, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C3 to C9, phase S1: everything that came is delivered, then one error event, `[DONE]`, a clean end."""
    pieces = [STREAM_HEAD + framed(HELLO), *([data] if data else [])]
    async with faulty(sends(*pieces, end=end), caplog) as fault:
        response = await fault.ask(stream=True)
        assert response.status == 200
        assert response.is_whole
        assert response.body.startswith(HELLO)
        assert response.body.endswith(b"}}\n\n" + DONE)
        assert response.body.count(b'"error"') == 1
        assert response.error["code"] == "upstream_bad_response"
        record = await fault.running.last_record()
        assert (record["outcome"], record["reason"], record["status"]) == ("upstream_truncated", reason, 200)


PASSED: list[tuple[str, list[bytes], bytes]] = [
    ("C10 no [DONE]", [HELLO, STOP], HELLO + STOP),
    ("C11 two [DONE]", [HELLO, STOP, DONE, DONE], HELLO + STOP + DONE),
    ("C12 data after [DONE]", [HELLO, STOP, DONE, HELLO], HELLO + STOP + DONE),
    ("C14 not JSON", [HELLO, b"data: {oops\n\n", STOP, DONE], HELLO + b"data: {oops\n\n" + STOP + DONE),
    ("C19 BOM", [b"\xef\xbb\xbf" + HELLO, STOP, DONE], b"\xef\xbb\xbf" + HELLO + STOP + DONE),
    ("C19 odd fields", [b"foo: bar\nretry: x\n\n", HELLO, STOP, DONE], b"foo: bar\nretry: x\n\n" + HELLO + STOP + DONE),
    ("C19 empty data", [b"data: \n\n", HELLO, STOP, DONE], b"data: \n\n" + HELLO + STOP + DONE),
    ("C20 null delta", [b'data: {"choices":[{"index":0,"delta":null}]}\n\n', HELLO, STOP, DONE],
     b'data: {"choices":[{"index":0,"delta":null}]}\n\n' + HELLO + STOP + DONE),
    ("C20 odd types", [b'data: {"choices":{"a":1}}\n\n', b"data: 7\n\n", b"data: []\n\n", HELLO, STOP, DONE],
     b'data: {"choices":{"a":1}}\n\ndata: 7\n\ndata: []\n\n' + HELLO + STOP + DONE),
]  # fmt: skip


@pytest.mark.parametrize("name, events, expected", PASSED, ids=[row[0] for row in PASSED])
async def test_odd_but_whole_streams_pass(
    name: str, events: list[bytes], expected: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """C10 to C20: as they came, and complete; nothing leaves after the end mark."""
    async with faulty(streams(*events), caplog) as fault:
        response = await fault.ask(stream=True)
        assert (response.status, response.body) == (200, expected)
        assert (await fault.running.last_record())["outcome"] == "complete"


BODILESS: list[tuple[str, Handler, int, bytes]] = [
    ("C23 trailers", sends(PLAIN + framed(answer()) + b"0\r\nX-Evil: 1\r\n\r\n"), 200, answer()),
    ("C2 longer than its length", sends(whole(answer()) + b"surplus"), 200, answer()),
    ("no length, ends with the connection", sends(head(b"content-type: application/json") + answer(), end="close"), 200, answer()),
]  # fmt: skip


@pytest.mark.parametrize("name, handler, status, body", BODILESS, ids=[row[0] for row in BODILESS])
async def test_what_lies_beyond_a_body_is_dropped(
    name: str, handler: Handler, status: int, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """C2, C23, C24."""
    async with faulty(handler, caplog) as fault:
        response = await fault.ask(stream=False)
        assert (response.status, response.body) == (status, body)
        assert response.header("x-evil") is None


async def test_a_body_where_none_may_be_is_dropped_and_spends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """C24, on a path whose answers are relayed unread."""
    data = head(b"content-length: 0", status=b"204 No Content") + b"surplus"
    async with faulty(sends(data), caplog) as fault, fault.running.client() as client:
        for _ in range(2):
            response = await client.ask(b'{"model":"m"}', "/v1/audio/speech")
            assert (response.status, response.body) == (204, b"")
            assert response.header("content-length") is None
            fault.responses.append(response)
        assert fault.upstream.connections == 2

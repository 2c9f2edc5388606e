"""One connection to a model server: what its user is told, and when it may serve again."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from gateway.upstream.connection import describe_connect_error
from tests.support.links import Clock, Recorder, linked

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_a_request_goes_out_in_one_write_and_its_answer_comes_in_order() -> None:
    connection, transport, _ = linked(Clock())
    sink = Recorder()
    connection.send(b"HEAD", b"body", sink)
    connection.data_received(OK[:30])
    connection.data_received(OK[30:])
    assert transport.written == [b"HEADbody"]
    assert sink.calls == ["sent", 200, b"abc", "end"]
    assert connection.can_reuse


async def test_a_large_body_is_not_copied_behind_its_head() -> None:
    connection, transport, _ = linked(Clock())
    body = b"x" * 70_000
    connection.send(b"HEAD", body, Recorder())
    assert transport.written == [b"HEAD", body]


async def test_sent_is_told_when_the_last_byte_has_left() -> None:
    connection, transport, _ = linked(Clock(), stuck=True)
    sink = Recorder()
    connection.send(b"HEAD", b"body", sink)
    assert sink.calls == []
    transport.stuck = False
    connection.resume_writing()
    assert sink.calls == ["sent"]


async def test_an_answer_before_the_request_was_read_to_its_end_spends_the_connection() -> None:
    """A12: the rest of the old body would be read as the next request."""
    connection, _, _ = linked(Clock(), stuck=True)
    sink = Recorder()
    connection.send(b"HEAD", b"body", sink)
    connection.data_received(OK)
    assert sink.calls == [200, b"abc", "end"]
    assert not connection.can_reuse


@pytest.mark.parametrize(
    "received, error, reason",
    [
        (b"", None, "eof_no_bytes"),
        (b"", ConnectionResetError(), "reset_no_bytes"),
        (b"HTTP/1.1 200 OK\r\nConte", None, "eof_in_head"),
        (OK[:-1], None, "body_cut"),
        (OK[:-1], ConnectionResetError(), "reset_mid"),
        (CHUNKED + b"3\r\nabc\r\n", None, "body_cut"),
    ],
)
async def test_a_lost_connection_says_how_far_it_came(received: bytes, error: Exception | None, reason: str) -> None:
    connection, _, closed = linked(Clock())
    sink = Recorder()
    connection.send(b"HEAD", b"", sink)
    if received:
        connection.data_received(received)
    connection.connection_lost(error)
    assert sink.lost.reason == reason
    assert sink.lost.bytes_received == len(received)
    assert not sink.lost.is_stale
    assert closed == [connection]


@pytest.mark.parametrize("received, is_stale", [(b"", True), (b"H", False)])
async def test_a_reused_connection_that_dies_is_stale_only_before_the_first_byte(
    received: bytes, is_stale: bool
) -> None:
    """R1 of fault-catalogue §3.1: bytes are counted, exceptions do not tell."""
    connection, _, _ = linked(Clock())
    connection.send(b"HEAD", b"", Recorder())
    connection.data_received(OK)
    connection.detach()
    sink = Recorder()
    connection.send(b"HEAD", b"", sink)
    if received:
        connection.data_received(received)
    connection.connection_lost(None)
    assert sink.lost.is_stale is is_stale


async def test_a_body_without_length_ends_with_the_connection_and_only_once() -> None:
    connection, _, closed = linked(Clock())
    sink = Recorder()
    connection.send(b"HEAD", b"", sink)
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nabc")
    connection.eof_received()
    connection.connection_lost(None)
    assert sink.calls == ["sent", 200, b"abc", "end"]
    assert closed == [connection]
    assert not connection.can_reuse


async def test_bytes_after_a_whole_answer_never_reach_its_user() -> None:
    """A11: the user has its answer and has not let go of the connection yet."""
    connection, transport, _ = linked(Clock())
    sink = Recorder()
    connection.send(b"HEAD", b"", sink)
    connection.data_received(OK)
    connection.data_received(OK)
    assert sink.calls == ["sent", 200, b"abc", "end"]
    assert not connection.can_reuse
    assert transport.closing


async def test_bytes_on_an_idle_connection_close_it() -> None:
    """C146: an answer without a request is nobody's."""
    connection, transport, _ = linked(Clock())
    connection.send(b"HEAD", b"", Recorder())
    connection.data_received(OK)
    connection.detach()
    connection.data_received(OK)
    assert transport.closing
    assert not connection.can_reuse


async def test_a_closed_connection_tells_its_user_nothing_more() -> None:
    connection, transport, closed = linked(Clock())
    sink = Recorder()
    connection.send(b"HEAD", b"", sink)
    connection.close()
    connection.close()
    connection.data_received(OK)
    await asyncio.sleep(0)
    assert transport.closing
    assert sink.calls == ["sent"]
    assert closed == [connection]


async def test_a_user_that_closes_at_the_head_gets_no_body() -> None:
    connection, _, _ = linked(Clock())

    class Refusing(Recorder):
        def on_head(self, head: object, now: int) -> None:
            self.calls.append("refused")
            connection.close()

    sink = Refusing()
    connection.send(b"HEAD", b"", sink)
    connection.data_received(OK)
    assert sink.calls == ["sent", "refused"]


async def test_a_framing_fault_delivers_what_was_good_first() -> None:
    connection, transport, _ = linked(Clock())
    sink = Recorder()
    connection.send(b"HEAD", b"", sink)
    connection.data_received(CHUNKED + b"3\r\nabc\r\nzz\r\n")
    assert sink.calls[:3] == ["sent", 200, b"abc"]
    assert sink.lost.reason == "bad_framing"
    assert transport.closing


async def test_reading_pauses_and_resumes_and_a_returned_connection_reads_again() -> None:
    connection, transport, _ = linked(Clock())
    connection.send(b"HEAD", b"", Recorder())
    connection.pause_reading()
    connection.pause_reading()
    assert not transport.reading
    connection.resume_reading()
    connection.resume_reading()
    assert transport.reading
    connection.pause_reading()
    connection.detach()
    assert transport.reading
    connection.close()
    connection.pause_reading()
    assert transport.reading
    assert "closed" not in repr(connection)


@pytest.mark.parametrize(
    "error, reason",
    [
        (ConnectionRefusedError(), "connect_refused"),
        (TimeoutError(), "connect_timeout"),
        (ssl.SSLCertVerificationError(), "tls"),
        (ssl.SSLError(), "tls"),
        (ConnectionResetError(), "connect_failed"),
        (OSError(113, "No route to host"), "connect_failed"),
        (ValueError("10.0.0.5"), "connect_failed"),
    ],
)
def test_connect_errors_have_a_word_each_and_hold_no_address(error: Exception, reason: str) -> None:
    """C031: an empty exception text must not make an empty log line."""
    found, sentence = describe_connect_error(error)
    assert found == reason
    assert sentence
    assert "10.0.0.5" not in sentence


def test_a_certificate_for_another_address_is_refused_without_naming_ours() -> None:
    """Invariant 7 of fault-catalogue part 5: an error holds the upstream's name, never its address."""
    error = ssl.SSLCertVerificationError()
    error.verify_message = "IP address mismatch, certificate is not valid for '10.0.0.5'"
    assert describe_connect_error(error) == ("tls", "its TLS certificate was not accepted (IP address mismatch)")

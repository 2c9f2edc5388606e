"""Which failures of one model server another one makes good, and which it must not (fault-catalogue 3.1 and part 5)."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.fleets import GONE_URL, HELLO, ROLE, STOP, STREAM, Fleet, fleet, good, refuses
from tests.support.plays import sends, silence, streams
from tests.support.raw import DONE, LAST_CHUNK, STREAM_HEAD, Handler, Received, Response, Wire, framed, whole

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
Log = pytest.LogCaptureFixture


def is_whole(response: Response, *, stream: bool) -> bool:
    if stream:
        return response.status == 200 and response.body == STREAM
    return response.status == 200 and response.json["choices"][0]["message"]["content"] == "hello"


async def was_made_good(found: Fleet, reason: str, *, stream: bool, sent: int = 2) -> None:
    """`second` answered for `first`, the caller is told in headers alone, and the record says why."""
    response = await found.ask(stream=stream)
    assert is_whole(response, stream=stream), response.body
    assert response.header("x-gateway-upstream") == "second"
    assert response.header("x-gateway-attempts") == str(sent)
    assert response.header("x-gateway-failures") == f"first={reason}"
    record = await found.running.last_record()
    assert record["failures"] == [f"first={reason}"]
    assert (record["outcome"], record["upstream"], record["attempts"]) == ("complete", "second", sent)
    assert await found.running.metric("gateway_upstream_failures_total", upstream="first", reason=reason) == 1
    assert await found.running.metric("gateway_attempts_total", kind="retry") == 1
    assert await found.running.metric("gateway_attempts_total", kind="first") == sent - 1


@BOTH
@pytest.mark.parametrize("url, reason", [(GONE_URL, "connect_refused"), ("http://nowhere.invalid", "dns")])
async def test_a_server_that_cannot_be_reached(url: str, reason: str, stream: bool, caplog: Log) -> None:
    """A1, A4, R0: nothing left us, so the next one is asked at once and nothing is paid for it."""
    async with fleet(caplog, second=good, gone={"first": url}) as found:
        extra = found.gateway.runtime.fleet.extra
        await was_made_good(found, reason, stream=stream, sent=1)
        assert extra.retries == 0


LOST: dict[str, tuple[Handler, str]] = {
    "B1": (sends(end="reset"), "reset_no_bytes"),
    "B2": (sends(end="close"), "eof_no_bytes"),
    "B14 500": (refuses("500 Internal Server Error"), "http_5xx"),
    "B14 502": (refuses("502 Bad Gateway"), "http_5xx"),
    "B14 503": (refuses("503 Service Unavailable"), "http_5xx"),
    "B14 504": (refuses("504 Gateway Timeout"), "http_5xx"),
    "B15": (refuses("503 Service Unavailable", headers="\r\nretry-after: 7"), "http_5xx"),
    "B15 429": (refuses("429 Too Many Requests", headers="\r\nretry-after: 7"), "http_4xx"),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("case", LOST)
async def test_a_server_that_did_not_answer(case: str, stream: bool, caplog: Log) -> None:
    """R2, R3: one other upstream, for a token."""
    play, reason = LOST[case]
    async with fleet(caplog, first=play, second=good) as found:
        await was_made_good(found, reason, stream=stream)
        assert found.gateway.runtime.fleet.extra.retries == 1


@pytest.mark.parametrize("cut", [b'HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{"x":'], ids=["C1"])
async def test_a_plain_answer_that_was_cut(cut: bytes, caplog: Log) -> None:
    """C1: nothing of it went out, so another may answer."""
    async with fleet(caplog, first=sends(cut, end="close"), second=good) as found:
        await was_made_good(found, "body_cut", stream=False)


@pytest.mark.parametrize("end", ["half", "reset"], ids=["C3", "C5"])
async def test_a_stream_that_was_cut_before_its_first_token(end: str, caplog: Log) -> None:
    """C3, C5, C032 second run: the role chunk was held back, so the caller sees one, of the answer it gets."""
    play = streams(ROLE, end="half" if end == "half" else "reset")
    async with fleet(caplog, first=play, second=good) as found:
        await was_made_good(found, "body_cut" if end == "half" else "reset_mid", stream=True)


@pytest.mark.parametrize("end", ["half", "reset"], ids=["C3", "C5"])
async def test_a_stream_that_was_cut_after_its_first_token(end: str, caplog: Log) -> None:
    """R4, C032 first run: what went out is not sent twice; the caller is told inside the stream."""
    play = streams(ROLE, HELLO, end="half" if end == "half" else "reset")
    async with fleet(caplog, first=play, second=good) as found:
        response = await found.ask(stream=True)
        assert response.body.startswith(ROLE + HELLO)
        assert response.body.count(b'"role"') == 1
        assert response.error["code"] == "upstream_bad_response"
        assert response.body.endswith(DONE)
        assert (found.asked("first"), found.asked("second")) == (1, 0)
        assert found.breaker("first")["errors"] == 1, "the stream's end counts, not its opening"


NEVER: dict[str, tuple[Handler, int]] = {
    "B3": (sends(b"HTTP/1.1 200 OK\r\nContent-Le", end="close"), 502),
    "B4": (sends(b"SSH-2.0-x\r\n\r\n", end="close"), 502),
    "B16 400": (refuses("400 Bad Request"), 400),
    "B16 401": (refuses("401 Unauthorized"), 401),
    "B16 403": (refuses("403 Forbidden"), 403),
    "B16 404": (refuses("404 Not Found"), 404),
    "B16 413": (refuses("413 Content Too Large"), 413),
    "B16 422": (refuses("422 Unprocessable Content"), 422),
}


@BOTH
@pytest.mark.parametrize("case", NEVER)
async def test_what_was_refused_is_refused(case: str, stream: bool, caplog: Log) -> None:
    """R6: the same request would get the same answer, or an answer that cannot be trusted."""
    play, status = NEVER[case]
    async with fleet(caplog, first=play, second=good) as found:
        response = await found.ask(stream=stream)
        assert response.status == status
        assert (found.asked("first"), found.asked("second")) == (1, 0)
        assert response.header("x-gateway-failures") is None
        assert found.breaker("first")["errors"] == (status == 502), "a caller's mistake is no upstream's failure"


@pytest.mark.parametrize("play", [silence, sends(STREAM_HEAD)], ids=["A6", "B22"])
async def test_a_slow_server_is_not_asked_twice(play: Handler, caplog: Log) -> None:
    """R5, C033: what is too slow was generated once; hedging and fallback are for that."""
    async with fleet(caplog, first=play, second=good, route={"timeouts": {"first_token_ms": 80}}) as found:
        response = await found.ask(stream=True)
        assert (response.status, response.error["code"]) == (504, "upstream_timeout")
        assert (found.asked("first"), found.asked("second")) == (1, 0)
        assert found.breaker("first")["errors"] == 1


@BOTH
async def test_a_connection_that_was_closed_while_it_idled(stream: bool, caplog: Log) -> None:
    """R1: the same upstream on a fresh connection; no failure of anybody's."""

    async def play(request: Received, wire: Wire) -> None:
        if wire.served == 1:
            await good(request, wire)
        else:
            wire.close()

    async with fleet(caplog, first=play) as found:
        assert is_whole(await found.ask(stream=stream), stream=stream)
        response = await found.ask(stream=stream)
        assert is_whole(response, stream=stream)
        assert response.header("x-gateway-attempts") == "2"
        assert response.header("x-gateway-failures") is None
        assert await found.running.metric("gateway_attempts_total", kind="reconnect") == 1
        assert found.breaker("first")["errors"] == 0


@BOTH
async def test_what_may_not_run_twice_is_not_sent_twice(stream: bool, caplog: Log) -> None:
    """R2 on a route that says `idempotent: false`: part of it may have been executed."""
    async with fleet(caplog, first=sends(end="reset"), second=good, route={"idempotent": False}) as found:
        assert (await found.ask(stream=stream)).status == 502
        assert found.asked("second") == 0


async def test_a_server_that_asks_for_a_rest_gets_it(caplog: Log) -> None:
    """B15: the next requests go elsewhere until its time is over; the breaker does not count it."""
    busy = refuses("429 Too Many Requests", headers="\r\nretry-after: 30")
    async with fleet(caplog, first=busy, second=good) as found:
        for _ in range(6):
            assert (await found.ask()).status == 200
        assert found.asked("first") == 1
        assert found.breaker("first")["errors"] == 0


async def test_a_server_that_reads_its_model_is_no_failure(caplog: Log) -> None:
    """B17: llama.cpp's word for it."""
    loading = refuses(
        "503 Service Unavailable", b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
    )
    async with fleet(caplog, first=loading, second=good) as found:
        assert (await found.ask()).header("x-gateway-failures") == "first=http_5xx"
        assert found.breaker("first")["errors"] == 0


@BOTH
async def test_two_servers_that_fail_give_the_last_word_of_a_server(stream: bool, caplog: Log) -> None:
    """C037, B14: no third attempt, and what a server said beats that another said nothing."""
    async with fleet(caplog, first=refuses("503 Service Unavailable"), second=sends(end="reset"), third=good) as found:
        response = await found.ask(stream=stream)
        assert response.status == 503
        assert response.json["error"]["message"] == "no"
        assert response.header("x-gateway-upstream") == "first"
        assert response.header("x-gateway-failures") == "second=reset_no_bytes"
        assert found.asked("third") == 0


@BOTH
async def test_a_stricter_second_server_tells_what_it_minds(stream: bool, caplog: Log) -> None:
    """C116: its 400 as it is, the first one's failure in a header, no loop, no blame."""
    strict = refuses("400 Bad Request", b'{"error":{"message":"content must not be empty"}}')
    async with fleet(caplog, first=refuses("503 Service Unavailable"), second=strict) as found:
        response = await found.ask(stream=stream)
        assert response.status == 400
        assert response.json["error"]["message"] == "content must not be empty"
        assert response.header("x-gateway-failures") == "first=http_5xx"
        assert (found.asked("first"), found.asked("second")) == (1, 1)
        assert found.breaker("second")["errors"] == 0


async def test_a_storm_of_errors_does_not_become_a_storm_of_retries(caplog: Log) -> None:
    """B14, 3.5: three retries in ten seconds are always allowed, then one in ten requests."""
    breaker = {"breaker": {"mode": "off"}}
    broken = refuses("500 Internal Server Error")
    async with fleet(caplog, first=broken, second=broken, upstream=breaker) as found:
        for _ in range(40):
            assert (await found.ask()).status == 500
        assert found.asked("first") + found.asked("second") <= 40 + 4


async def test_every_attempt_has_an_id_of_its_own(caplog: Log) -> None:
    """C034"""
    async with fleet(caplog, first=refuses("503 Service Unavailable"), second=good) as found:
        response = await found.ask(headers={"x-request-id": "abc"})
        assert response.header("x-request-id") == "abc"
        ids = {found.upstreams[name].requests[0].header("x-request-id") for name in ("first", "second")}
        assert len(ids) == 2
        assert all(str(sent).startswith("abc-") for sent in ids)


async def test_a_request_that_servers_died_of_is_refused(caplog: Log) -> None:
    """D8: at most two see it, then its callers hear it from us; other bodies are served."""

    async def dies(request: Received, wire: Wire) -> None:
        if b"deadly" in request.body:
            wire.reset()
        else:
            await good(request, wire)

    async with fleet(caplog, first=dies, second=dies) as found:
        assert (await found.ask(content="deadly")).status == 502
        for state in found.gateway.runtime.upstreams.values():
            state.note_restart("refused")
        response = await found.ask(content="deadly")
        assert (response.status, response.error["code"]) == (400, "poison_request")
        assert response.header("x-should-retry") == "false"
        assert (found.asked("first"), found.asked("second")) == (1, 1)
        assert (await found.ask(content="harmless")).status == 200
        assert (await found.ask(content="deadly")).status == 400


async def test_servers_that_reset_connections_make_no_request_deadly(caplog: Log) -> None:
    """D8's other side: a reset is no death."""
    flaky = iter([sends(end="reset"), good, good] * 20)

    async def play(request: Received, wire: Wire) -> None:
        await next(flaky)(request, wire)

    async with fleet(caplog, first=play, second=play) as found:
        statuses = {(await found.ask()).status for _ in range(12)}
        assert statuses <= {200, 502}


async def test_a_full_server_refuses_at_the_door(caplog: Log) -> None:
    """3.4: a slot that comes too late for the caller's deadline is not waited for."""
    free = asyncio.Event()

    async def play(request: Received, wire: Wire) -> None:
        await free.wait()
        await wire.send(whole(b'{"n":1}'))

    async with fleet(caplog, first=play, upstream={"max_inflight": 1, "max_queue_wait_ms": 60_000}) as found:
        running = asyncio.create_task(found.ask())
        while not found.asked("first"):
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.4)  # without a history, as much again as has passed is what is left
        began = time.monotonic()
        refused = await found.ask(headers={"x-request-timeout-ms": "200"})
        assert time.monotonic() - began < 0.1
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert int(refused.header("retry-after") or 0) >= 1
        assert "busy" in refused.error["message"]
        free.set()
        assert (await running).status == 200


async def test_without_a_deadline_the_queue_is_waited_in(caplog: Log) -> None:
    """3.4: the wait fits."""
    async with fleet(caplog, first=good, upstream={"max_inflight": 1}) as found:
        answers = await asyncio.gather(*(found.ask() for _ in range(2)))
        assert [response.status for response in answers] == [200, 200]


def test_the_parts_that_are_played_make_a_whole() -> None:
    assert STREAM == ROLE + HELLO + STOP + DONE
    assert framed(b"x") + LAST_CHUNK == b"1\r\nx\r\n0\r\n\r\n"

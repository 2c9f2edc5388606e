"""Answers that callers come back for: 202 at the budget, and everything that can be asked afterwards."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.playing import serving
from tests.support.raw import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    Handler,
    RawClient,
    RawUpstream,
    Received,
    Response,
    Wire,
    answer,
    chat,
    chunk,
    framed,
    whole,
)
from tests.support.running import Running, until

FIRST, SECOND, STOP = chunk({"content": "a"}), chunk({"content": "b"}), chunk(finish="stop")
STREAM = FIRST + SECOND + STOP + DONE
ASYNC = {"prefer": "respond-async, wait=0"}
KEYS = {
    "keys": [{"name": name, "key": f"key-of-{name}"} for name in ("anna", "ben")],
}
ANNA, BEN = ({"authorization": f"Bearer key-of-{name}"} for name in ("anna", "ben"))
PENDING_FIELDS = {
    "id", "object", "status", "elapsed_ms", "phase", "message", "poll_url", "stream_url",
}  # fmt: skip


class Slow:
    """A model server that holds each answer until the test lets it go."""

    def __init__(self, *, status: str = "200 OK", headers: str = "content-type: application/json") -> None:
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.more = asyncio.Event()
        self.more.set()
        self.status, self.headers = status, headers
        self.closed_at = 0.0

    async def play(self, request: Received, wire: Wire) -> None:
        self.asked.set()
        watching = asyncio.ensure_future(self._watch(wire))
        try:
            await self.go.wait()
            if request.json.get("stream") and self.status == "200 OK":
                await wire.send(STREAM_HEAD, framed(FIRST))
                await self.more.wait()
                await wire.send(framed(SECOND), framed(STOP), framed(DONE), LAST_CHUNK)
            else:
                await wire.send(whole(answer(), self.status, self.headers))
            await asyncio.sleep(0)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, wire: Wire) -> None:
        """Notes when the gateway leaves; nothing else comes while an answer is owed."""
        while not wire.reader.at_eof():
            await asyncio.sleep(0.001)
        self.closed_at = time.monotonic()
        self.go.set()


@asynccontextmanager
async def slowly(slow: Slow | None = None, **more: Any) -> AsyncIterator[tuple[Slow, RawUpstream, Running]]:
    slow = slow or Slow()
    async with serving(slow.play, **more) as (upstream, running):
        yield slow, upstream, running
        slow.go.set()
        slow.more.set()


async def promised(running: Running, body: bytes, headers: Mapping[str, str] = ASYNC, path: str = "") -> str:
    """Asks, takes the 202 and gives the address to poll."""
    told = await running.ask(body, path or "/v1/chat/completions", dict(headers))
    assert told.status == 202, told
    location = told.header("location")
    assert location is not None
    return location


async def events(running: Running, url: str, headers: Mapping[str, str] | None = None) -> Response:
    return await running.get(url, {"accept": "text/event-stream", **(headers or {})})


async def ended(running: Running, url: str, headers: dict[str, str] | None = None) -> Response:
    return await running.get(f"{url}?wait=20", headers)


def without_own(response: Response) -> list[tuple[str, str]]:
    """Fields that do not name this one request or connection."""
    own = ("x-request-id", "server-timing", "date", "transfer-encoding", "content-length", "connection")
    return sorted(field for field in response.headers if field[0] not in own)


@pytest.mark.parametrize("headers", [
    {"prefer": "respond-async, wait=0.05"}, {"x-gateway-pending": "allow"}, {"prefer": 'x="a,b", respond-async;foo'},
], ids=["prefer with wait", "own header", "prefer"])  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
async def test_whoever_opts_in_gets_202_with_everything_to_come_back(headers: dict[str, str], stream: bool) -> None:
    """C121: status, address, and fields of the promise."""
    budget = {"budget": {"ttft_ms": 100, "on_exceed": "pending"}}
    async with slowly(route=budget) as (slow, _, running):
        told = await running.ask(chat(stream=stream), headers=headers)
        assert told.status == 202
        body = told.json
        assert set(body) >= PENDING_FIELDS
        assert (body["object"], body["status"]) == ("gateway.pending", "pending")
        assert body["phase"] in ("queued", "prefill")
        assert told.header("location") == body["poll_url"] == f"/gateway/pending/{body['id']}"
        assert told.header("preference-applied") == "respond-async"
        assert int(told.header("retry-after") or 0) >= 1
        assert all(isinstance(body.get(name, 0), int) for name in ("estimation_ms", "estimation_p90_ms", "elapsed_ms"))
        slow.go.set()
        assert (await ended(running, body["poll_url"])).status == 200
        await running.settled()


async def test_a_route_may_decide_for_its_callers() -> None:
    """C121: `pending: always`."""
    route = {"pending": "always", "budget": {"ttft_ms": 50}}
    async with slowly(route=route) as (slow, _, running):
        url = await promised(running, chat(stream=False), {})
        slow.go.set()
        assert (await ended(running, url)).body == answer()


@pytest.mark.parametrize("headers,pending", [({}, "allow"), ({"prefer": "wait=0.05"}, "allow"), (ASYNC, "never")])
@pytest.mark.parametrize("stream", [True, False])
async def test_nobody_else_ever_sees_a_202(headers: dict[str, str], pending: str, stream: bool) -> None:
    """C121: SDKs take any 2xx for an answer."""
    route = {"pending": pending, "budget": {"ttft_ms": 50, "on_exceed": "pending"}}
    async with slowly(route=route) as (slow, _, running):
        asking = asyncio.ensure_future(running.ask(chat(stream=stream), headers=headers))
        await slow.asked.wait()
        await asyncio.sleep(0.2)
        slow.go.set()
        told = await asking
        assert told.status == 200
        assert told.body.endswith(STREAM if stream else answer())


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_within_the_budget_is_an_ordinary_one(stream: bool) -> None:
    """C121, C126."""
    slow = Slow()
    slow.go.set()
    async with slowly(slow) as (_, _, running):
        told = await running.ask(chat(stream=stream), headers={"prefer": "respond-async, wait=10"})
        assert (told.status, told.body) == (200, STREAM if stream else answer())
        assert (await running.last_record())["outcome"] == "complete"
        assert running.gateway.pendings.running == 0
        await running.settled()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", ["200 OK", "429 Too Many Requests"])
async def test_the_final_answer_is_what_a_direct_call_gets(stream: bool, status: str) -> None:
    slow = Slow(status=status, headers="content-type: application/json\r\nx-own: 1\r\nset-cookie: secret=1")
    async with slowly(slow) as (_, _, running):
        url = await promised(running, chat(stream=stream))
        slow.go.set()
        later = await ended(running, url)
        direct = await running.ask(chat(stream=stream))
        assert (later.status, later.body) == (direct.status, direct.body)
        secret = ("set-cookie", "secret=1")
        assert without_own(later) == [field for field in without_own(direct) if field != secret]
        assert later.header("content-length") == str(len(later.body))
        assert (await running.get(url)).body == later.body  # as often as one likes
        head = await running.get(url, method="HEAD")
        assert (head.status, head.header("content-length")) == (later.status, str(len(later.body)))
        assert (await running.get(url, method="PUT")).status == 405


async def test_what_a_store_could_see_holds_no_secret() -> None:
    """C123: no prompt, no key, no cookie."""
    slow = Slow(headers="content-type: application/json\r\nset-cookie: secret=1\r\nauthorization: Bearer secret")
    async with slowly(slow, **KEYS) as (_, _, running):
        url = await promised(running, chat(stream=False, content="my secret"), {**ASYNC, **ANNA})
        slow.go.set()
        await ended(running, url, ANNA)
        recording = running.gateway.pendings.find(url.rpartition("/")[2])
        assert recording is not None
        assert "secret" not in repr(recording.entry)
        assert "key-of" not in repr(recording.entry)


async def test_several_readers_replay_the_stream_and_follow_it() -> None:
    slow = Slow()
    slow.more.clear()
    async with slowly(slow) as (_, _, running):
        url = await promised(running, chat())
        slow.go.set()
        async with running.client() as early, running.client() as late:
            await early.send(f"GET {url} HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n".encode())
            head = await early.head()
            assert (head.status, head.header("content-type")) == (200, "text/event-stream; charset=utf-8")
            assert await early.piece() == FIRST
            polled = (await running.get(url)).json
            assert (polled["status"], polled["phase"]) == ("pending", "answering")
            await late.send(f"GET {url} HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n".encode())
            await late.head()
            assert await late.piece() == FIRST
            slow.more.set()
            for client in (early, late):
                rest = b""
                while piece := await client.piece():
                    rest += piece
                assert rest == SECOND + STOP + DONE
        assert (await events(running, url)).body == STREAM
        assert (await running.get(url)).body == STREAM


async def test_a_reader_that_leaves_stops_neither_the_request_nor_other_readers() -> None:
    slow = Slow()
    slow.more.clear()
    async with slowly(slow) as (_, _, running):
        url = await promised(running, chat())
        slow.go.set()
        async with running.client() as client:
            await client.send(f"GET {url} HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n".encode())
            await client.head()
            await client.piece()
            client.reset()
        slow.more.set()
        assert (await events(running, url)).body == STREAM


async def test_a_reader_of_events_gets_a_plain_answer_as_one() -> None:
    async with slowly() as (slow, _, running):
        url = await promised(running, chat(stream=False))
        following = asyncio.ensure_future(events(running, url))
        await asyncio.sleep(0.05)
        slow.go.set()
        assert (await following).body == b"data: " + answer() + b"\n\n" + DONE


async def test_a_reader_of_events_is_told_of_an_error_page() -> None:
    """Never a silent empty answer: the refusal of a stream is JSON, and comes as an event."""
    async with slowly(Slow(status="400 Bad Request")) as (slow, _, running):
        url = await promised(running, chat())
        slow.go.set()
        assert (await events(running, url)).body == b"data: " + answer() + b"\n\n" + DONE
        assert (await running.get(url)).status == 400


async def test_a_long_poll_ends_with_the_answer_or_its_time() -> None:
    async with slowly() as (slow, _, running):
        url = await promised(running, chat(stream=False))
        started = time.monotonic()
        assert (await running.get(f"{url}?wait=0.2")).status == 202
        assert 0.15 < time.monotonic() - started < 2
        polling = asyncio.ensure_future(running.get(f"{url}?wait=30"))
        await asyncio.sleep(0.05)
        slow.go.set()
        assert (await polling).body == answer()
        assert (await running.get(f"{url}?wait=nan")).status == 200
        assert (await running.get(f"{url}?wait=x")).status == 422


async def breaks(request: Received, wire: Wire) -> None:
    await asyncio.sleep(0.1)
    wire.reset()


async def breaks_late(request: Received, wire: Wire) -> None:
    await asyncio.sleep(0.1)
    await wire.send(STREAM_HEAD, framed(FIRST))
    await asyncio.sleep(0.02)
    wire.reset()


@pytest.mark.parametrize("handler", [breaks, breaks_late])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_lost_model_server_is_told_and_never_silence(handler: Handler, stream: bool) -> None:
    """C122: failed with its error, for polls and for followers."""
    async with serving(handler, route={"timeouts": {"idle_ms": 500}}) as (_, running):
        url = await promised(running, chat(stream=stream))
        following = asyncio.ensure_future(events(running, url))
        told = await ended(running, url)
        assert told.status >= 500
        assert told.json["status"] == "failed"
        assert set(told.json["error"]) >= {"message", "type", "code", "reason"}
        assert told.header("x-should-retry") == "false"
        body = (await following).body
        assert body.count(b'"error"') == 1
        assert body.endswith(b"\n\n" + DONE)
        assert body.startswith(FIRST) == (stream and handler is breaks_late)
        assert await running.metric("gateway_pending") == 0
        await running.settled()


@pytest.mark.parametrize("has_begun", [False, True])
async def test_delete_closes_the_connection_to_the_model_server_within_100_ms(has_begun: bool) -> None:
    slow = Slow()
    slow.more.clear()
    async with slowly(slow) as (_, _, running):
        url = await promised(running, chat())
        if has_begun:
            slow.go.set()
            await until(lambda: running.gateway.pendings.bytes > 0)
        following = asyncio.ensure_future(events(running, url))
        polling = asyncio.ensure_future(ended(running, url))
        await asyncio.sleep(0.05)
        asked_at = time.monotonic()
        told = await running.get(url, method="DELETE")
        assert (told.status, told.json["status"]) == (200, "cancelled")
        await until(lambda: slow.closed_at > 0)
        assert slow.closed_at - asked_at < 0.1
        assert ((await polling).status, (await polling).json["status"]) == (410, "cancelled")
        assert b'"error"' in (await following).body
        assert (await running.get(url, method="DELETE")).json["status"] == "cancelled"
        assert (await running.last_record())["outcome"] == "client_cancelled"
        assert await running.metric("gateway_pending") == 0
        await running.settled()


async def test_delete_leaves_what_is_done() -> None:
    """C126: done is never overwritten."""
    async with slowly() as (slow, _, running):
        url = await promised(running, chat(stream=False))
        slow.go.set()
        await ended(running, url)
        assert (await running.get(url, method="DELETE")).json["status"] == "done"
        assert (await running.get(url)).body == answer()


async def test_an_unknown_id_and_somebody_elses_are_the_same() -> None:
    """C123: also after the result is gone; and without a key nobody learns anything."""
    async with slowly(None, **KEYS, pending={"ttl_s": 0.2}) as (slow, _, running):
        url = await promised(running, chat(stream=False), {**ASYNC, **ANNA})
        guessed = f"/gateway/pending/{'A' * 22}"
        for method in ("GET", "DELETE"):
            answers = [await running.get(path, BEN, method) for path in (url, guessed)]
            assert {told.status for told in answers} == {404}
            assert answers[0].body == answers[1].body
            answers = [await running.get(path, None, method) for path in (url, guessed)]
            assert {told.status for told in answers} == {401}
            assert answers[0].body == answers[1].body
        assert (await events(running, url, BEN)).status == 404
        assert (await running.get(url, ANNA)).status == 202
        slow.go.set()
        assert (await ended(running, url, ANNA)).status == 200
        await until(lambda: running.gateway.pendings.find(url.rpartition("/")[2]) is None)
        assert (await running.get(url, ANNA)).status == 410
        assert (await running.get(url, BEN)).status == 404


async def test_ids_cannot_be_guessed() -> None:
    """C123: 128 random bits each."""
    async with slowly() as (_, _, running):
        urls = {await promised(running, chat(stream=False)) for _ in range(20)}
        bits = [base64.urlsafe_b64decode(url.rpartition("/")[2] + "==") for url in urls]
        assert len(urls) == 20
        assert {len(value) for value in bits} == {16}


@pytest.mark.parametrize("is_gone", [False, True], ids=["after the 202", "before it"])
async def test_an_sdks_retry_joins_the_running_request(is_gone: bool) -> None:
    body, again = chat(stream=False), {**ASYNC, "x-stainless-retry-count": "1"}
    async with slowly() as (slow, upstream, running):
        first_url = ""
        if is_gone:
            async with running.client() as client:
                await client.post(body, headers={"prefer": "respond-async, wait=60"})
                await slow.asked.wait()
        else:
            first_url = await promised(running, body)
        joined = await promised(running, body, again)
        assert is_gone or joined == first_url
        assert await promised(running, chat(stream=False, content="other"), again) != joined
        assert await promised(running, body) != joined  # no retry: meant to run twice
        slow.go.set()
        assert (await ended(running, joined)).body == answer()
        await until(lambda: len(upstream.requests) == 3)
        assert await running.metric("gateway_pending_results_total", result="joined") == 1


async def test_a_retry_frees_the_connection_that_nobody_waits_on_any_more() -> None:
    """A proxy between may keep the first connection open; both get the same id."""
    body = chat(stream=False)
    async with slowly() as (slow, upstream, running), running.client() as client:
        await client.post(body, headers={"prefer": "respond-async, wait=60"})
        await slow.asked.wait()
        url = await promised(running, body, {**ASYNC, "x-stainless-retry-count": "2"})
        told = await client.response()
        assert (told.status, told.header("location")) == (202, url)
        slow.go.set()
        assert (await ended(running, url)).body == answer()
        assert len(upstream.requests) == 1


async def test_keys_do_not_join_each_others_requests() -> None:
    """C123."""
    async with slowly(None, **KEYS) as (_, upstream, running):
        body = chat(stream=False)
        url = await promised(running, body, {**ASYNC, **ANNA})
        assert await promised(running, body, {**ASYNC, **BEN, "x-stainless-retry-count": "1"}) != url
        await until(lambda: len(upstream.requests) == 2)


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset])
@pytest.mark.parametrize("opted_in", [True, False])
async def test_leaving_before_the_202_stops_only_those_who_did_not_opt_in(leave: Any, opted_in: bool) -> None:
    """C124."""
    headers = {"prefer": "respond-async, wait=60"} if opted_in else {}
    async with slowly() as (slow, _, running):
        async with running.client() as client:
            await client.post(chat(stream=False), headers=headers)
            await slow.asked.wait()
            leave(client)
        if opted_in:
            await until(lambda: running.gateway.pendings.running == 1)
            slow.go.set()
        record = await running.last_record()
        assert record["outcome"] == ("pending_done" if opted_in else "client_cancelled")
        if not opted_in:
            await until(lambda: slow.closed_at > 0)
        assert (slow.closed_at > 0) != opted_in
        await running.settled()


async def test_a_detached_request_survives_its_client_and_the_garbage_collector() -> None:
    """C124: held by the application while the model server is silent, and seen in a gauge."""
    async with slowly() as (slow, _, running):
        async with running.client() as client:
            await client.post(chat(), headers=ASYNC)
            told = await client.response()
            client.reset()
        for _ in range(50):
            gc.collect()
            await asyncio.sleep(0.005)
        assert await running.metric("gateway_pending") == 1
        slow.go.set()
        assert (await ended(running, told.json["poll_url"])).body == STREAM
        assert await running.metric("gateway_pending") == 0


async def test_a_direct_answer_of_an_opted_in_call_leaves_no_cycle_for_the_collector() -> None:
    slow = Slow()
    slow.go.set()
    async with slowly(slow) as (_, _, running):
        await running.ask(chat(stream=False), headers={"prefer": "respond-async, wait=10"})
        await running.settled()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await running.ask(chat(stream=False), headers={"prefer": "respond-async, wait=10"})
            await running.settled()
            gc.collect()
            kinds = {type(thing).__name__ for thing in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert not kinds & {"HeldCall", "Recording", "Exchange", "Relay", "Trial"}


@pytest.mark.parametrize("bound", [{"max_result_mb": 0.0001}, {"max_total_mb": 0.0001}])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_above_its_bound_fails_with_a_word_and_stops(bound: dict[str, float], stream: bool) -> None:
    async with slowly(pending=bound) as (slow, _, running):
        url = await promised(running, chat(stream=stream))
        slow.go.set()
        told = await ended(running, url)
        assert (told.status, told.json["status"]) == (502, "failed")
        assert told.json["error"]["code"] == "result_too_large"
        assert b"result_too_large" in (await events(running, url)).body
        assert running.gateway.pendings.bytes <= 0.0001 * 1024 * 1024
        await running.settled()


async def test_results_make_room_for_new_ones_and_running_requests_do_not() -> None:
    """C124: capped in number; whoever finds no room waits like others."""
    async with slowly(pending={"max_count": 2}) as (slow, _, running):
        urls = [await promised(running, chat(stream=False)) for _ in range(2)]
        third = asyncio.ensure_future(running.ask(chat(stream=False), headers=ASYNC))
        await asyncio.sleep(0.1)
        assert not third.done()
        slow.go.set()
        assert (await third).status == 200
        for url in urls:
            assert (await ended(running, url)).status == 200
        slow.go.clear()
        await promised(running, chat(stream=False))
        assert [(await running.get(url)).status for url in urls] == [410, 200]
        assert await running.metric("gateway_pending_results_total", result="refused") == 1


async def test_everything_is_back_to_zero_after_the_time_to_live() -> None:
    async with slowly(pending={"ttl_s": 0.1}) as (slow, _, running):
        urls = [await promised(running, chat(stream=stream)) for stream in (True, False)]
        slow.go.set()
        for url in urls:
            await ended(running, url)
        book = running.gateway.pendings
        assert book.bytes > 0
        await until(lambda: book.bytes == 0)
        assert (book.running, await running.metric("gateway_pending")) == (0, 0)
        assert [(await running.get(url)).status for url in urls] == [410, 410]
        await until(lambda: not book.tasks)
        status = (await running.get("/gateway/status")).json
        assert status["pending"] == {"running": 0, "bytes": 0}


async def test_messages_fail_in_their_own_shape() -> None:
    """client-contract §5: `event: error` where that is the API's way."""
    body = b'{"model":"m","max_tokens":9,"messages":[],"stream":true}'
    async with serving(breaks) as (_, running):
        url = await promised(running, body, path="/v1/messages")
        told = (await events(running, url)).body
        assert told.strip().startswith(b"event: error\ndata: ")
        assert json.loads(told.split(b"data: ")[1])["type"] == "error"


@pytest.mark.slow
async def test_budget_and_answer_cross_without_a_trace() -> None:
    """C126: the answer 1 ms before, at and after the budget: exactly one of direct answer and promise."""

    async def play(request: Received, wire: Wire) -> None:
        await asyncio.sleep(0.05 + (request.json["seed"] % 7 - 3) / 1000)
        if request.json["stream"]:
            await wire.send(STREAM_HEAD, framed(FIRST), framed(SECOND), framed(STOP), framed(DONE), LAST_CHUNK)
        else:
            await wire.send(whole(answer()))

    async with serving(play) as (_, running):

        async def once(seed: int) -> int:
            stream = seed % 2 == 0
            told = await running.ask(chat(stream=stream, seed=seed), headers={"prefer": "respond-async, wait=0.05"})
            if told.status == 202:
                told = await ended(running, told.json["poll_url"])
                assert (told.status, told.body) == (200, STREAM if stream else answer())
                return 202
            assert (told.status, told.body) == (200, STREAM if stream else answer())
            return 200

        seen = [
            status for turn in range(20) for status in await asyncio.gather(*(once(turn * 25 + n) for n in range(25)))
        ]
        assert set(seen) == {200, 202}
        outcomes = [record["outcome"] for record in running.records]
        assert outcomes.count("pending_done") == seen.count(202)
        assert outcomes.count("complete") == seen.count(200)
        assert await running.metric("gateway_pending") == 0
        await running.settled()


@pytest.mark.parametrize("drain_s", [5, 0])
async def test_at_the_end_of_the_process_a_promise_is_kept_or_told_as_failed(drain_s: float) -> None:
    """C128, C129: finished within the drain limit, else failed with a word; never an endless `pending`."""
    async with slowly(listen={"drain_timeout_s": drain_s}) as (slow, _, running):
        url = await promised(running, chat(stream=False))
        recording = running.gateway.pendings.find(url.rpartition("/")[2])
        assert recording is not None
        stopping = asyncio.ensure_future(running.server.shutdown())
        await asyncio.sleep(0.1)
        if drain_s:
            assert recording.is_running
            slow.go.set()
        await stopping
        assert recording.entry.state == ("done" if drain_s else "failed")
        if not drain_s:
            assert recording.entry.error is not None
            assert recording.entry.error["reason"] == "draining"
        assert (await running.last_record())["outcome"] == ("pending_done" if drain_s else "refused")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_limit_on_silence_means_nothing_after_the_202(stream: bool) -> None:
    """fault-catalogue 3.10: openai-python sends it with every call; the silence was ended by the 202."""
    async with slowly() as (slow, _, running):
        headers = {**ASYNC, "x-stainless-read-timeout": "0.3"}
        url = await promised(running, chat(stream=stream), headers)
        assert (await running.get(f"{url}?wait=0.6")).status == 202
        slow.go.set()
        assert (await ended(running, url)).status == 200

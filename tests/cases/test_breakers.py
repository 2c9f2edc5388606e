"""Breakers and ejection before real sockets: who opens one, who does not, and how it closes again (3.2, 3.3, D)."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from gateway.timing.predict import Predictor
from tests.support.fleets import HELLO, ROLE, STOP, STREAM, Fleet, after, fleet, good, refuses
from tests.support.plays import sends, silence
from tests.support.raw import DONE, LAST_CHUNK, STREAM_HEAD, RawClient, Received, Wire, chat, framed
from tests.support.running import until

Log = pytest.LogCaptureFixture
QUICK = {"breaker": {"minimum_calls": 2, "wait_open_ms": 60, "half_open_calls": 1, "consecutive_failures": 100}}
LONG = {"breaker": {"minimum_calls": 2, "wait_open_ms": 30_000, "consecutive_failures": 100}}


async def open_breaker(found: Fleet) -> None:
    for _ in range(2):
        await found.ask()
    assert found.breaker("first")["state"] == "open"


async def test_an_open_breaker_refuses_at_once_and_says_when_to_come_back(caplog: Log) -> None:
    """D4: 503 in less than 50 ms, nothing is sent, `/healthz` stays green."""
    async with fleet(caplog, first=refuses("500 Internal Server Error"), upstream=LONG) as found:
        await open_breaker(found)
        took = []
        response = await found.ask()
        for _ in range(10):
            began = time.monotonic()
            response = await found.ask()
            took.append(time.monotonic() - began)
        assert sorted(took)[5] < 0.05
        assert (response.status, response.error["code"]) == (503, "circuit_open")
        assert 1 <= int(response.header("retry-after") or 0) <= 31
        assert "`first` is open" in response.error["message"]
        assert response.header("x-gateway-upstream") == "first"
        assert found.asked("first") == 2
        assert (await found.running.get("/healthz")).status == 200
        assert await found.running.metric("gateway_breaker_state", upstream="first") == 2


async def test_all_down_is_told_in_an_instant(caplog: Log) -> None:
    """D4: with both breakers open nobody is asked; there is no storm of retries."""
    broken = sends(end="reset")
    async with fleet(caplog, first=broken, second=broken, upstream=LONG) as found:
        for _ in range(6):
            await found.ask()
        asked = found.asked("first") + found.asked("second")
        response = await found.ask(stream=True)
        assert (response.status, response.error["code"]) == (503, "circuit_open")
        assert "`first`" in response.error["message"]
        assert "`second`" in response.error["message"]
        assert found.asked("first") + found.asked("second") == asked


async def test_an_open_breaker_sends_everybody_elsewhere(caplog: Log) -> None:
    """B14: after the opening nothing is lost and nothing is repeated."""
    async with fleet(caplog, first=refuses("500 Internal Server Error"), second=good, upstream=LONG) as found:
        answers = [await found.ask() for _ in range(12)]
        assert {response.status for response in answers} == {200}
        assert found.asked("first") == 2
        assert answers[-1].header("x-gateway-failures") is None


async def test_a_probe_that_succeeds_closes_it(caplog: Log) -> None:
    """3.2: half-open admits exactly its number."""
    is_well = False

    async def play(request: Received, wire: Wire) -> None:
        await (good if is_well else refuses("500 Internal Server Error"))(request, wire)

    async with fleet(caplog, first=play, upstream=QUICK) as found:
        await open_breaker(found)
        is_well = True
        await asyncio.sleep(0.07)
        assert (await found.ask(stream=True)).body == STREAM
        assert found.breaker("first")["state"] == "closed"


async def test_a_probe_whose_caller_leaves_gives_its_permit_back(caplog: Log) -> None:
    """D5, C112: neither success nor failure, and the next one may try."""
    mode = "broken"

    async def play(request: Received, wire: Wire) -> None:
        part = {"broken": refuses("500 Internal Server Error"), "silent": silence, "good": good}[mode]
        await part(request, wire)

    async with fleet(caplog, first=play, upstream=QUICK) as found:
        await open_breaker(found)
        mode = "silent"
        await asyncio.sleep(0.07)
        async with RawClient(found.running.port) as client:
            await client.post(chat(stream=True))
            await until(lambda: found.asked("first") == 3)
            assert found.breaker("first")["permits"] == 0
            assert (await found.ask()).error["code"] == "circuit_open", "one probe at a time"
            client.reset()
        await until(lambda: found.breaker("first")["permits"] == 1)
        assert found.breaker("first")["state"] == "half_open"
        mode = "good"
        assert (await found.ask()).status == 200
        assert found.breaker("first")["state"] == "closed"


async def test_a_bad_caller_opens_nothing(caplog: Log) -> None:
    """C111: 4xx, 429, callers that leave and slow but good answers are no failures of the upstream."""
    statuses = ["400 Bad Request", "404 Not Found", "413 Content Too Large", "422 Unprocessable Content"]
    parts = [refuses(status) for status in statuses * 12] + [refuses("401 Unauthorized")] * 20
    parts += [refuses("429 Too Many Requests")] * 20 + [silence] * 20 + [after(0.01)] * 20

    async def play(request: Received, wire: Wire) -> None:
        await (parts.pop(0) if parts else good)(request, wire)

    async with fleet(caplog, first=play, upstream={"breaker": {"minimum_calls": 5}}) as found:
        for _ in range(88):
            assert (await found.ask()).status >= 400
        for number in range(20):
            async with RawClient(found.running.port) as client:
                await client.post(chat(stream=True))
                await until(lambda number=number: found.asked("first") == 89 + number)  # type: ignore[misc]
                client.reset()
        for _ in range(21):
            assert (await found.ask(stream=True)).body == STREAM
        seen = found.breaker("first")
        assert (seen["state"], seen["errors"]) == ("closed", 0)


@pytest.mark.parametrize("begun", [b"", STREAM_HEAD], ids=["nothing", "a head"])
async def test_an_engine_that_hangs_is_left_out_on_the_evidence_of_silence(
    begun: bytes, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C113: its health page is green; three requests without a first token are enough, while another is well."""
    monkeypatch.setattr("gateway.tending.EVERY_S", 0.05)

    async def hangs(request: Received, wire: Wire) -> None:
        await wire.send(begun)
        await wire.wait_closed_by_peer(30)

    breaker = {"breaker": {"slow_call_duration_ms": 50}}
    # so that an unknown prompt's own expectation does not stretch the limit: 3 × what was predicted
    monkeypatch.setattr("gateway.policy.ejection.first_token_limit_ns", lambda slow_ms, _: slow_ms * 1_000_000)
    monkeypatch.setattr("gateway.upstream.standing.first_token_limit_ns", lambda slow_ms, _: slow_ms * 1_000_000)
    route = {"timeouts": {"first_token_ms": 1500}}
    async with fleet(caplog, first=hangs, second=good, upstream=breaker, route=route) as found:
        answers = [asyncio.create_task(found.ask(stream=True)) for _ in range(6)]
        ejections = found.gateway.runtime.fleet.ejections
        await until(lambda: ejections.standing("first", found.gateway.clock()) == "ejected", 3.0)
        asked = found.asked("first")
        for _ in range(10):
            assert (await found.ask(stream=True)).body == STREAM
        generated = [r for r in found.upstreams["first"].requests[asked:] if r.json.get("max_tokens") != 1]
        assert generated == [], "only probes of one token go there"
        responses = await asyncio.gather(*answers)
        assert [response.status for response in responses] == [200] * 6, "those who waited there were asked again"
        assert sorted(response.header("x-gateway-attempts") or "" for response in responses) == ["1"] * 3 + ["2"] * 3
        assert await found.running.metric("gateway_upstream_failures_total", upstream="first", reason="silent") == 3
        caplog.clear()


async def test_a_request_that_waits_at_the_last_server_is_never_cut_for_its_silence(
    caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last usable attempt ends by the limits of the route alone."""
    monkeypatch.setattr("gateway.tending.EVERY_S", 0.02)
    monkeypatch.setattr("gateway.upstream.standing.first_token_limit_ns", lambda slow_ms, _: slow_ms * 1_000_000)

    async def hangs(request: Received, wire: Wire) -> None:
        await wire.wait_closed_by_peer(30)

    upstream = {"breaker": {"slow_call_duration_ms": 20}}
    async with fleet(caplog, first=hangs, upstream=upstream, route={"timeouts": {"first_token_ms": 400}}) as found:
        answers = await asyncio.gather(*(found.ask(stream=True) for _ in range(4)))
        assert [(a.status, a.error["code"]) for a in answers] == [(504, "upstream_timeout")] * 4
        assert sum(r.json.get("max_tokens") != 1 for r in found.upstreams["first"].requests) == 4
        caplog.clear()


async def test_a_server_that_stops_in_the_middle_of_every_answer_is_left_out(
    caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: it gives first tokens to everybody and ends no answer; long before the limit of silence."""
    monkeypatch.setattr("gateway.tending.EVERY_S", 0.02)

    async def stops(request: Received, wire: Wire) -> None:
        if request.json.get("max_tokens") == 1:  # a probe hangs like all others
            await wire.wait_closed_by_peer(30)
        await wire.send(STREAM_HEAD)
        await wire.stream(ROLE, HELLO)
        await wire.wait_closed_by_peer(30)

    upstream = {"breaker": {"slow_call_duration_ms": 100}}
    route = {"timeouts": {"idle_ms": 2000}}
    async with fleet(caplog, first=stops, second=good, upstream=upstream, route=route) as found:
        answers = [asyncio.create_task(found.ask(stream=True)) for _ in range(6)]
        ejections = found.gateway.runtime.fleet.ejections
        await until(lambda: ejections.standing("first", found.gateway.clock()) == "ejected", 1.5)
        for _ in range(6):
            assert (await found.ask(stream=True)).body == STREAM
        told = [response.body for response in await asyncio.gather(*answers)]
        assert sum(body == STREAM for body in told) == 3
        assert sum(b'"code":"upstream_timeout"' in body for body in told) == 3, "what went out is not repeated (R4)"
        caplog.clear()


async def test_traffic_comes_back_slowly_when_a_breaker_closes(caplog: Log) -> None:
    """fault-catalogue 3.3."""
    is_well = False

    async def recovers(request: Received, wire: Wire) -> None:
        await (good if is_well else refuses("500 Internal Server Error"))(request, wire)

    async with fleet(caplog, first=recovers, upstream=QUICK) as found:
        await open_breaker(found)
        is_well = True
        await asyncio.sleep(0.1)
        assert (await found.ask()).status == 200
        assert found.breaker("first")["state"] == "closed"
        now = found.gateway.clock()
        assert found.gateway.runtime.fleet.ejections.standing("first", now) == "ramp"
        assert found.gateway.runtime.fleet.ejections.share("first", now) < 0.5


async def test_our_own_bug_is_not_the_upstreams(caplog: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """C115: 500 `internal`, the breaker untouched, nothing left behind."""

    def breaks(*args: object, **named: object) -> object:
        raise ZeroDivisionError("a bug of ours")

    async with fleet(caplog, first=good, second=good, upstream={"breaker": {"minimum_calls": 1}}) as found:
        for target in ("gateway.sending.shape", "gateway.sending.request_head"):
            with monkeypatch.context() as patched:
                patched.setattr(target, breaks)
                response = await found.ask()
                assert (response.status, response.error["code"]) == (500, "internal")
        with monkeypatch.context() as patched:
            patched.setattr(Predictor, "begin", breaks)
            assert (await found.ask()).status == 500
        for name in ("first", "second"):
            assert found.breaker(name).get("errors", 0) == 0
        assert (await found.ask()).status == 200
        caplog.clear()


async def test_counters_do_not_leak_through_cancelled_requests(caplog: Log) -> None:
    """C117: 30 % leave at any moment, some meet dead connections; in the end all counters are zero and all get work."""
    draw = random.Random(117)

    async def play(request: Received, wire: Wire) -> None:
        if draw.random() < 0.05:
            wire.reset()
            return
        await asyncio.sleep(draw.random() * 0.01)
        await wire.send(STREAM_HEAD, framed(ROLE))
        await asyncio.sleep(draw.random() * 0.01)
        await wire.send(framed(HELLO))
        await asyncio.sleep(draw.random() * 0.01)
        await wire.send(framed(STOP + DONE), LAST_CHUNK)

    async def one(found: Fleet) -> None:
        async with RawClient(found.running.port) as client:
            await client.post(chat(stream=True))
            if draw.random() < 0.3:
                await asyncio.sleep(draw.random() * 0.03)
                client.reset()
            else:
                await client.response()

    route = {"balance": "least_inflight"}
    upstream = {"breaker": {"mode": "off"}}
    async with fleet(caplog, first=play, second=play, third=play, route=route, upstream=upstream) as found:
        for _ in range(15):
            await asyncio.gather(*(one(found) for _ in range(20)))
        await found.running.settled()
        before = {name: found.asked(name) for name in found.upstreams}
        assert all(state.inflight == 0 for state in found.gateway.runtime.upstreams.values())
        for _ in range(60):
            assert (await found.ask(stream=True)).status in (200, 502)
        for name in found.upstreams:
            assert found.asked(name) - before[name] >= 8, "ties are broken by chance"


async def test_one_slow_server_of_two_is_left_out_and_the_last_is_not(caplog: Log) -> None:
    """D3: ejected by its slow rate; when the other turns slow too, slow service beats none."""
    breaker = {"breaker": {"minimum_calls": 3, "slow_call_duration_ms": 20, "wait_open_ms": 30_000}}
    async with fleet(caplog, first=after(0.05), second=after(0.05), upstream=breaker) as found:
        found.gateway.runtime.upstreams["first"].standing.forecasts.for_model("other")  # same predictor, from the start
        for state in found.gateway.runtime.upstreams.values():
            state.standing.forecasts.for_model("other")._model = _Eager()  # type: ignore[assignment]
        for _ in range(14):
            assert (await found.ask(stream=True)).body == STREAM
        states = sorted(str(found.breaker(name)["state"]) for name in ("first", "second"))
        assert states == ["closed", "open"]


class _Eager:
    """A line that expects every first token at once, so that `slow` is what the settings say."""

    updates = 0
    coefficients = (0.0, 0.0, 0.0, 0.0)

    def predict(self, *args: object) -> float:
        return 0.001

    def update(self, *args: object) -> None: ...


async def test_a_server_that_flaps_stays_away_longer_each_time(caplog: Log) -> None:
    """D2: few probes, and callers of the other one notice nothing."""
    upstream = {"breaker": {**QUICK["breaker"], "wait_open_ms": 40}}
    async with fleet(caplog, first=refuses("500 Internal Server Error"), second=good, upstream=upstream) as found:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert (await found.ask()).status == 200
        assert int(str(found.breaker("first")["opened_in_a_row"])) >= 3
        assert found.asked("first") <= 2 + 6


async def test_a_server_that_restarts_under_load_is_worked_around(caplog: Log) -> None:
    """D1: streams under way end with an error inside, new ones go elsewhere."""
    is_down = asyncio.Event()

    async def play(request: Received, wire: Wire) -> None:
        if is_down.is_set():
            wire.reset()
            return
        await wire.send(STREAM_HEAD, framed(ROLE + HELLO))
        await is_down.wait()
        wire.reset()

    async with fleet(caplog, first=play, second=good, upstream={"breaker": {"minimum_calls": 100}}) as found:
        under_way = asyncio.create_task(found.ask(stream=True))
        await until(lambda: found.asked("first") == 1)
        await asyncio.sleep(0.02)
        is_down.set()
        cut = await under_way
        assert cut.error["code"] == "upstream_bad_response"
        assert cut.body.endswith(DONE)
        for _ in range(8):
            assert (await found.ask(stream=True)).body == STREAM
        assert found.asked("first") <= 4, "three failures in a row eject it"

"""20 callers that come back for their answers, before a server with one slot: nobody is lost, nobody is answered twice.

The gateway has served for a while when they come, as one that runs would have: what it estimates, it has learned.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from tests.vllm.conftest import chat_body
from tests.vllm.gateway_process import GatewayProcess, serving
from tests.vllm.real_vllm import RealVllm

pytestmark = pytest.mark.vllm

CHAT = "/v1/chat/completions"
CALLERS = 20
EARLIER_BURSTS, BURST = 2, 16  # more than the 20 first tokens that the predictor wants, and with queues as they will be
LENGTHS = (120, 200, 280, 450)  # answers in tokens; the model says about 380 when it is let
FOLLOWED = 1500  # tokens of the answer that is followed while it runs
KEEP_ALIVE = b": keep-alive\n\n"
CONFIG = """\
upstreams:
  vllm: {url: "%s"}
routes:
  - {name: seen, match: {prefix: /seen}, upstreams: [vllm], stream_upstream: true, timeouts: {connect_ms: 20000}}
  - {name: client, upstreams: [vllm], timeouts: {connect_ms: 20000}}
"""


@dataclass
class Caller:
    """One request, and all that its caller heard."""

    number: int
    request_id: str
    status: int = 0
    answer: bytes = b""
    followed: bytes = b""
    was_running: bool = False
    """A poll after the first followed bytes found the request running."""
    place: str = ""
    """The address of its pending answer; empty when it was answered directly."""
    estimate: dict[str, Any] | None = None
    """What the first 202 with an estimate said."""

    @property
    def is_stream(self) -> bool:
        return self.number % 2 == 0

    @property
    def path(self) -> str:
        return CHAT if self.is_stream else "/seen" + CHAT


@pytest.fixture(scope="module")
def gateway(one_slot_vllm: RealVllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with serving(CONFIG % one_slot_vllm.url, tmp_path_factory.mktemp("pending")) as found:
        yield found


@pytest.fixture
async def http(gateway: GatewayProcess) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=gateway.url, trust_env=False, timeout=120) as client:
        yield client


def _body(server: RealVllm, number: int, *, stream: bool, **more: Any) -> dict[str, Any]:
    more = {"max_tokens": LENGTHS[number % len(LENGTHS)], **more}
    return chat_body(server.model, f"{number}. Why is the sky blue?", stream=stream, **more)


def _callers(count: int, start: int = 0) -> list[Caller]:
    return [Caller(number, uuid.uuid4().hex) for number in range(start, start + count)]


async def _serve_for_a_while(http: httpx2.AsyncClient, server: RealVllm) -> None:
    for burst in range(EARLIER_BURSTS):
        callers = _callers(BURST, 100 * (burst + 1))
        await asyncio.gather(*(_call(http, server, caller) for caller in callers))
        assert {caller.status for caller in callers} == {200}


async def _call(http: httpx2.AsyncClient, server: RealVllm, caller: Caller, *, follows: bool = False) -> None:
    longer = {"max_tokens": FOLLOWED, "ignore_eos": True} if follows else {}
    body = _body(server, caller.number, stream=caller.is_stream, **longer)
    headers = {"prefer": f"respond-async, wait={0 if follows else 1}", "x-request-id": caller.request_id}
    response = await http.post(caller.path, json=body, headers=headers)
    if response.status_code == 202:
        assert response.headers["preference-applied"] == "respond-async"
        caller.place = response.headers["location"]
        if follows:
            await _follow(http, caller)
    while response.status_code == 202:
        told = response.json()
        assert told["status"] == "pending", told
        if caller.estimate is None and "estimation_ms" in told:
            caller.estimate = told
        response = await http.get(caller.place, params={"wait": 30 if caller.estimate else 0.2})
    caller.status, caller.answer = response.status_code, response.content


async def _follow(http: httpx2.AsyncClient, caller: Caller) -> None:
    async with http.stream("GET", caller.place, headers={"accept": "text/event-stream"}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for data in response.aiter_bytes():
            caller.followed += data
            if not caller.was_running and caller.followed.replace(KEEP_ALIVE, b""):
                caller.was_running = (await http.get(caller.place)).status_code == 202


def _text(caller: Caller) -> str:
    """All that the model said, thoughts included."""
    if not caller.is_stream:
        message = json.loads(caller.answer)["choices"][0]["message"]
        return (message["reasoning"] or "") + (message["content"] or "")
    events = [line.removeprefix("data: ") for line in caller.answer.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join((delta.get("reasoning") or "") + (delta.get("content") or "") for delta in deltas)


def _ratio(caller: Caller, record: dict[str, Any]) -> float:
    """The estimate over what came true: until the first token of a stream, until the end of a plain answer; but a stream
    that was being answered already was told when it would end."""
    assert caller.estimate is not None
    is_first = caller.is_stream and caller.estimate["phase"] in ("queued", "prefill")
    true_ms = record["ttft_ms" if is_first else "e2e_ms"] - caller.estimate["elapsed_ms"]
    return float(caller.estimate["estimation_ms"] / true_ms)


async def test_of_20_callers_for_one_slot_each_gets_its_answer_once_and_a_true_estimate(
    one_slot_vllm: RealVllm, gateway: GatewayProcess, http: httpx2.AsyncClient
) -> None:
    await _serve_for_a_while(http, one_slot_vllm)
    before = await asyncio.to_thread(lambda: one_slot_vllm.finished)
    callers = _callers(CALLERS)
    follower = callers[-2]  # its long answer is behind what most others wait for
    await asyncio.gather(*(_call(http, one_slot_vllm, caller, follows=caller is follower) for caller in callers))

    assert [caller.status for caller in callers] == [200] * CALLERS
    assert all(_text(caller).strip() for caller in callers)
    assert await asyncio.to_thread(lambda: one_slot_vllm.finished) == before + CALLERS
    assert await asyncio.to_thread(lambda: one_slot_vllm.load) == (0, 0)

    assert follower.was_running
    assert follower.followed.replace(KEEP_ALIVE, b"") == follower.answer

    pending = [caller for caller in callers if caller.place]
    assert len(pending) >= CALLERS / 2
    assert len({caller.place for caller in pending}) == len(pending)
    ratios = [
        _ratio(caller, await asyncio.to_thread(gateway.record, caller.request_id))
        for caller in pending
        if caller.estimate is not None
    ]
    print(f"{len(pending)} pending, estimates over truth:", *(f"{ratio:.2f}" for ratio in sorted(ratios)))
    good = sum(0.5 <= ratio <= 2 for ratio in ratios)
    assert len(ratios) >= 0.9 * len(pending)
    assert good >= 0.8 * len(ratios), sorted(ratios)


async def _until(condition: Callable[[], bool], limit_s: float = 20.0) -> float:
    """Seconds until the condition was looked at and true."""
    start = time.monotonic()
    while True:
        asked_at = time.monotonic()
        assert asked_at < start + limit_s, "the condition did not come true in time"
        if await asyncio.to_thread(condition):
            return asked_at - start
        await asyncio.sleep(0.02)


async def test_a_pending_request_that_is_cancelled_leaves_the_server_whether_it_runs_or_waits(
    one_slot_vllm: RealVllm, gateway: GatewayProcess, http: httpx2.AsyncClient
) -> None:
    places = []
    for stream in (False, True):  # the first takes the slot for many seconds, the second waits behind it
        body = chat_body(one_slot_vllm.model, "hi", stream=stream, ignore_eos=True, max_tokens=6000)
        path = CHAT if stream else "/seen" + CHAT
        response = await http.post(path, json=body, headers={"prefer": "respond-async, wait=0"})
        assert response.status_code == 202
        places.append(response.headers["location"])
    running, waiting = places
    await _until(lambda: one_slot_vllm.load == (1, 1))
    for place, left in ((waiting, (1, 0)), (running, (0, 0))):
        assert (await http.delete(place)).json()["status"] == "cancelled"
        assert await _until(lambda left=left: one_slot_vllm.load == left) < 1  # type: ignore[misc]
        gone = await http.get(place)
        assert (gone.status_code, gone.json()["status"]) == (410, "cancelled")

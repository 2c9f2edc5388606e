"""A server that serves one request at a time: the queue is named as the cause of the wait. These tests come last."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support.raw import RawClient
from tests.vllm.conftest import chat_body
from tests.vllm.gateway_process import GatewayProcess, serving
from tests.vllm.real_vllm import RealVllm

pytestmark = pytest.mark.vllm

CLIENTS = 8
CAUSES = ("queue", "prefill", "network", "input", "unexplained")


@pytest.fixture(scope="module")
def gateway(one_slot_vllm: RealVllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    config = f'upstreams:\n  vllm: {{url: "{one_slot_vllm.url}"}}\n'
    with serving(config, tmp_path_factory.mktemp("one_slot")) as found:
        yield found


async def _records_of(gateway: GatewayProcess, model: str, **more: Any) -> list[dict[str, Any]]:
    """Eight callers at once; their records."""
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", max_retries=0, timeout=240) as client:

        async def ask() -> dict[str, Any]:
            request_id = uuid.uuid4().hex
            stream = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "你好"}], temperature=0, stream=True,
                extra_headers={"x-request-id": request_id}, **more,
            )  # fmt: skip
            async for _ in stream:
                pass
            return await asyncio.to_thread(gateway.record, request_id)

        return await asyncio.gather(*(ask() for _ in range(CLIENTS)))


async def test_with_eight_callers_for_one_slot_the_queue_is_named_as_the_cause(
    one_slot_vllm: RealVllm, gateway: GatewayProcess
) -> None:
    before = await asyncio.to_thread(_waits, gateway)
    records = await _records_of(gateway, one_slot_vllm.model, max_tokens=128)
    causes = [record["wait_causes"] for record in records]
    largest = [max(parts, key=parts.__getitem__) for parts in causes]
    assert largest.count("queue_ms") >= 6, causes  # the first caller finds the slot free
    for record in records:
        assert sum(record["wait_causes"].values()) == pytest.approx(record["wait_ms"], abs=0.01)
    queued = [parts["queue_ms"] for parts in causes]
    assert sum(queued) > sum(record["wait_ms"] for record in records) / 2
    after = await asyncio.to_thread(_waits, gateway)
    grown = {cause: after[cause] - before[cause] for cause in CAUSES}
    assert max(grown, key=grown.__getitem__) == "queue"
    assert grown["queue"] == pytest.approx(sum(queued) / 1000, abs=0.001)


async def test_a_single_caller_is_not_told_of_a_queue(one_slot_vllm: RealVllm, gateway: GatewayProcess) -> None:
    """The same server, the same numbers, another cause: it is measured, not guessed."""
    request_id = uuid.uuid4().hex
    body = json.dumps(chat_body(one_slot_vllm.model, "你好", stream=True, max_tokens=16)).encode()
    async with RawClient(gateway.port) as client:
        await client.ask(body, headers={"x-request-id": request_id})
    record = await asyncio.to_thread(gateway.record, request_id)
    assert record["wait_causes"]["queue_ms"] < record["wait_ms"] / 2


def _waits(gateway: GatewayProcess) -> dict[str, float]:
    return {cause: gateway.metric("gateway_wait_seconds_sum", cause=cause, source="server") for cause in CAUSES}


@asynccontextmanager
async def _slot_taken(server: RealVllm, gateway: GatewayProcess) -> AsyncIterator[None]:
    """One caller holds the slot for many seconds, while the block runs."""
    body = json.dumps(chat_body(server.model, "hi", stream=True, ignore_eos=True, max_tokens=6000)).encode()
    async with RawClient(gateway.port) as client:
        await client.post(body)
        await client.head()
        yield
        client.reset()
    await _until(lambda: server.load == (0, 0))


async def _until(condition: Callable[[], bool], limit: float = 20.0) -> float:
    """Seconds until the condition was looked at and true."""
    start = time.monotonic()
    while True:
        asked_at = time.monotonic()
        assert asked_at < start + limit, "the condition did not come true in time"
        if await asyncio.to_thread(condition):
            return asked_at - start
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_a_caller_that_leaves_while_it_is_queued_leaves_the_queue(
    one_slot_vllm: RealVllm, gateway: GatewayProcess, how: str, stream: bool
) -> None:
    request_id = uuid.uuid4().hex
    body = json.dumps(chat_body(one_slot_vllm.model, "hi", stream=stream)).encode()
    async with _slot_taken(one_slot_vllm, gateway), RawClient(gateway.port) as client:
        await client.post(body, headers={"x-request-id": request_id})
        try:
            await _until(lambda: one_slot_vllm.load == (1, 1))
        except AssertionError:
            print(one_slot_vllm.load, gateway.http.get("/gateway/status").json(), gateway.records, gateway.lines)
            raise
        client.reset() if how == "reset" else client.close()
        assert await _until(lambda: one_slot_vllm.load == (1, 0)) < 1
        record = await asyncio.to_thread(gateway.record, request_id)
    assert record["outcome"] == "client_cancelled"
    assert "ttft_ms" not in record
    assert record["wait_ms"] > 0
    assert record["reasoning_ms"] == record["decode_ms"] == record["tail_ms"] == 0

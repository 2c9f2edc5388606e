"""What must hold after every fault, whatever it was (fault-catalogue 5.0, the eight invariants)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from gateway.metrics import SEGMENTS
from tests.support.raw import Handler, RawUpstream, Response, chat
from tests.support.running import Running, running_gateway, settings_for, until

CANARY_KEY = "sk-canary-4f1d9c7b"
CANARY_TEXT = "canary-prompt-9e2b51"


class Faulty:
    """A gateway before a model server that misbehaves."""

    def __init__(self, running: Running, upstream: RawUpstream) -> None:
        self.running = running
        self.upstream = upstream
        self.responses: list[Response] = []

    async def ask(self, *, stream: bool, **more: str) -> Response:
        """One request with the canary as its prompt; the response is checked afterwards with all else."""
        response = await self.running.ask(chat(stream=stream, content=CANARY_TEXT, **more))
        self.responses.append(response)
        return response

    async def check(self, caplog: pytest.LogCaptureFixture) -> None:
        """Everything back at its baseline, one account per request, no traceback, no secret anywhere."""
        running, records = self.running, self.running.records
        await running.settled()
        if self.responses:
            await running.last_record(count=len(self.responses))
            assert len(records) == len(self.responses)
        for record in records:
            total = sum(float(str(record[f"{name}_ms"])) for name in SEGMENTS)
            assert abs(total - float(str(record["e2e_ms"]))) < 1
        pool = running.gateway.runtime.upstreams["up"].pool
        await until(lambda: self.upstream.open == pool.idle)
        assert await running.metric("gateway_inflight") == 0
        assert await running.metric("gateway_upstream_connections", state="busy") == 0
        assert await running.metric("gateway_requests_total") == len(records)
        problems = [r for r in caplog.records if r.exc_info or (r.levelno >= logging.ERROR)]
        assert problems == [], [r.getMessage() for r in problems]
        page = (await running.get("/metrics")).body.decode()
        texts = [caplog.text, str(records), page, *(str(r.headers) + r.body.decode("latin-1") for r in self.responses)]
        for text in texts:
            assert CANARY_KEY not in text
            assert CANARY_TEXT not in text
        for response in self.responses:
            assert response.header("x-request-id")
            assert f"127.0.0.1:{self.upstream.port}" not in response.body.decode("latin-1")


@asynccontextmanager
async def faulty(
    handler: Handler,
    caplog: pytest.LogCaptureFixture,
    *,
    route: Mapping[str, object] | None = None,
    upstream: Mapping[str, object] | None = None,
    **top: object,
) -> AsyncIterator[Faulty]:
    """A gateway before `handler`; the invariants are checked at the end of the block."""
    caplog.set_level(logging.DEBUG, "gateway")
    asyncio.get_running_loop().set_exception_handler(_fail)
    async with RawUpstream(handler) as raw:
        settings = settings_for(raw.url, route=route, **top)
        async with running_gateway(settings, upstream={"api_key": CANARY_KEY, **(upstream or {})}) as running:
            fault = Faulty(running, raw)
            yield fault
            await fault.check(caplog)


def _fail(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """What the loop would only log (an exception in a callback) becomes a log record that `check` sees."""
    logging.getLogger("gateway.loop").error("%s", context.get("message"), exc_info=context.get("exception"))  # type: ignore[arg-type]

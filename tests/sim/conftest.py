"""Set-up that every test here shares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.sim.profiles import FAST, Profile
from gateway.sim.transport import Server

# looptime asks for "the current event loop" also before tests that are not async. Where nobody has set one, asyncio
# then makes one that nobody closes, and its ResourceWarning fails a later test. "Set to none" answers that question.
asyncio.set_event_loop(None)


@pytest.fixture
async def serving() -> AsyncIterator[Callable[..., Server]]:
    """Makes servers, and checks that nothing is left of them."""
    servers: list[Server] = []

    def make(profile: Profile = FAST, **options: Any) -> Server:
        servers.append(Server(profile, **options))
        return servers[-1]

    yield make
    for server in servers:
        await server.close()
        assert not server.connections
        assert not server.engine.running
        assert not server.engine.waiting
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("sim ")] == []

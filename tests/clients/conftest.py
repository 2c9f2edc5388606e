"""Drivers of the real clients, one process each for all tests of this folder, and the loop that the gateway runs on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

from tests.clients.real_clients import KINDS, Client, bring_node_drivers, missing
from tests.clients.scenes import Played


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Client]]:
    """All clients by name, started side by side."""
    if absent := missing():
        message = f"no environment for {', '.join(absent)}: run `make test-clients`"
        if "CLIENT_VENVS" in os.environ:
            pytest.fail(message)
        pytest.skip(message)
    bring_node_drivers()
    folder = tmp_path_factory.mktemp("clients")
    found = {kind.name: Client(kind, folder) for kind in KINDS}
    try:
        for client in found.values():
            client.start()
        yield found
    finally:
        for client in found.values():
            client.end()


@pytest.fixture(scope="session")
def played(clients: dict[str, Client]) -> Played:
    """Scenes, each played once for all clients."""
    return Played(clients)

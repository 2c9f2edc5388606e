"""Which event loop a test runs on: uvloop where real sockets are used, as in production; the standard one elsewhere,
since only that one can be given a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import settings

settings.register_profile("ours", deadline=None)  # a busy machine is no failure
settings.load_profile("ours")


def pytest_configure(config: pytest.Config) -> None:
    """No loop but those of the tests: looptime asks for one around each test, also around those that need none, and
    the one that would be made for it is never closed, which fails whichever test runs when it is collected."""
    asyncio.set_event_loop(None)


SOCKET_FOLDERS = ("cases", "upstream", "serving", "vllm", "faults", "store")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    folders = item.path.relative_to(config.rootpath).parts[1:-1]
    if folders and folders[0] in SOCKET_FOLDERS:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}

"""The gateway as people start it: a process of its own, with its log in a file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.callers import Caller

START_S = 20.0  # a busy machine takes its time to start an interpreter


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Served(Caller):
    """A running `firsttoken serve`."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log

    async def workers(self, headers: dict[str, str] | None = None) -> set[int]:
        """Process ids of workers that answered, from several connections."""
        found = [(await self.get("/gateway/status", headers)).json["worker"]["pid"] for _ in range(12)]
        return set(found)

    def lines(self) -> list[dict[str, Any]]:
        """The log so far; every line of it that is not the greeting is JSON."""
        text = self.log.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in text if line.startswith("{")]

    async def logged(self, word: str, timeout: float = 5.0) -> dict[str, Any]:
        """The first log line that holds a word, once it is there."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            for line in self.lines():
                if word in json.dumps(line):
                    return line
            await asyncio.sleep(0.05)
        raise AssertionError(f"no `{word}` in the log:\n{self.log.read_text(encoding='utf-8')}")

    def send(self, sig: signal.Signals) -> None:
        self.process.send_signal(sig)

    async def ended(self, timeout: float = 15.0) -> int:
        async with asyncio.timeout(timeout):
            return await self.process.wait()


@asynccontextmanager
async def served(
    folder: Path,
    *arguments: str,
    workers: int = 1,
    port: int | None = None,
    env: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
) -> AsyncIterator[Served]:
    """`firsttoken serve ARGUMENTS` on a free port; ended with SIGTERM if the test has not done so."""
    port = port or free_port()
    log = folder / "log.txt"
    extra = ["--workers", str(workers)] if workers > 1 else []
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "serve", *arguments, "--port", str(port), "--log", "json", *extra,
            stderr=file, stdout=file, env={**os.environ, **(env or {})},
        )  # fmt: skip
    running = Served(process, port, log)
    try:
        await _is_up(running, workers, headers)
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await running.ended()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _is_up(running: Served, workers: int, headers: dict[str, str] | None) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert running.process.returncode is None, running.log.read_text(encoding="utf-8")
        try:
            async with asyncio.timeout(2):  # whoever has the port may not be ours
                if workers == 1 and (await running.get("/health")).status == 200:
                    return
                if workers > 1 and len(await running.workers(headers)) == workers:
                    return
        except OSError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError(f"not up in time:\n{running.log.read_text(encoding='utf-8')}")

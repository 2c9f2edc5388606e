"""The simulated server as a whole: over a socket with `serve`, or in memory with `Server.connect`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from gateway.sim.endpoints import Application, Request
from gateway.sim.engine import Engine
from gateway.sim.faults import Context, Fault, Script, chosen_fault, play
from gateway.sim.http import SimProtocol
from gateway.sim.memory import DEFAULT_WINDOW, MAX_READ, MemoryNetwork, MemoryTransport, made_soon, memory_pipe
from gateway.sim.profiles import Profile
from gateway.sim.steps import Head, Steps

P = TypeVar("P", bound=asyncio.BaseProtocol)
KEPT_REQUESTS = 64  # the last ones, for tests and for looking
BACKLOG = 2048  # vLLM's


class Server:
    """One simulated model server. Create it inside a running loop; `close()` ends everything it started.

    `fault` is played on every inference request that names none itself and finds none in `script`.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        seed: int = 0,
        api_key: str | None = None,
        fault: str | Fault | None = None,
        script: Sequence[str | Fault | None] = (),
    ) -> None:
        self.profile = profile
        self.engine = Engine(profile, seed)
        self.script = Script(script)
        self.default_fault = fault
        self.requests: deque[Request] = deque(maxlen=KEPT_REQUESTS)
        self.connections: set[SimProtocol] = set()
        self.connects = 0  # connections made so far
        self.deaf = False  # new connections are accepted and never read
        self.host, self.port = "", 0
        self._application = Application(self.engine, api_key=api_key, seed=seed)
        self._listener: asyncio.Server | None = None
        self._network: MemoryNetwork | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._down = False
        self._no_connections = asyncio.Event()
        self._no_connections.set()

    def __repr__(self) -> str:
        return f"<Server {self.profile.name}: {len(self.connections)} connections, {self.engine!r}>"

    @property
    def url(self) -> str:
        """Base address, without a path."""
        return f"http://{self.host}:{self.port}"

    def protocol(self) -> SimProtocol:
        """A protocol for one more connection: the factory for `loop.create_server` and `MemoryNetwork.listen`."""
        return SimProtocol(self)

    def connected(self, connection: SimProtocol) -> int:
        """A connection was made; returns its number, from 1."""
        self.connects += 1
        self.connections.add(connection)
        self._no_connections.clear()
        return self.connects

    def disconnected(self, connection: SimProtocol) -> None:
        """A connection was lost."""
        self.connections.discard(connection)
        if not self.connections:
            self._no_connections.set()

    async def listen(self, host: str, port: int) -> None:
        """Opens the socket; port 0 takes a free one. OSError if it is taken."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self.protocol, host, port, backlog=BACKLOG)
        self.host, self.port = self._listener.sockets[0].getsockname()[:2]

    def listen_in(self, network: MemoryNetwork, host: str, port: int) -> None:
        """Answers at an address of a network in memory, until it is closed or while it is not down."""
        network.listen(host, port, self.protocol)
        self._network, self.host, self.port = network, host, port

    async def connect(
        self,
        protocol_factory: Callable[[], P],
        *,
        window: int = DEFAULT_WINDOW,
        latency_s: float = 0.0,
        largest_read: int = MAX_READ,
    ) -> tuple[MemoryTransport, P]:
        """A client's connection in memory. ConnectionRefusedError while the server is down."""
        if self._down:
            raise ConnectionRefusedError(111, "the simulated server is down")
        client = protocol_factory()
        server = self.protocol()
        transport, _ = memory_pipe(client, server, window=window, latency_s=latency_s, largest_read=largest_read)
        await made_soon()
        return transport, client

    def answer(self, request: Request, connection: SimProtocol) -> Steps:
        """The steps for one request, the fault that it drew included."""
        self.requests.append(request)
        fault: Fault | None = None
        if self._application.is_inference(request):
            request, fault = chosen_fault(request, self.script, self.default_fault)
        steps = self.respond(request)
        return steps if fault is None else play(fault, steps, Context(request, connection, self))

    def respond(self, request: Request) -> Steps:
        """The steps for one request without any fault."""
        return self._counted(self._application.respond(request), request)

    async def _counted(self, steps: Steps, request: Request) -> Steps:
        stats, name = self.engine.stats, self._application.handler_name(request.path)
        try:
            async for step in steps:
                if type(step) is Head:
                    stats.http[(name, f"{step.status // 100}xx", request.method)] += 1
                yield step
        finally:
            await steps.aclose()

    def restart_soon(self, down_s: float) -> None:
        """`restart()` in the background, for a request that brings the server down."""
        self.spawn(self.restart(down_s), "sim restart")

    def spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Runs `work` as a task that `close()` ends."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def restart(self, down_s: float = 0.0) -> None:
        """As if the process died and came back: connections reset, nothing cached or compiled, refused meanwhile."""
        self._down = True
        listening, network = self._listener is not None, self._network
        self._close_listener()
        self._reset_connections()
        self.engine.restart()
        await asyncio.sleep(down_s)
        if listening:
            await self.listen(self.host, self.port)
        if network is not None:
            self.listen_in(network, self.host, self.port)
        self._down = False

    async def close(self) -> None:
        """Ends the listener, every connection and every task, and waits for them."""
        self._down = True
        self._close_listener()
        self._reset_connections()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._no_connections.wait()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._network is not None:
            self._network.unlisten(self.host, self.port)
            self._network = None

    def _reset_connections(self) -> None:
        for connection in list(self.connections):
            connection.hang_up(reset=True)


async def serve(
    profile: Profile,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    seed: int = 0,
    api_key: str | None = None,
    fault: str | Fault | None = None,
    script: Sequence[str | Fault | None] = (),
) -> Server:
    """Starts a server on a socket. OSError if the port is taken."""
    server = Server(profile, seed=seed, api_key=api_key, fault=fault, script=script)
    await server.listen(host, port)
    return server

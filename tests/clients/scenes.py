"""One scene: a model server that behaves in some way, the gateway before it, and every client calling at once.

A scene is played once for all clients, since nearly all of its time is waiting; each test looks at what one client
saw. Every client has a route of its own, named after it, so that records and requests can be told apart.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tests.clients.real_clients import KINDS, Client, Kind, Said
from tests.support.process import free_port
from tests.support.raw import Handler, RawUpstream, Received
from tests.support.running import Running, running_gateway, until

Mode = Literal["stream", "plain"]
MODES: tuple[Mode, ...] = ("stream", "plain")
MARK = "x-test-client"  # who asks, told to the model server

# No timer but those that a scene is about may fire, however busy the machine is.
PATIENT: dict[str, int] = {"first_token_ms": 15_000, "idle_ms": 15_000, "total_ms": 15_000}

# Ten clients that meet the same failure at once would open it, and then see another message.
NO_BREAKER: dict[str, Any] = {"breaker": {"mode": "off"}}


@dataclass(frozen=True)
class Seen:
    """What came of one client's call."""

    said: Said
    records: list[dict[str, Any]]  # the gateway's, one for each request that the client made
    requests: list[Received]  # the model servers'
    seconds: float


@dataclass(frozen=True)
class Scene:
    """`plays`: how each model server behaves, by name; None: nobody listens there."""

    name: str
    plays: Mapping[str, Handler | None]
    route: Mapping[str, Any] = field(default_factory=dict)
    upstream: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    kinds: Sequence[Kind] = KINDS
    is_shared: bool = True  # False: a gateway for each client, where ten at once would use up a common allowance
    around: Callable[[Running], AbstractAsyncContextManager[None]] | None = None  # what goes on when the clients come

    def __str__(self) -> str:
        return self.name


def scene(name: str, play: Handler | None, *, route: Mapping[str, Any] | None = None, **more: Any) -> Scene:
    """A scene with one model server, called `up`."""
    return Scene(name, {"up": play}, route or {}, **more)


class Played:
    """The scenes that were played so far."""

    def __init__(self, clients: Mapping[str, Client]) -> None:
        self._clients = clients
        self._seen: dict[tuple[str, Mode], dict[str, Seen]] = {}

    async def see(self, scene: Scene, mode: Mode, kind: Kind) -> Seen:
        """What a client saw; plays the scene if it was not played yet."""
        key = (scene.name, mode)
        if key not in self._seen:
            self._seen[key] = await _play(scene, mode, self._clients)
        return self._seen[key][kind.name]


async def _play(scene: Scene, mode: Mode, clients: Mapping[str, Client]) -> dict[str, Seen]:
    if scene.is_shared:
        return await _play_together(scene, mode, clients)
    alone = [_play_together(replace(scene, kinds=(kind,)), mode, clients) for kind in scene.kinds]
    return {name: seen for part in await asyncio.gather(*alone) for name, seen in part.items()}


async def _play_together(scene: Scene, mode: Mode, clients: Mapping[str, Client]) -> dict[str, Seen]:
    async with stage(scene) as (gateway, servers):
        async with scene.around(gateway) if scene.around is not None else nullcontext():
            calls = [_call(clients[kind.name], gateway, mode, scene.job) for kind in scene.kinds]
            outcomes = await asyncio.gather(*calls)
        await until(lambda: gateway.gateway.proxy.running == 0)
        records, requests = gateway.records, [request for server in servers for request in server.requests]
    return {
        kind.name: Seen(
            said,
            [record for record in records if record["route"] == kind.name],
            [request for request in requests if request.header(MARK) == kind.name],
            seconds,
        )
        for kind, (said, seconds) in zip(scene.kinds, outcomes, strict=True)
    }


async def _call(client: Client, gateway: Running, mode: Mode, job: Mapping[str, Any]) -> tuple[Said, float]:
    """What the client said, and how long its user waited. A library is imported before the clock starts."""
    await asyncio.to_thread(client.get_ready)
    started = asyncio.get_running_loop().time()
    headers = {MARK: client.kind.name, **job.get("headers", {})}
    said = await client.use(f"{gateway.url}/{client.kind.name}", mode, **{**job, "headers": headers})
    return said, asyncio.get_running_loop().time() - started


@asynccontextmanager
async def stage(scene: Scene) -> AsyncIterator[tuple[Running, list[RawUpstream]]]:
    """The gateway and the model servers of a scene, running."""
    async with AsyncExitStack() as stack:
        servers: list[RawUpstream] = []
        upstreams: dict[str, dict[str, Any]] = {}
        for name, play in scene.plays.items():
            url = f"http://127.0.0.1:{free_port()}"
            if play is not None:
                servers.append(await stack.enter_async_context(RawUpstream(play)))
                url = servers[-1].url
            upstreams[name] = {"url": url, **NO_BREAKER, **scene.upstream}
        settings: dict[str, Any] = {
            "upstreams": upstreams,
            "routes": [_route(kind.name, scene) for kind in scene.kinds],
        }
        settings["routes"] += [_route("raw", scene)]
        yield await stack.enter_async_context(running_gateway(settings)), servers


def _route(name: str, scene: Scene) -> dict[str, Any]:
    given = dict(scene.route)
    names = given.pop("upstreams", list(scene.plays))
    timeouts = {**PATIENT, **given.pop("timeouts", {})}
    return {"name": name, "match": {"prefix": f"/{name}"}, "upstreams": names, "timeouts": timeouts, **given}


def chat_body(*, stream: bool) -> bytes:
    """What the SDKs send, more or less, for callers without one."""
    return json.dumps({"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}).encode()

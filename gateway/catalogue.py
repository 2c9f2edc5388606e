"""`/v1/models`: what can be asked for here. Ours, not an upstream's: route names first, then the servers' own models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson

from gateway.errors import NoRoute
from gateway.policy.routes import may_use

if TYPE_CHECKING:
    from gateway.config import Key
    from gateway.exchange import Call, Exchange
    from gateway.runtime import RouteState, Runtime
    from gateway.upstream.watch import Watch


async def answer_models(x: Exchange, call: Call, runtime: Runtime, watch: Watch, key: Key | None, path: str) -> None:
    """`GET …/v1/models` and `…/v1/models/ID`. Never slower than the slowest server's 3 s, and only every 5 s."""
    before, _, wanted = path.partition("/v1/models")
    routes = _routes_of(runtime, before, key)
    states = {state.name: state for route in routes for state in route.upstreams}
    await asyncio.gather(*(watch.models(state) for state in states.values()))
    entries: dict[str, dict[str, object]] = {}
    for route in routes:
        for name in route.config.match.models:
            if not set(name) & set("*?["):
                entries.setdefault(name, _own_entry(name, route))
    for state in states.values():
        for model in state.models:
            entries.setdefault(str(model["id"]), model)
    x.settle("complete")
    wanted = wanted.lstrip("/")
    if not wanted:
        _send(x, call, {"object": "list", "data": list(entries.values())})
    elif wanted in entries:
        _send(x, call, entries[wanted])
    else:
        x.outcome = None
        raise NoRoute(f"There is no model `{wanted[:128]}` here; GET /v1/models lists them.", code="model_not_found")


def _routes_of(runtime: Runtime, prefix: str, key: Key | None) -> list[RouteState]:
    """Routes whose models this path and key show; without a prefix, those that have none."""
    wanted = prefix or None
    shown = [route for route in runtime.routes.values() if (route.config.match.prefix or None) == wanted]
    if not shown and wanted is not None:
        raise NoRoute(f"No route has the prefix `{wanted}`.")
    if not shown:
        shown = list(runtime.routes.values())
    return [route for route in shown if key is None or may_use(key, route.config)]


def _own_entry(name: str, route: RouteState) -> dict[str, object]:
    """A name that a route listens to, with the limits of the model behind it where they are known."""
    entry: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "firsttoken"}
    target = route.config.model or name
    for state in route.upstreams:
        for model in state.models:
            if model.get("id") == target and "max_model_len" in model:
                entry["max_model_len"] = model["max_model_len"]
    return entry


def _send(x: Exchange, call: Call, payload: object) -> None:
    body = orjson.dumps(payload)
    x.status = 200
    call.start(
        200, [(b"content-type", b"application/json"), (b"x-request-id", x.request_id.encode("ascii"))], len(body)
    )
    call.write(body)
    call.end()

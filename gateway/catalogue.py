"""`/v1/models`: what can be asked for here. Ours, not an upstream's: routes' names first, then the servers' models."""

from __future__ import annotations

import asyncio
import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING
from urllib.parse import unquote

import orjson

from gateway.errors import NoRoute
from gateway.exchange import ClientGone
from gateway.policy.routes import may_use
from gateway.wire.headers import label_value

if TYPE_CHECKING:
    from gateway.config import Key
    from gateway.exchange import Call, Exchange
    from gateway.runtime import RouteState, Runtime
    from gateway.upstream.watch import Watch
    from gateway.wire.answer import JsonObject


async def answer_models(x: Exchange, call: Call, runtime: Runtime, watch: Watch, key: Key | None, path: str) -> None:
    """`GET …/v1/models` and `…/v1/models/ID`. Never slower than the slowest server's 3 s, and only every 5 s.

    Raises NoRoute, ClientGone.
    """
    before, _, wanted = path.partition("/v1/models")
    routes = _routes_of(runtime, unquote(before), key)
    states = {state.name: state for route in routes for state in route.upstreams}
    await asyncio.gather(*(watch.models(state) for state in states.values()))
    if call.is_gone:
        raise ClientGone
    entries = _entries(routes)
    wanted = unquote(wanted.lstrip("/"))
    if wanted and wanted not in entries:
        shown = label_value(wanted)
        raise NoRoute(f"There is no model `{shown}` here; GET /v1/models lists them.", code="model_not_found")
    x.settle("complete")
    _send(x, call, entries[wanted] if wanted else {"object": "list", "data": list(entries.values())})


def _entries(routes: list[RouteState]) -> dict[str, JsonObject]:
    """Names that routes listen to, then what their servers call their models where a route takes that name."""
    entries: dict[str, JsonObject] = {}
    for route in routes:
        for name in route.config.match.models:
            if not set(name) & set("*?["):
                entries.setdefault(name, _own_entry(name, route))
    for route in routes:
        for state in route.upstreams:
            for model in state.models:
                name = str(model["id"])
                if _takes(route, name):
                    entries.setdefault(name, model)
    return entries


def _takes(route: RouteState, model: str) -> bool:
    globs = route.config.match.models
    return not globs or any(fnmatchcase(model, glob) for glob in globs)


def _routes_of(runtime: Runtime, prefix: str, key: Key | None) -> list[RouteState]:
    """Routes whose models this path and key show; without a prefix, those that have none."""
    shown = [route for route in runtime.routes.values() if unquote(route.config.match.prefix or "") == prefix]
    if not shown and prefix:
        raise NoRoute(f"No route has the prefix `{label_value(prefix)}`.")
    if not shown:
        shown = list(runtime.routes.values())
    return [route for route in shown if key is None or may_use(key, route.config)]


def _own_entry(name: str, route: RouteState) -> JsonObject:
    """A name that a route listens to: the server's own entry if the name is the server's, else one of ours with the
    limits of the model behind it where they are known."""
    entry: JsonObject = {"id": name, "object": "model", "created": 0, "owned_by": "firsttoken"}
    target = route.config.model or name
    for state in route.upstreams:
        for model in state.models:
            if model.get("id") == target:
                if target == name:
                    return model
                if "max_model_len" in model:
                    entry["max_model_len"] = model["max_model_len"]
    return entry


def _send(x: Exchange, call: Call, payload: JsonObject) -> None:
    try:
        body = orjson.dumps(payload)
    except TypeError:  # an integer beyond 64 bits or half a surrogate pair in what a server said
        body = json.dumps(payload).encode("ascii")
    x.status = 200
    fields = [(b"content-type", b"application/json"), (b"x-request-id", x.request_id.encode("ascii")), *(x.cors or ())]
    call.start(200, fields, len(body))
    call.write(body)
    call.end()

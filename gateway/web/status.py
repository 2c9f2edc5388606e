"""`/gateway/status`: what this process does at the moment, as JSON."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from gateway import __version__

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.runtime import RouteState
    from gateway.upstream.state import UpstreamState

RECENT_SHOWN = 50


def status_of(gateway: Gateway) -> dict[str, object]:
    """Upstreams, routes and recent requests of this worker. Holds no secret."""
    runtime = gateway.runtime
    return {
        "version": __version__,
        "worker": {"pid": os.getpid(), "index": gateway.worker},
        "uptime_s": round(time.time() - gateway.started_at, 3),
        "draining": gateway.is_draining,
        "running": gateway.proxy.running,
        "upstreams": {name: _upstream(state) for name, state in runtime.upstreams.items()},
        "routes": [_route(route) for route in runtime.routes.values()],
        "recent": gateway.account.recent(RECENT_SHOWN),
    }


def _upstream(state: UpstreamState) -> dict[str, object]:
    pool = state.pool
    return {
        "up": state.is_up,
        "problem": state.last_problem,
        "engine": state.engine,
        "models": [model["id"] for model in state.models],
        "inflight": state.inflight,
        "connections": {"idle": pool.idle, "open": pool.open},
        "rtt_ms": None if state.rtt_ns is None else round(state.rtt_ns / 1e6, 3),
        "refuses_thinking_switch": state.refuses_switch.names(),
        "refuses_usage": state.refuses_usage.names(),
    }


def _route(route: RouteState) -> dict[str, object]:
    config = route.config
    match = config.match.model_dump(exclude_defaults=True)
    if "headers" in match:
        match["headers"] = sorted(match["headers"])  # names only: a condition on a value may be a secret
    return {
        "name": config.name,
        "match": match,
        "upstreams": list(config.upstreams),
        "model": config.model,
        "thinking": config.thinking,
        "thinking_violated_at": sorted(s.name for s in route.upstreams if config.name in s.violations_seen),
        "max_tokens": config.max_tokens.model_dump(exclude_none=True),
        "clean": config.clean.model_dump(),
        "budget": config.budget.model_dump(exclude_none=True),
    }

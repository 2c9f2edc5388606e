"""`/gateway/status`: what this process does at the moment, as JSON."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from gateway import __version__

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.policy.warming import WarmupReport
    from gateway.runtime import RouteState
    from gateway.upstream.state import UpstreamState

RECENT_SHOWN = 50


def status_of(gateway: Gateway) -> dict[str, object]:
    """Upstreams, routes and recent requests of this worker. Holds no secret."""
    runtime, now = gateway.runtime, gateway.clock()
    ejections = runtime.fleet.ejections.snapshot(now)
    return {
        "version": __version__,
        "worker": {"pid": os.getpid(), "index": gateway.worker},
        "uptime_s": round(time.time() - gateway.started_at, 3),
        "draining": gateway.is_draining,
        "running": gateway.proxy.running,
        "upstreams": {
            name: {
                **_upstream(state),
                **ejections.get(name, {}),
                "breakers": breakers_of(state, now),
                "retry_tokens": state.standing.bucket.tokens,
                "queued": state.pool.queued,
            }
            for name, state in runtime.upstreams.items()
        },
        "pending": {"running": gateway.pendings.running, "bytes": gateway.pendings.bytes},
        "store": {"shared": gateway.store.is_shared, "up": gateway.store.is_up},
        "routes": [_route(route) for route in runtime.routes.values()],
        "recent": gateway.account.recent(RECENT_SHOWN),
    }


def _upstream(state: UpstreamState) -> dict[str, object]:
    pool = state.pool
    return {
        "up": state.is_up,
        "problem": state.last_problem,
        "warmth": state.warmth,
        "warmup": _warmup(state.warmup_report),
        "restarts": state.restarts,
        "last_restart": _last_restart(state),
        "engine": state.engine,
        "models": [model["id"] for model in state.models],
        "inflight": state.inflight,
        "connections": {"idle": pool.idle, "open": pool.open},
        "rtt_ms": None if state.rtt_ns is None else round(state.rtt_ns / 1e6, 3),
        "refuses_thinking_switch": state.refuses_switch.names(),
        "refuses_usage": state.refuses_usage.names(),
    }


def _warmup(report: WarmupReport | None) -> dict[str, object] | None:
    """The last warm-up, done or not; None before its first try."""
    if report is None:
        return None
    return {
        "first_ttft_ms": _ms(report.first_s),
        "last_ttft_ms": _ms(report.last_s),
        "slowest_ttft_ms": _ms(report.slowest_s),
        "requests": report.requests,
        "shapes": report.shapes,
        "refused": list(report.refused),
        "unsteady": list(report.unsteady),
        "seconds": round(report.seconds, 3),
        "problem": report.problem,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _last_restart(state: UpstreamState) -> dict[str, object] | None:
    if state.restarted_at_ns is None:
        return None
    return {"sign": state.restart_sign, "seconds_ago": round((state.clock() - state.restarted_at_ns) / 1e9, 3)}


def breakers_of(state: UpstreamState, now: int) -> dict[str, object]:
    """Circuit breakers by model, as their machines tell."""
    return {label: breaker.snapshot(now) for label, breaker in state.standing.breakers.items()}


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

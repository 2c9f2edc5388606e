"""One loaded configuration, ready to serve: routes compiled, pools and meters made. A reload makes a new one.

A running request keeps the runtime that it began with. Upstreams whose settings did not change are carried over
with their pools and what was learned of them; those that are gone are drained.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.cors import CorsRules
from gateway.policy.admission import KeyRing
from gateway.policy.ejection import Ejections
from gateway.policy.retrying import ExtraAttempts
from gateway.policy.routes import RouteTable, compile_routes
from gateway.upstream.state import UpstreamState

if TYPE_CHECKING:
    from gateway.account import Account
    from gateway.config import Route, Settings
    from gateway.upstream.connection import Clock
    from gateway.upstream.pool import Connect

log = logging.getLogger("gateway.upstream")


class RouteState:
    """A route with what serves it."""

    __slots__ = ("cleans", "config", "name_header", "turn", "upstreams")

    def __init__(self, config: Route, upstreams: tuple[UpstreamState, ...], name_header: bytes) -> None:
        self.config = config
        self.upstreams = upstreams
        self.name_header = name_header
        self.cleans = not config.clean.is_off
        self.turn = 0


class Fleet:
    """What all upstreams share: who is ejected, and how much may be sent twice. Kept over reloads."""

    __slots__ = ("ejections", "extra", "upstreams")

    def __init__(self) -> None:
        self.ejections = Ejections({}, jitter=random.random)
        self.extra = ExtraAttempts()
        self.upstreams: dict[str, UpstreamState] = {}

    def follow(self, upstreams: dict[str, UpstreamState]) -> None:
        """The upstreams of a new configuration."""
        self.upstreams = upstreams
        self.ejections.follow({name: state.config.breaker for name, state in upstreams.items()})

    def watch_returns(self, state: UpstreamState, clock: Callable[[], int]) -> None:
        """A restarted upstream, or one whose breaker closes, starts slowly (fault-catalogue 3.3, D1)."""

        def start_slowly() -> None:
            self.ejections.note_return(state.name, clock())

        state.standing.on_return = start_slowly
        state.on_restart.append(start_slowly)

    def are_most_slow(self, names: list[str], now: int) -> bool:
        """More than half of them saturated or slow: then a second request only adds load (C035)."""
        slow = sum(self.upstreams[name].pool.is_full or self._is_slow(name, now) for name in names)
        return 2 * slow > len(names)

    def _is_slow(self, name: str, now: int) -> bool:
        for breaker in self.upstreams[name].standing.breakers.values():
            seen = breaker.snapshot(now)
            rate = seen["slow_call_rate"]
            if isinstance(rate, float) and rate >= 50:
                return True
        return False

    def look_for_silence(self, now: int) -> None:
        """Ejects upstreams that take requests and answer none (C113). Once a second."""
        for name, state in self.upstreams.items():
            standing = state.standing
            if not standing.running:
                continue
            waits = standing.waits()
            if waits and self.ejections.note_waits(name, waits, standing.last_sign_ns(), now):
                log.warning("upstream `%s` takes requests and gives no first token: it is left out", name)
            elif self.ejections.note_waits(name, standing.stalled(now), standing.last_end_ns, now):
                log.warning("upstream `%s` stops in the middle of its answers: it is left out", name)
            if waits and self.ejections.is_silent(name, now):
                for attempt in list(standing.running):
                    if attempt.relay is not None:
                        attempt.relay.on_silence(now)


class Runtime:
    """See the module."""

    def __init__(
        self,
        settings: Settings,
        account: Account,
        clock: Clock,
        *,
        connect: Connect | None = None,
        previous: Runtime | None = None,
        header: Callable[[str], bytes],
    ) -> None:
        self.settings = settings
        self.fleet: Fleet = previous.fleet if previous is not None else Fleet()
        self.keys = KeyRing(settings.keys)
        self.cors = CorsRules(settings.cors) if settings.cors.origins else None
        self.table: RouteTable = compile_routes(settings)
        self.upstreams: dict[str, UpstreamState] = {}
        for name, config in settings.upstreams.items():
            known = previous.upstreams.get(name) if previous is not None else None
            if known is not None and known.config == config:
                self.upstreams[name] = known
            else:
                meters = account.add_upstream(name)
                state = UpstreamState(name, config, clock=clock, meters=meters, connect=connect)
                self.fleet.watch_returns(state, clock)
                self.upstreams[name] = state
        self.fleet.follow(self.upstreams)
        self.routes: dict[str, RouteState] = {}
        for route in settings.routes:
            states = tuple(self.upstreams[name] for name in route.upstreams)
            self.routes[route.name] = RouteState(route, states, header(route.name))
            account.add_route(route.name)
            for name in route.upstreams:
                account.add_pair(route.name, name)
        self._name_models(settings)
        self._add_fallback_pairs(settings, account)
        self.open_paths = frozenset(path for route in settings.routes for path in route.open_paths)

    def fallback_of(self, route: RouteState) -> tuple[RouteState, tuple[UpstreamState, ...]] | None:
        """Where else a route's requests may go: another route with its own policies, or an upstream with this one's."""
        name = route.config.budget.fallback
        if name is None:
            return None
        other = self.routes.get(name)
        if other is not None:
            return other, other.upstreams
        state = self.upstreams.get(name)
        return (route, (state,)) if state is not None else None

    def _name_models(self, settings: Settings) -> None:
        """Model names of the configuration: only these become labels."""
        names: dict[str, set[str]] = {name: set() for name in self.upstreams}
        for route in settings.routes:
            own = {route.model} if route.model is not None else set(route.match.models)
            for name in route.upstreams:
                names[name] |= {model for model in own if not set("*?[") & set(model)}
        for name, state in self.upstreams.items():
            state.standing.names = frozenset(names[name])

    def _add_fallback_pairs(self, settings: Settings, account: Account) -> None:
        for route in settings.routes:
            fallback = self.fallback_of(self.routes[route.name])
            for state in fallback[1] if fallback is not None else ():
                account.add_pair(route.name, state.name)

    def retire(self, successor: Runtime) -> None:
        """Closes the pools that the successor does not use; requests under way keep their connections."""
        kept = {id(state) for state in successor.upstreams.values()}
        for state in self.upstreams.values():
            if id(state) not in kept:
                state.pool.close()

    @property
    def is_ready(self) -> bool:
        """An upstream is usable: not known to be down, and warm. Where a warm-up was given up, waiting no longer
        helps: an upstream that is there will do."""
        return any(
            state.is_usable or (state.is_last_resort and state.warmth == "failed") for state in self.upstreams.values()
        )

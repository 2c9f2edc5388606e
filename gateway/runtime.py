"""One loaded configuration, ready to serve: routes compiled, pools and meters made. A reload makes a new one.

A running request keeps the runtime that it began with. Upstreams whose settings did not change are carried over
with their pools and what was learned of them; those that are gone are drained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.cors import CorsRules
from gateway.policy.admission import KeyRing
from gateway.policy.routes import RouteTable, compile_routes
from gateway.upstream.state import UpstreamState

if TYPE_CHECKING:
    from gateway.account import Account
    from gateway.config import Route, Settings
    from gateway.upstream.connection import Clock
    from gateway.upstream.pool import Connect


class RouteState:
    """A route with what serves it."""

    __slots__ = ("cleans", "config", "name_header", "turn", "upstreams")

    def __init__(self, config: Route, upstreams: tuple[UpstreamState, ...], name_header: bytes) -> None:
        self.config = config
        self.upstreams = upstreams
        self.name_header = name_header
        self.cleans = not config.clean.is_off
        self.turn = 0


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
                self.upstreams[name] = UpstreamState(name, config, clock=clock, meters=meters, connect=connect)
        self.routes: dict[str, RouteState] = {}
        for route in settings.routes:
            states = tuple(self.upstreams[name] for name in route.upstreams)
            self.routes[route.name] = RouteState(route, states, header(route.name))
            account.add_route(route.name)
            for name in route.upstreams:
                account.add_pair(route.name, name)
        self.open_paths = frozenset(path for route in settings.routes for path in route.open_paths)

    def retire(self, successor: Runtime) -> None:
        """Closes the pools that the successor does not use; requests under way keep their connections."""
        kept = {id(state) for state in successor.upstreams.values()}
        for state in self.upstreams.values():
            if id(state) not in kept:
                state.pool.close()

    @property
    def is_ready(self) -> bool:
        """At least one upstream is not known to be down, or none was asked yet."""
        return any(state.is_up is not False for state in self.upstreams.values())

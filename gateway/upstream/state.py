"""What the gateway knows of one model server while it runs: its pool, engine, models, and what it refuses."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Literal

from gateway.config import Timeouts, Upstream
from gateway.policy.restarts import SIGNS, Sign
from gateway.policy.warming import WarmupReport
from gateway.upstream.pool import Connect, Pool
from gateway.upstream.standing import Standing
from gateway.wire.engines import Engine

if TYPE_CHECKING:
    from gateway.metrics import UpstreamMeters
    from gateway.upstream.connection import Clock

log = logging.getLogger("gateway.upstream")

Warmth = Literal["cold", "warming", "warm", "failed"]
"""`failed`: the warm-up was given up, and is tried again from time to time."""

LOADING = "loading"  # `last_problem` of a server that is there and reads its model (fault-catalogue B17)
MAX_REMEMBERED = 256  # models per kind of refusal; beyond, the oldest is asked again
RTT_SAMPLES = 20  # latency-methods §3: median of 20


HALF_OPEN_WAIT_MS = 2 * Timeouts().first_token_ms  # longest stay in half-open (fault-catalogue 3.2)


class Refusals:
    """Models of one upstream that answered 400 to something of ours. Bounded, oldest out first."""

    def __init__(self) -> None:
        self._models: dict[str, None] = {}

    def __contains__(self, model: object) -> bool:
        return model in self._models

    def __len__(self) -> int:
        return len(self._models)

    def add(self, model: str) -> None:
        self._models[model] = None
        while len(self._models) > MAX_REMEMBERED:
            del self._models[next(iter(self._models))]

    def names(self) -> list[str]:
        return list(self._models)


class UpstreamState:
    """One upstream. Kept over a reload when its settings did not change."""

    def __init__(
        self, name: str, config: Upstream, *, clock: Clock, meters: UpstreamMeters, connect: Connect | None = None
    ) -> None:
        self.name = name
        self.config = config
        self.clock = clock
        self.meters = meters
        self.pool = Pool(name, config, clock=clock, meters=meters, connect=connect)
        self.standing = Standing(
            config,
            half_open_wait_ms=HALF_OPEN_WAIT_MS,
            on_breaker=meters.breaker_made,
            on_transition=meters.breaker_moved,
            names=frozenset(),
        )
        self.engine: Engine = "openai" if config.engine == "auto" else config.engine  # until it was asked
        self.is_engine_known = config.engine != "auto"
        self.is_up: bool | None = None  # None: not asked yet
        self.last_problem: str | None = None
        self.models: tuple[dict[str, object], ...] = ()
        self.warmth: Warmth = "cold" if config.warmup.enabled else "warm"
        self.warmup_report: WarmupReport | None = None
        """Of the last warm-up, done or not."""
        self.restarts = 0
        self.restarted_at_ns: int | None = None
        """When the last restart was noticed, on the gateway's clock."""
        self.restart_sign: Sign | None = None
        self.on_restart: list[Callable[[], None]] = [self._forget_forecasts]
        """Called at each restart: whoever learned something of the old process forgets it."""
        self.count_own_waiting: Callable[[], int] = self.standing.waiting
        """Our requests here that were sent and have no first token yet; whoever counts them puts itself here."""
        self.foreign_waiting: int | None = None
        """Requests of others in the server's queue at the last scrape (latency-methods §2.1); None: it does not say."""
        self.foreign_waiting_at_ns = 0
        self.refuses_switch = Refusals()
        self.refuses_usage = Refusals()
        self.warned: set[str] = set()  # routes whose wish about thinking this model cannot meet, one warning each
        self.violations_seen: set[str] = set()  # routes warned of, one warning each
        self._rtts: deque[int] = deque(maxlen=RTT_SAMPLES)
        self.rtt_ns: int | None = None
        """Median round trip of the last fresh connections; None while there was none."""
        authorization = b""
        if config.api_key is not None and config.api_key.get_secret_value():
            authorization = b"authorization: Bearer %b\r\n" % config.api_key.get_secret_value().encode()
        self.head_lines = b"host: %b\r\naccept-encoding: identity\r\n%b" % (host_header(config), authorization)

    def __repr__(self) -> str:
        state = {None: "unknown", True: "up", False: "down"}[self.is_up]
        return f"<UpstreamState {self.name}: {state}, {self.warmth}, {self.engine}, {self.pool!r}>"

    @property
    def inflight(self) -> int:
        return self.pool.leases

    def _forget_forecasts(self) -> None:
        self.standing.forecasts.restarted(self.clock())

    @property
    def is_usable(self) -> bool:
        """May be picked first: not known to be down, and warm."""
        return self.is_up is not False and self.warmth == "warm"

    @property
    def is_last_resort(self) -> bool:
        """May be picked when no upstream of the route is usable: there, but not warm. Slow service beats none."""
        return self.is_up is not False and self.warmth != "warm"

    @property
    def is_loading(self) -> bool:
        """Down, but on its way up: it said so itself (fault-catalogue B17)."""
        return self.is_up is False and self.last_problem == LOADING

    def note_waiting(self, waiting: int | None) -> None:
        """The length of the server's queue, ours included, as just scraped."""
        self.foreign_waiting = None if waiting is None else max(0, waiting - self.count_own_waiting())
        self.foreign_waiting_at_ns = self.clock()

    def note_restart(self, sign: Sign) -> None:
        """The server is another process than before."""
        self.restarts += 1
        self.restarted_at_ns = self.clock()
        self.restart_sign = sign
        log.info("upstream `%s` was restarted: %s", self.name, SIGNS[sign])
        for forget in self.on_restart:
            forget()

    def note_rtt(self, rtt_ns: int | None) -> None:
        """The round trip of a fresh connection."""
        if rtt_ns is not None:
            self._rtts.append(rtt_ns)
            self.rtt_ns = int(median(self._rtts))


def host_header(config: Upstream) -> bytes:
    """Host as the upstream expects it: port only when it is not the scheme's own, brackets around IPv6."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    default = 443 if config.is_tls else 80
    return (host if config.port == default else f"{host}:{config.port}").encode(
        "idna" if not host.isascii() else "ascii"
    )

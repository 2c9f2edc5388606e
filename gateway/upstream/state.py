"""What the gateway knows of one model server while it runs: its pool, engine, models, and what it refuses."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from gateway.config import Upstream
from gateway.upstream.pool import Connect, Pool
from gateway.wire.engines import Engine

if TYPE_CHECKING:
    from gateway.metrics import UpstreamMeters
    from gateway.upstream.connection import Clock

MAX_REMEMBERED = 256  # models per kind of refusal; beyond, the oldest is asked again
RTT_SAMPLES = 20  # latency-methods §3: median of 20


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
        self.meters = meters
        self.pool = Pool(name, config, clock=clock, meters=meters, connect=connect)
        self.engine: Engine = "openai" if config.engine == "auto" else config.engine  # until it was asked
        self.is_engine_known = config.engine != "auto"
        self.is_up: bool | None = None  # None: not asked yet
        self.last_problem: str | None = None
        self.models: tuple[dict[str, object], ...] = ()
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
        return f"<UpstreamState {self.name}: {state}, {self.engine}, {self.pool!r}>"

    @property
    def inflight(self) -> int:
        return self.pool.leases

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

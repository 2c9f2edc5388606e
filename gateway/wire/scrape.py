"""The few numbers of a model server's `/metrics` that a health check needs (upstream-contract §6)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from gateway.wire.engines import Engine

_START: Final = b"process_start_time_seconds"
_WAITING: Final[Mapping[Engine, bytes]] = MappingProxyType({
    "vllm": b"vllm:num_requests_waiting",
    "sglang": b"sglang:num_queue_reqs",
    "llamacpp": b"llamacpp:requests_deferred",
})  # fmt: skip
# Of these some go up with every request, and all start at zero. `_total` is not there in every version.
_COUNTERS: Final[Mapping[Engine, tuple[bytes, ...]]] = MappingProxyType({
    "vllm": (b"vllm:prompt_tokens", b"vllm:generation_tokens"),
    "sglang": (b"sglang:prompt_tokens", b"sglang:generation_tokens"),
    "llamacpp": (b"llamacpp:prompt_tokens", b"llamacpp:tokens_predicted"),
})  # fmt: skip

HAS_NUMBERS: Final[frozenset[Engine]] = frozenset(_WAITING)


@dataclass(frozen=True, slots=True)
class ServerNumbers:
    """None or absent where the page does not say."""

    start_time_s: float | None = None
    """Unix time of the process's start."""
    waiting: int | None = None
    """Requests in the server's queue, over all its engines."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Sums that only a restart lowers, by name without `_total`."""


def numbers_in(page: bytes, engine: Engine, start_header: bytes | None = None) -> ServerNumbers:
    """Reads a page in Prometheus' text format, of any content; never raises.

    `start_header` is llama.cpp's response header `Process-Start-Time-Unix`, which it sends instead of the series.
    """
    if engine not in HAS_NUMBERS:
        return ServerNumbers()
    start = _sum(page, _START)
    if start is None and start_header is not None:
        start = _number(start_header)
    waiting = _sum(page, _WAITING[engine])
    counters: dict[str, float] = {}
    for name in _COUNTERS[engine]:
        total = _sum(page, name + b"_total")
        total = _sum(page, name) if total is None else total
        if total is not None:
            counters[name.decode()] = total
    return ServerNumbers(start, None if waiting is None or waiting < 0 else int(waiting), counters)


def _sum(page: bytes, name: bytes) -> float | None:
    """The sum of all series of this name; None when there is none."""
    found = list(_values(page, name))
    return sum(found) if found else None


def _values(page: bytes, name: bytes) -> Iterator[float]:
    """The values of the lines that begin with `name` and go on with labels or a blank: names share their beginnings."""
    at = 0 if page.startswith(name) else _next(page, name, 0)
    while at >= 0:
        end = page.find(b"\n", at)
        line = page[at : end if end >= 0 else len(page)]
        rest = line[len(name) :]
        if rest[:1] == b"{":
            rest = rest.partition(b" # ")[0]  # an exemplar, which has braces of its own
            rest = rest[rest.rfind(b"}") + 1 :]
        elif rest[:1] not in (b" ", b"\t"):
            rest = b""
        value = _number(rest.split(maxsplit=1)[0]) if rest.strip() else None
        if value is not None:
            yield value
        at = _next(page, name, at)


def _next(page: bytes, name: bytes, start: int) -> int:
    found = page.find(b"\n" + name, start)
    return found + 1 if found >= 0 else -1


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None

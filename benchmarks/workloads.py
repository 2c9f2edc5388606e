"""The workloads, and how they are made smaller."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from benchmarks.processes import BUILD, ROOT

Unit = Literal["streamed request", "plain request", "chunk", "idle client"]

TRACE_SPEED = 10
TRACE_SKIP_S = 60  # of the trace: its first requests are thin
BYTES_PER_TOKEN = 4
SPARE_FILES = 500  # descriptors that a target needs beside its connections


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of load. `unit` is what the CPU time of a target is divided by."""

    letter: str
    title_form: str  # `{clients}` is filled in
    unit: Unit
    mode: Literal["closed", "hold", "idle", "trace"] = "closed"
    clients: int = 1
    requests: int = 0  # at most, all clients together
    seconds: float = 20  # `closed`: no request begins later. `trace`: wall time of the part that is replayed
    chunks: int = 0
    pause_ms: float = 0
    prompt_bytes: int = 160
    spread_s: float = 0  # clients start over this time, so that their requests do not come as one burst
    hold_s: float = 0
    limit_s: float = 60  # what has no answer by then has failed

    @property
    def title(self) -> str:
        return self.title_form.format(clients=f"{self.clients:,}")

    @property
    def is_fresh(self) -> bool:
        """Memory per connection is measured: a new process for each round, since freed memory would be used again."""
        return self.mode in ("hold", "idle")

    def scaled(self, factor: float) -> Workload:
        """The same load for a shorter time; `hold` and `idle` also with fewer clients."""
        if factor >= 1:
            return self
        is_fresh = self.is_fresh
        return replace(
            self,
            clients=max(20, int(self.clients * factor)) if is_fresh else self.clients,
            requests=max(self.clients, int(self.requests * factor)),
            seconds=max(1.0, self.seconds * factor),
            hold_s=max(2.0, self.hold_s * factor) if is_fresh else 0,
        )

    def fitted(self, file_limit: int) -> Workload:
        """With no more clients than file descriptors allow; a proxy needs two for an open stream."""
        if not self.is_fresh:
            return self
        most = (file_limit - SPARE_FILES) // (2 if self.mode == "hold" else 1)
        return replace(self, clients=min(self.clients, most))

    def arguments(self, port: int, key: str) -> list[str]:
        """For the load generator."""
        given = {
            "port": port, "key": key, "mode": self.mode, "clients": self.clients, "requests": self.requests,
            "seconds": self.seconds, "chunks": self.chunks, "pause-ms": self.pause_ms,
            "prompt-bytes": self.prompt_bytes, "spread-s": self.spread_s, "hold-s": self.hold_s,
            "limit-s": self.limit_s,
        }  # fmt: skip
        arguments = [f"--{name}={value}" for name, value in given.items()]
        if self.mode == "trace":
            arguments.append(f"--trace={trace_file(self.seconds)}")
        return arguments


WORKLOADS = (
    Workload("a", "16 chunks, 1 ms apart, 1 client", "streamed request", requests=300, chunks=16, pause_ms=1),
    Workload("b", "plain, {clients} clients", "plain request", clients=16, requests=30_000, seconds=4),
    Workload(
        "c", "64 chunks, 5 ms apart, {clients} clients", "chunk",
        clients=32, requests=640, chunks=64, pause_ms=5, spread_s=0.32,
    ),
    Workload(
        "d", "64 chunks, 50 ms apart, {clients} clients", "chunk",
        clients=256, requests=512, chunks=64, pause_ms=50, spread_s=3.2,
    ),
    Workload(
        "e", "{clients} open streams, 1 chunk/s", "chunk", "hold",
        clients=2000, chunks=1_000_000, pause_ms=1000, spread_s=2, hold_s=8,
    ),
    Workload(
        "f", "1 MiB prompt, 16 chunks, 1 client", "streamed request",
        requests=100, chunks=16, pause_ms=1, prompt_bytes=1 << 20,
    ),
    Workload("g", "{clients} idle keep-alive clients", "idle client", "idle", clients=10_000, hold_s=3),
    Workload(
        "h", "Azure conversations at 10× speed", "chunk", "trace",
        clients=2000, seconds=8, pause_ms=5, limit_s=40,
    ),
)  # fmt: skip


def trace_source() -> Path:
    """The Azure conversation trace; it need not exist."""
    shared = Path(os.environ.get("FIRSTTOKEN_SHARED", "../shared"))
    return (shared if shared.is_absolute() else ROOT / shared) / "data" / "azure_llm_2023_conv.csv"


def _rows(source: Path) -> Iterator[tuple[float, int, int]]:
    """Seconds since the first row, prompt tokens, answered tokens."""
    first: datetime | None = None
    with source.open(newline="") as file:
        for row in csv.DictReader(file):
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or moment
            yield (moment - first).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"])


def trace_file(seconds: float) -> Path:
    """Writes the part of the trace that takes so long at its speed, as the load generator reads it."""
    lines = []
    for at, prompt, answered in _rows(trace_source()):
        due = (at - TRACE_SKIP_S) / TRACE_SPEED
        if due >= seconds:
            break
        if due >= 0:
            lines.append(f"{due * 1e6:.0f} {prompt * BYTES_PER_TOKEN} {max(1, answered)}")
    path = BUILD / f"trace-{seconds:g}s.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path

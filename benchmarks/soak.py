"""A long run that looks for growth: `python -m benchmarks.soak --minutes 10`.

Cycles of everything that clients do, good and bad, each followed by quiet; what the process holds is read when it is
quiet, so that it must come back to the same numbers. The first third is warm-up: rings, caches and arenas fill.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import targets
from benchmarks.measure import Bench, bench, measure
from benchmarks.processes import (
    BUILD,
    Failed,
    accepted_by_process,
    free_port,
    open_files,
    raise_file_limit,
    resident_kib,
    started,
    thread_count,
    wait_until,
)
from benchmarks.targets import Launch, Place, Running
from benchmarks.workloads import Workload

MEMORY_KIB_PER_MINUTE = 64.0  # 640 KiB in ten minutes: the noise of an allocator, less than 2 bytes for each request
OBJECTS_PER_MINUTE = 200.0
MOST_GROWTH = {"files": 4, "threads": 0, "tasks": 2, "clients": 0, "upstream_connections": 2, "inflight": 0}
QUIET_S = 4.5  # above the 3 s for which idle upstream connections are kept
MIN_SAMPLES = 10  # after warm-up; with fewer, the slope of memory is told but not judged

CYCLE = (
    Workload("plain", "", "plain request", clients=16, requests=100_000, seconds=3),
    Workload("streams", "", "chunk", clients=32, requests=100_000, seconds=3, chunks=64, pause_ms=5, spread_s=0.3),
    Workload(
        "leavers", "clients that leave in mid-stream", "chunk", "hold",
        clients=200, chunks=1_000_000, pause_ms=20, spread_s=0.5, hold_s=1,
    ),
    Workload("newcomers", "new connections", "idle client", "idle", clients=300, hold_s=0.1),
    Workload("large", "1 MiB prompts", "streamed request", requests=5, chunks=16, pause_ms=1, prompt_bytes=1 << 20),
)  # fmt: skip
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
BAD = (
    b"NONSENSE\r\n\r\n",
    b"GET /nowhere HTTP/1.1\r\nhost: bench\r\n\r\n",
    _HEAD + b"content-length: 9\r\n\r\n{not json",
    _HEAD + b"content-length: 1000\r\n\r\n{",  # leaves in the body
    b"POST /v1/chat/com",  # leaves in the head
    _HEAD + b'content-length: 70\r\n\r\n{"model":"m","messages":[{"role":"user","content":"leaves at once..."}]}',
)


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds when all is quiet."""

    seconds: float  # since the start of the soak
    memory_kib: int
    files: int
    threads: int
    tasks: int
    objects: int
    clients: int
    upstream_connections: int
    inflight: int


def ask_badly(port: int) -> None:
    """Requests that break rules, and clients that leave at every bad moment."""
    for sent in BAD * 5:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(sent)


def counts_of(port: int) -> dict[str, object]:
    """What watched.py tells."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        text = b"".join(iter(lambda: connection.recv(65536), b""))
    told: dict[str, object] = json.loads(text)
    return told


def inflight(port: int) -> int:
    """The gauge that must be 0 when nobody asks anything."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("gateway_inflight{")))


def look(around: Bench, running: Running, watch_port: int, seconds: float) -> Held:
    assert running.pid is not None
    waiting = inflight(running.port)  # first: the page is a client too
    counts = counts_of(watch_port)
    tasks, objects = counts["tasks"], counts["objects"]
    assert isinstance(tasks, int)
    assert isinstance(objects, int)
    return Held(
        seconds=round(seconds, 1), memory_kib=resident_kib(running.pid), files=open_files(running.pid),
        threads=thread_count(running.pid), tasks=tasks, objects=objects,
        clients=sum(accepted_by_process(running.pid, running.port)),
        upstream_connections=sum(accepted_by_process(around.upstream_pid, around.upstream_port)), inflight=waiting,
    )  # fmt: skip


def slope_per_minute(samples: list[Held], read: Callable[[Held], float]) -> float:
    """Theil–Sen: the median slope of all pairs, which a few odd samples do not move."""
    pairs = itertools.combinations(samples, 2)
    slopes = [(read(b) - read(a)) / (b.seconds - a.seconds) * 60 for a, b in pairs if b.seconds > a.seconds]
    return statistics.median(slopes) if slopes else 0.0


def verdicts(samples: list[Held]) -> list[tuple[str, float, float, bool]]:
    """What was looked at, its value, its limit, and whether it is judged."""
    steady = samples[len(samples) // 3 :]
    is_long = len(steady) >= MIN_SAMPLES
    memory = slope_per_minute(steady, lambda held: held.memory_kib)
    objects = slope_per_minute(steady, lambda held: held.objects)
    found = [
        ("memory, KiB per minute", memory, MEMORY_KIB_PER_MINUTE, is_long),
        ("objects per minute", objects, OBJECTS_PER_MINUTE, is_long),
    ]
    for name, limit in MOST_GROWTH.items():
        first, last = (asdict(held)[name] for held in (steady[0], steady[-1]))
        found.append((f"{name}, growth from {first} to {last}", last - first, limit, True))
    found.append(("in flight when quiet", max(held.inflight for held in samples), 0, True))
    return found


def cycle(around: Bench, running: Running) -> tuple[int, int]:
    """One cycle without its quiet. Returns how many requests were answered, and how many failed that should not."""
    answered = failed = 0
    for work in CYCLE:
        sample = measure(around, running, work)
        answered += int(sample.e2e_ms.get("count", 0))
        failed += sample.failed
    ask_badly(running.port)
    return answered, failed


def soak(around: Bench, running: Running, watch_port: int, minutes: float) -> tuple[list[Held], int, int]:
    began, samples, answered, failed = time.monotonic(), list[Held](), 0, 0
    while time.monotonic() - began < minutes * 60:
        good, bad = cycle(around, running)
        answered, failed = answered + good, failed + bad
        time.sleep(QUIET_S)
        samples.append(look(around, running, watch_port, time.monotonic() - began))
        print(f"{samples[-1]}, {answered} answered, {failed} failed", file=sys.stderr, flush=True)
    return samples, answered, failed


def launch(place: Place, watch_port: int) -> Launch:
    """Ours with defaults, in a process that can be looked into."""
    config = str(targets.CONFIGS / "defaults.yaml")
    command = (sys.executable, "-m", "benchmarks.watched", "serve", config, "--port", str(place.port))
    return Launch(command, "this tree", {"BENCH_UPSTREAM": place.upstream_url, "BENCH_WATCH_PORT": str(watch_port)})


def judge(samples: list[Held], answered: int, failed: int) -> int:
    """Prints the outcome; 1 when something grew."""
    is_good = failed == 0
    print(f"{samples[-1].seconds / 60:.1f} minutes, {answered} answered requests, {failed} failed")
    for what, value, limit, is_judged in verdicts(samples):
        holds = value <= limit
        is_good = is_good and (holds or not is_judged)
        word = ("ok" if holds else "GREW") if is_judged else "too short to judge"
        print(f"{what:42} {value:9.1f}  limit {limit:6.1f}  {word}")
    return 0 if is_good else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, default=BUILD / "soak.json")
    args = parser.parse_args()
    raise_file_limit()
    with bench() as around:
        if not around.programs.are_native:
            print("the soak needs the load generator in C, and there is no compiler")
            return 2
        place, watch_port = Place(free_port(), around.upstream_port, BUILD / "targets" / "soak"), free_port()
        start, log = launch(place, watch_port), BUILD / "logs" / "soak.log"
        with started(start.command, log, start.environment) as process:
            wait_until(lambda: targets.answers(place.port), process, 30, log)
            running = Running("ours", place.port, process.pid)
            try:
                samples, answered, failed = soak(around, running, watch_port, args.minutes)
            except (Failed, OSError, subprocess.SubprocessError) as problem:
                print(f"the soak ended early: {problem!r}; see {os.path.relpath(log)}")
                return 1
    args.out.write_text(json.dumps([asdict(held) for held in samples], indent=1))
    return judge(samples, answered, failed)


if __name__ == "__main__":
    sys.exit(main())

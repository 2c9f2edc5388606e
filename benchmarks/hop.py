"""What our hop costs, beside nginx and no hop at all, in one run: `python benchmarks/hop.py`.

CPU is user + system time of the target's whole process tree (`/proc/PID/task/*/schedstat`), so that it does not depend
on how busy the machine is otherwise; latencies do. Targets are interleaved, rounds repeated, medians taken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
NGINX = """
worker_processes 1; daemon off; pid {dir}/pid; error_log {dir}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {dir}/b; proxy_temp_path {dir}/p; fastcgi_temp_path {dir}/f;
  uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s; keepalive_requests 1000000; client_max_body_size 64m;
  upstream model {{ server 127.0.0.1:{upstream}; keepalive 512; keepalive_timeout 3s; keepalive_requests 1000000; }}
  server {{ listen 127.0.0.1:{port} backlog=2048;
    location / {{ proxy_pass http://model; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""


@dataclass(frozen=True)
class Workload:
    """One kind of load; `unit` is what the CPU time is divided by."""

    name: str
    unit: str
    clients: int
    requests: int
    chunks: int
    pause_ms: float


WORKLOADS = (
    Workload("a: stream of 16 chunks, 1 client", "streamed request", 1, 300, 16, 1.0),
    Workload("b: plain, 16 clients", "plain request", 16, 6000, 0, 0),
    Workload("c: 64 chunks at 5 ms, 32 clients", "chunk", 32, 256, 64, 5.0),
    Workload("d: 64 chunks at 50 ms, 256 clients", "chunk", 256, 512, 64, 50.0),
)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of a process tree so far."""
    total = 0
    for member in tree(pid):
        for stat in Path(f"/proc/{member}/task").glob("*/schedstat"):
            total += int(stat.read_text().split()[0])
    return total / 1e9


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on {port}")


@contextmanager
def started(command: list[str], port: int) -> Iterator[int]:
    """The pid of a program that listens on `port` while the block runs."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        yield process.pid
    finally:
        process.terminate()
        process.wait(10)


def load(port: int, work: Workload) -> dict[str, object]:
    command = [sys.executable, str(HERE / "load.py"), f"--port={port}", f"--requests={work.requests}"]
    command += [f"--clients={work.clients}", f"--chunks={work.chunks}", f"--pause-ms={work.pause_ms}"]
    result: dict[str, object] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return result


def measure(port: int, pid: int | None, work: Workload) -> dict[str, float]:
    """One round: µs of CPU per unit, and latencies in ms."""
    before = cpu_s(pid) if pid else 0.0
    seen = load(port, work)
    used = (cpu_s(pid) if pid else 0.0) - before
    units = work.requests * (work.chunks if work.unit == "chunk" else 1)
    ttft, gap, lag = seen["ttft_ms"] or seen["e2e_ms"], seen["gap_ms"], seen["lag_ms"]
    assert isinstance(ttft, dict) and isinstance(gap, dict) and isinstance(lag, dict)
    return {
        "cpu_us": used / units * 1e6, "ttft_p50": ttft["p50"], "ttft_p99": ttft["p99"], "gap_p50": gap.get("p50", 0.0),
        "gap_p99": gap.get("p99", 0.0), "failed": float(str(seen["failed"])), "lag_p99": lag.get("p99", 0.0),
    }  # fmt: skip


def run(rounds: int, only: str) -> dict[str, dict[str, dict[str, float]]]:
    with ExitStack() as stack:
        upstream = free_port()
        stack.enter_context(started([sys.executable, str(HERE / "upstream.py"), str(upstream)], upstream))
        targets: dict[str, tuple[int, int | None]] = {"direct": (upstream, None)}
        if shutil.which("nginx"):
            port, folder = free_port(), stack.enter_context(tempfile.TemporaryDirectory())
            config = Path(folder) / "nginx.conf"
            config.write_text(NGINX.format(dir=folder, upstream=upstream, port=port))
            targets["nginx"] = (port, stack.enter_context(started(["nginx", "-c", str(config), "-p", folder], port)))
        port = free_port()
        serve = [
            sys.executable,
            "-m",
            "gateway",
            "serve",
            "--upstream",
            f"http://127.0.0.1:{upstream}",
            f"--port={port}",
        ]
        targets["firsttoken"] = (port, stack.enter_context(started(serve, port)))
        time.sleep(1)
        table: dict[str, dict[str, dict[str, float]]] = {}
        for work in WORKLOADS:
            if only and work.name[0] not in only:
                continue
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
            names = list(targets)
            for number in range(rounds):
                for name in names if number % 2 == 0 else reversed(names):
                    samples[name].append(measure(*targets[name], work))
            table[work.name] = {
                name: {key: statistics.median(s[key] for s in seen) for key in seen[0]}
                for name, seen in samples.items()
            }
        return table


def as_markdown(table: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [
        "| workload | target | CPU µs per unit | TTFT p50 / p99 ms | gap p50 / p99 ms | failed |",
        "|---|---|---|---|---|---|",
    ]
    units = {work.name: work.unit for work in WORKLOADS}
    for name, targets in table.items():
        for target, row in targets.items():
            cpu = f"{row['cpu_us']:.1f} per {units[name]}" if target != "direct" else "–"
            lines.append(
                f"| {name} | {target} | {cpu} | {row['ttft_p50']:.2f} / {row['ttft_p99']:.2f} | "
                f"{row['gap_p50']:.2f} / {row['gap_p99']:.2f} | {row['failed']:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="letters of the workloads to run")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    args = parser.parse_args()
    table = run(args.rounds, args.only)
    print(
        f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} CPUs; {args.rounds} rounds, medians\n"
    )
    print(as_markdown(table))
    if args.json:
        args.json.write_text(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()

"""Programs that a benchmark starts, and what the kernel says of them: CPU time, memory, sockets. Linux only."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "bench"
STOP_WAIT_S = 5.0
_ESTABLISHED, _LISTENING = "01", "0A"  # states in /proc/net/tcp
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Failed(Exception):
    """A program did not do what it was started for."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def raise_file_limit() -> int:
    """Lets this process and its children open as many files as they may. Returns how many."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


# Starting and stopping


def _die_with_parent() -> None:
    """Runs in the child: the kernel ends it when the benchmark ends, however that happens."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)


def start(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Starts a program whose output goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, preexec_fn=_die_with_parent,  # noqa: PLW1509 — no thread of ours runs then
        )  # fmt: skip


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a program and all below it."""
    members = tree(process.pid) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(STOP_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in members[1:]:
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            pass


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs while the block runs."""
    process = start(command, log, environment)
    try:
        yield process
    finally:
        stop(process)


def wait_until(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], limit_s: float, log: Path) -> None:
    """Raises Failed, with the end of the log, when the program ends or is not ready in time."""
    end = time.monotonic() + limit_s
    while not is_ready():
        ended = process.poll()
        if ended is not None or time.monotonic() > end:
            what = f"ended with {ended}" if ended is not None else f"was not ready in {limit_s:.0f} s"
            raise Failed(f"{Path(str(process.args[0])).name} {what}: {tail_of(log)}")  # type: ignore[index]
        time.sleep(0.05)


def tail_of(log: Path, size: int = 400) -> str:
    """The end of a log as one line."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return " ".join(text[-size:].split()) or "it said nothing"


# What the kernel says


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                pass
    return found


def cpu_us(pid: int) -> float:
    """User and system time of a process tree so far, in microseconds: time on a CPU as the scheduler counts it."""
    total = 0
    for member in tree(pid):
        for stat in Path(f"/proc/{member}/task").glob("*/schedstat"):
            try:
                total += int(stat.read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):
                pass
    return total / 1000


def _status_kib(pid: int, field: str) -> int:
    total = 0
    for member in tree(pid):
        try:
            text = Path(f"/proc/{member}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(field + ":"))
    return total


def resident_kib(pid: int) -> int:
    """Resident memory of a process tree now. Pages that processes share count once for each."""
    return _status_kib(pid, "VmRSS")


def peak_kib(pid: int) -> int:
    """The largest resident memory of each process of a tree so far, added up."""
    return _status_kib(pid, "VmHWM")


def thread_count(pid: int) -> int:
    return sum(1 for member in tree(pid) for _ in Path(f"/proc/{member}/task").glob("*"))


def open_files(pid: int) -> int:
    """File descriptors of a process tree."""
    return sum(1 for member in tree(pid) for _ in Path(f"/proc/{member}/fd").glob("*"))


def _inodes(port: int, state: str) -> set[str]:
    """Sockets in a state whose local port is this one."""
    found = set()
    with Path("/proc/net/tcp").open() as table:
        for line in table:
            fields = line.split()
            if fields[3] == state and fields[1].endswith(f":{port:04X}"):
                found.add(fields[9])
    return found


def listener_count(port: int) -> int:
    """Sockets that listen on a port: each worker's own where they share it."""
    return len(_inodes(port, _LISTENING))


def accepted_by_process(pid: int, port: int) -> list[int]:
    """How many open connections, accepted on `port`, each process of a tree holds; those with none are left out."""
    accepted = _inodes(port, _ESTABLISHED)
    counts = []
    for member in tree(pid):
        count = 0
        for descriptor in Path(f"/proc/{member}/fd").glob("*"):
            try:
                link = descriptor.readlink().name
            except OSError:
                continue
            count += link.startswith("socket:[") and link[8:-1] in accepted
        counts.append(count)
    return [count for count in counts if count]

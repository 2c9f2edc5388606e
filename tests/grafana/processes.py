"""Programs of their own that a test starts and ends: the gateway as a user runs it, Prometheus."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

ROOT = Path(__file__).parent.parent.parent
START_S = 20.0  # for a program to answer; a busy machine takes its time


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return cast(int, probe.getsockname()[1])


@contextmanager
def process(
    *command: str, environment: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs while the block does. What it writes goes to `log`, else it is shown where a test fails."""
    with ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log is not None else None
        started = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(environment or {})}, stderr=output)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@contextmanager
def gateway_process(
    *arguments: str, port: int, environment: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[str]:
    """`firsttoken serve` in a process of its own, ready when the block begins; gives its address."""
    command = (sys.executable, "-m", "gateway", "serve", *arguments, "--port", str(port), "--log", "json")
    with process(*command, environment=environment, log=log) as started:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", started)
        yield url


def wait_for(url: str, started: subprocess.Popen[bytes]) -> None:
    """Until the address answers with a good status."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert started.poll() is None, f"{started.args!r} ended with {started.returncode}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"{url} did not answer within {START_S} s")

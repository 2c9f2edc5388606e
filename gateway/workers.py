"""Several worker processes on one port.

Each worker binds the port itself (SO_REUSEPORT), so that the kernel spreads connections; metrics are shared through
prometheus_client's files and every worker's page shows all. The parent only starts, watches, signals and replaces.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import FrameType

from prometheus_client.multiprocess import mark_process_dead

log = logging.getLogger("gateway.workers")

WATCH_EVERY_S = 0.2
RESTART_LIMIT, RESTART_WINDOW_S = 5, 30.0  # a worker that dies more often than this will not get better

Start = Callable[[int, int], BaseProcess]


class Supervisor:
    """Keeps `count` workers alive until told to stop."""

    def __init__(self, count: int, start: Start, drain_s: float) -> None:
        self._count = count
        self._start = start
        self._drain_s = drain_s
        self._workers: dict[int, BaseProcess] = {}
        self._stopping = 0
        self._deaths: list[float] = []

    def run(self) -> int:
        """Until a signal; 0 when every worker ended well, 1 when they kept dying."""
        for name in ("SIGTERM", "SIGINT"):
            signal.signal(getattr(signal, name), self._stop)
        signal.signal(signal.SIGHUP, self._pass_on)
        for index in range(self._count):
            self._workers[index] = self._start(index, os.getpid())
        while not self._stopping:
            time.sleep(WATCH_EVERY_S)
            if not self._replace_dead():
                self._signal(signal.SIGTERM)
                self._join(5.0)
                return 1
        self._join(self._drain_s + 5)
        return 0

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping += 1
        self._signal(signal.SIGTERM)

    def _pass_on(self, _signal: int, _frame: FrameType | None) -> None:
        self._signal(signal.SIGHUP)

    def _signal(self, sig: signal.Signals) -> None:
        for worker in self._workers.values():
            if worker.is_alive() and worker.pid is not None:
                os.kill(worker.pid, sig)

    def _replace_dead(self) -> bool:
        now = time.monotonic()
        for index, worker in list(self._workers.items()):
            if worker.is_alive() or self._stopping:
                continue
            log.error("worker %d (process %s) ended with %s; starting another", index, worker.pid, worker.exitcode)
            if worker.pid is not None:
                mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
            self._deaths = [t for t in self._deaths if now - t < RESTART_WINDOW_S] + [now]
            if len(self._deaths) > RESTART_LIMIT:
                log.error("workers keep dying; giving up")
                return False
            self._workers[index] = self._start(index, os.getpid())
        return True

    def _join(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        for worker in self._workers.values():
            worker.join(max(0.0, end - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()


class MetricsFolder:
    """The folder through which workers share their metrics; named in the environment before they start."""

    def __enter__(self) -> str:
        self._path = tempfile.mkdtemp(prefix="firsttoken-metrics-")
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = self._path
        return self._path

    def __exit__(self, *exc: object) -> None:
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
        shutil.rmtree(self._path, ignore_errors=True)


def spawn(target: Callable[..., None], *args: object) -> BaseProcess:
    """A worker in a fresh interpreter, so that it chooses its own metric files."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=False)
    process.start()
    return process

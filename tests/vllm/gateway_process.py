"""The gateway as its users start it: `python -m gateway serve CONFIG`, a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tests.vllm.real_vllm import REPOSITORY, free_port, is_answering

START_S = 60.0
STOP_S = 20.0


class GatewayProcess:
    """A gateway that serves; its log and its pages."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        assert process.stderr is not None
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx2.Client(base_url=self.url, trust_env=False, timeout=120)
        self.lines: list[str] = []  # of its log that are no request's
        self.records: dict[str, dict[str, Any]] = {}  # of finished requests by request id
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        for raw in stream:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            record = json.loads(line) if line.startswith("{") else {}
            with self._changed:
                if "request_id" in record:
                    self.records[record["request_id"]] = record
                else:
                    self.lines.append(line)
                self._changed.notify_all()

    def record(self, request_id: str, timeout: float = 15.0) -> dict[str, Any]:
        """The log line of a request, once it is written."""
        with self._changed:
            found = self._changed.wait_for(lambda: request_id in self.records, timeout)
            assert found, f"no log line of request {request_id}; other lines: {self.lines[-5:]}"
            return self.records[request_id]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        page = self.http.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait_ready(self) -> None:
        """Until an upstream is usable and its engine is known."""
        end = time.monotonic() + START_S
        while True:
            if is_answering(f"{self.url}/readyz"):
                upstreams = self.http.get("/gateway/status").json()["upstreams"].values()
                if all(state["models"] for state in upstreams):
                    return
            assert self.process.poll() is None, f"the gateway ended: {self.lines}"
            assert time.monotonic() < end, f"the gateway was not ready in time: {self.lines}"
            time.sleep(0.05)

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._thread.join(STOP_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def serving(config: str, folder: Path) -> Iterator[GatewayProcess]:
    """Serves these settings (YAML) while the block runs, and waits until it is ready."""
    path = folder / "gateway.yaml"
    path.write_text(config, encoding="utf-8")
    port = free_port()
    command = [sys.executable, "-m", "gateway", "serve", str(path), "--port", str(port), "--log", "json"]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    gateway = GatewayProcess(process, port)
    try:
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.close()

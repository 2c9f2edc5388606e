"""A real vLLM as a process of the tests' own, or one that `VLLM_URL` names.

The tests' own is started by `real-vllm/serve.sh` of `$FIRSTTOKEN_SHARED` (default `../shared`), in the virtual
environment `$VLLM_VENV` (default `.venv-vllm`). It takes about half a minute to be ready, so that one server serves
many tests, and never two at a time: they would share the machine's few cores.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
from prometheus_client.parser import text_string_to_metric_families

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 400.0  # importing torch alone takes most of it on a busy machine
STOP_S = 20.0


class Unavailable(Exception):
    """There is no real vLLM here; the message says what would be needed."""


def shared_folder() -> Path:
    """Where the facts and data that are not part of this repository are."""
    return (REPOSITORY / os.environ.get("FIRSTTOKEN_SHARED", "../shared")).resolve()


class RealVllm:
    """One server: where it is, what it serves, what its own `/metrics` says."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.http = httpx2.Client(base_url=self.url, trust_env=False, timeout=120)
        self.model: str = self.http.get("/v1/models").json()["data"][0]["id"]

    def __repr__(self) -> str:
        return f"<RealVllm {self.model} at {self.url}>"

    @property
    def load(self) -> tuple[int, int]:
        """How many requests the server says it runs, and how many it keeps waiting."""
        running, waiting = self._sums("vllm:num_requests_running", "vllm:num_requests_waiting")
        return running, waiting

    @property
    def finished(self) -> int:
        """How many requests the server says have ended there, aborted ones too."""
        return self._sums("vllm:request_success_total")[0]

    def _sums(self, *names: str) -> list[int]:
        sums = dict.fromkeys(names, 0)
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name in sums:
                    sums[sample.name] += int(sample.value)
        return list(sums.values())

    def close(self) -> None:
        self.http.close()


class Servers:
    """Gives servers with the flags that a test needs; holds one process at most, always on the same port."""

    def __init__(self) -> None:
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._flags: tuple[str, ...] = ()
        self._server: RealVllm | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._log.close()

    def ordinary(self) -> RealVllm:
        """`VLLM_URL` if it is set, else a server with the default flags. Raises `Unavailable`."""
        given = os.environ.get("VLLM_URL", "").strip()
        if not given:
            return self.with_flags()
        if self._server is None:
            self._server = RealVllm(given)
        return self._server

    def with_flags(self, *flags: str) -> RealVllm:
        """A server of our own with these flags more; the one that ran with others is stopped. Raises `Unavailable`."""
        if os.environ.get("VLLM_URL", "").strip():
            raise Unavailable("VLLM_URL names a server with flags of its own")
        if self._server is None or flags != self._flags:
            self._stop()
            self._flags = flags
            self._server = self._start(flags)
            _warm_up(self._server)
        return self._server

    def _start(self, flags: tuple[str, ...]) -> RealVllm:
        script = shared_folder() / "real-vllm" / "serve.sh"
        venv = REPOSITORY / os.environ.get("VLLM_VENV", ".venv-vllm")
        if not script.exists():
            raise Unavailable(f"give VLLM_URL=http://host:port, or {script.parent}")
        if not (venv / "bin" / "python").exists():
            raise Unavailable(f"no vLLM is installed in {venv.name}; `make test-vllm` installs it")
        # The model computes on the cores that the gateway and the clients run on. It gets what they leave, in the same
        # session, for which Linux shares out the CPU; and one thread, since threads that wait for each other stand still
        # on a busy machine. Else the gateway sees bytes when the scheduler lets it, and the tests measure that.
        command = ["nice", "-n", "10", "bash", str(script), str(self._port), str(venv), *flags]
        self._process = subprocess.Popen(
            command, env={"OMP_NUM_THREADS": "1", **os.environ}, process_group=0,
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        url = f"http://127.0.0.1:{self._port}"
        end = time.monotonic() + START_S
        while not is_answering(f"{url}/health"):
            ended = self._process.poll()
            assert ended is None, f"vLLM ended with {ended}: {self._last_lines()}"
            assert time.monotonic() < end, f"vLLM was not ready in time: {self._last_lines()}"
            time.sleep(0.25)
        return RealVllm(url)

    def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine and workers, should they be left: the group is ours
        process.wait()

    def _last_lines(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 3000))
        return self._log.read().decode("utf-8", "replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_answering(url: str) -> bool:
    """Whether a GET gives 200 now."""
    try:
        return httpx2.get(url, timeout=5, trust_env=False).status_code == 200
    except (httpx2.HTTPError, OSError):
        return False


def _warm_up(server: RealVllm) -> None:
    """The first requests of a shape compile kernels, the first at once start threads: none of that in what is measured."""

    def ask(prompt: str, *, thinking: bool) -> None:
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 32,
            "chat_template_kwargs": {"thinking": thinking},
        }
        server.http.post("/v1/chat/completions", json=body)

    for prompt in ("hi", "hello " * 200):
        for thinking in (True, False):
            ask(prompt, thinking=thinking)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(16):
            pool.submit(ask, "hi", thinking=True)

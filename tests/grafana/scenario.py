"""Two gateways, two simulated model servers, every kind of traffic, and a real Prometheus that watched."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from gateway.sim.profiles import Profile
from gateway.sim.transport import Server, serve
from tests.grafana.processes import START_S, free_port, gateway_process, process, wait_for
from tests.support.raw import RawClient, chat

LOAD_S = 8.0

# How a page may be asked for: as text, as OpenMetrics, and as Prometheus 3 asks.
ACCEPTS = {
    "text": "text/plain; version=0.0.4",
    "openmetrics": "application/openmetrics-text; version=1.0.0",
    "prometheus": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
}

QUICK = Profile(
    name="quick", models=("*",), overhead_s=0.02, prefill_tokens_per_s=20_000, decode_tokens_per_s=300, slots=2,
    thinking=True, thinking_tokens=(8, 16), answer_tokens=(8, 16),
)  # fmt: skip
# Thinks whatever it is asked, and reports no times of its own.
STUBBORN = Profile(
    name="stubborn", models=("*",), overhead_s=0.08, decode_tokens_per_s=300, thinking=True, thinking_tokens=(12, 24),
    answer_tokens=(8, 16), switch_keys=(), per_request_metrics=False,
)  # fmt: skip

SETTINGS = """
listen: {{host: 127.0.0.1, port: {port}}}
upstreams:
  quick: {{url: "{quick}"}}
  stubborn: {{url: "{stubborn}"}}
  gone: {{url: "http://127.0.0.1:{closed}", breaker: {{minimum_calls: 4}}}}
routes:
  - {{name: fast, match: {{prefix: /fast}}, upstreams: [quick], thinking: off, max_tokens: {{ceiling: 500}}}}
  - {{name: deep, match: {{prefix: /deep}}, upstreams: [stubborn], thinking: off, budget: {{ttft_ms: 40, on_exceed: wait}}}}
  - {{name: late, match: {{prefix: /late}}, upstreams: [stubborn], budget: {{ttft_ms: 20, on_exceed: pending}}}}
  - {{name: broken, match: {{prefix: /broken}}, upstreams: [gone]}}
  - {{name: idle, match: {{prefix: /idle}}, upstreams: [stubborn]}}
  - {{name: default, upstreams: [quick]}}
"""

PROMETHEUS = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: firsttoken
    static_configs: [{{targets: {targets}}}]
"""

ODD_NAMES = ('a"b\\c\n', "\ud83d", "x" * 10_000, "\x01\x7f", "中文模型")  # C109


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to a scrape."""

    text: str
    content_type: str


@dataclass(frozen=True, slots=True)
class Observed:
    """What is left when the load is over: a Prometheus to ask, and the page as it was."""

    prometheus: str
    began: float = 0  # Unix time of the load
    ended: float = 0
    pages: Mapping[str, Page] = field(default_factory=dict)  # by the names in ACCEPTS
    records: Sequence[Mapping[str, object]] = ()  # lines of the log about requests

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of Prometheus; AssertionError with its words when it refuses."""
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def over_time(self, expression: str) -> list[tuple[dict[str, str], list[float]]]:
        """Labels and values of each series during the load, as a panel would get them."""
        data = self.get("query_range", query=expression, start=f"{self.began:.3f}", end=f"{self.ended:.3f}", step="1")
        return [(series["metric"], [float(value) for _, value in series["values"]]) for series in data["result"]]

    def at(self, moment: float, expression: str) -> list[float]:
        """The values at a Unix time."""
        data = self.get("query", query=expression, time=f"{moment:.3f}")
        return [float(series["value"][1]) for series in data["result"]]


def scrape(url: str, accept: str) -> Page:
    """The metrics page as somebody gets it who asks for `accept`."""
    request = urllib.request.Request(f"{url}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=20) as response:
        return Page(response.read().decode(), response.headers["content-type"])


# -- the load ----------------------------------------------------------------------------------------------------------


async def stream(port: int, path: str, **more: Any) -> None:
    async with RawClient(port) as client:
        await client.ask(chat(**more), f"{path}/v1/chat/completions")


async def take_a_202(port: int) -> None:
    """A caller that does not wait; its request runs for about as long as there is between two scrapes."""
    async with RawClient(port) as client:
        headers = {"prefer": "respond-async", "x-sim-fault": "stall_first=0.7"}
        accepted = await client.ask(chat(), "/late/v1/chat/completions", headers)
        await client.get(accepted.json["poll_url"])


async def leave(port: int) -> None:
    """A caller that goes away when the first chunks have come."""
    async with RawClient(port) as client:
        await client.post(chat(max_tokens=400))
        await client.head()
        await client.piece()
        client.reset()


async def fault(port: int, name: str) -> None:
    async with RawClient(port) as client:
        await client.ask(chat(), headers={"x-sim-fault": name})


async def one_round(port: int) -> None:
    """Every kind of request once, as a few clients would send them at the same time."""
    await asyncio.gather(
        *(stream(port, "/fast", content=f"你好 {number} ———— 再见") for number in range(3)),
        stream(port, "", content="why is it slow? " * 50),
        stream(port, "/deep"),
        stream(port, "", stream=False),
        stream(port, "", max_tokens=4, stream_options={"include_usage": True}),  # burnt by thinking
        stream(port, "/deep", stream=False, max_tokens=4),
        stream(port, "/broken"),
        take_a_202(port),
        leave(port),
        fault(port, "status=500"),
        fault(port, "cut=2"),
        fault(port, "error_first"),
    )


async def odd_names(port: int) -> None:
    """Model names that have broken scrapes elsewhere; on a route that asks nobody."""
    for name in ODD_NAMES:
        async with RawClient(port) as client:
            body = json.dumps({"model": name, "stream": True, "messages": [{"role": "user", "content": "hi"}]})
            await client.ask(body.encode(), "/broken/v1/chat/completions")


async def load(port: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await one_round(port)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def model_servers() -> AsyncIterator[tuple[Server, Server]]:
    quick, stubborn = await serve(QUICK), await serve(STUBBORN)
    try:
        yield quick, stubborn
    finally:
        await quick.close()
        await stubborn.close()


# -- all together ------------------------------------------------------------------------------------------------------


@contextmanager
def observed(folder: Path) -> Iterator[Observed]:
    """Runs the load to its end; Prometheus goes on while the block runs."""
    ports = (free_port(), free_port())
    program, at = shutil.which("prometheus"), free_port()
    assert program is not None
    config = folder / "prometheus.yml"
    config.write_text(PROMETHEUS.format(targets=json.dumps([f"127.0.0.1:{port}" for port in ports])))
    command = (
        program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{at}", "--log.level=error",
    )  # fmt: skip
    with process(*command) as started:
        prometheus = Observed(f"http://127.0.0.1:{at}")
        wait_for(f"{prometheus.prometheus}/-/ready", started)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # leaves pytest's own loop alone
            found = runner.run(_watch(folder, ports, prometheus))
        yield found


async def _watch(folder: Path, ports: tuple[int, int], prometheus: Observed) -> Observed:
    """Two replicas under load, from before the first request to after the last."""
    async with model_servers() as (quick, stubborn):
        files = [folder / f"gateway-{port}.yaml" for port in ports]
        for file, port in zip(files, ports, strict=True):
            file.write_text(SETTINGS.format(port=port, quick=quick.url, stubborn=stubborn.url, closed=free_port()))
        with ExitStack() as stack:
            for file, port in zip(files, ports, strict=True):
                running = gateway_process(str(file), port=port, log=file.with_suffix(".log"))
                await asyncio.to_thread(stack.enter_context, running)
            await _scraped(prometheus, twice_by=len(ports))
            began = time.time()
            files[0].write_text(files[0].read_text() + "\n# reload me\n")
            async with asyncio.timeout(30):
                await odd_names(ports[0])
                await asyncio.gather(load(ports[0], LOAD_S), load(ports[1], LOAD_S / 2))
            ended = time.time()
            main = f"http://127.0.0.1:{ports[0]}"
            pages = {name: await asyncio.to_thread(scrape, main, accept) for name, accept in ACCEPTS.items()}
        records = requests_in(files[0].with_suffix(".log"))
        return Observed(prometheus.prometheus, began, ended, pages, records)


def requests_in(log: Path) -> list[dict[str, object]]:
    """The log's lines about requests. Each line is JSON, but for the greeting before the log begins."""
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if not line.startswith("Firsttoken on ")]
    return [line for line in map(json.loads, lines) if "request_id" in line]


async def _scraped(prometheus: Observed, *, twice_by: int) -> None:
    """Until each gateway was scraped twice: rates of counters that begin at 0 need a look at them before the load."""
    query = f"count(count_over_time(gateway_build_info[1m]) >= 2) == {twice_by}"
    async with asyncio.timeout(START_S):
        while not (await asyncio.to_thread(prometheus.get, "query", query=query))["result"]:
            await asyncio.sleep(0.1)

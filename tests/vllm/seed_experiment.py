"""The experiment this project began with, as the README's table: one short question to a thinking model, three ways.

    make test-vllm                                   # once: installs vLLM and the clients
    .venv/bin/python -m tests.vllm.seed_experiment   # about a minute; the table goes to stdout

Environment: FIRSTTOKEN_SHARED and VLLM_VENV, or VLLM_URL, as for the tests. The three requests take turns, one at a
time, so that noise of the machine meets all of them; the times are those of the gateway's own records.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.vllm.gateway_process import GatewayProcess, serving
from tests.vllm.real_vllm import RealVllm, Servers, Unavailable

QUESTION = "请用三十个字左右回答：什么是网关？"
CONFIG = """\
upstreams:
  vllm: {url: "%s"}
routes:
  - {name: quick, match: {prefix: /quick}, upstreams: [vllm], thinking: off}
  - {name: client, upstreams: [vllm]}
"""
HEADINGS = (
    "request", "TTFT", "TTFV", "reasoning", "answer decode", "E2E", "reasoning tokens", "completion tokens", "outcome",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to ask the question."""

    name: str
    prefix: str
    more: dict[str, object]


WAYS = (
    Way("thinking as the model likes (default)", "", {}),
    Way("route with `thinking: off`", "/quick", {}),
    Way("default, `max_tokens: 64`", "", {"max_tokens": 64}),
)


def ask(gateway: GatewayProcess, model: str, way: Way) -> dict[str, Any]:
    """One stream to its end; the gateway's record of it."""
    body = {
        "model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True,
        **way.more,
    }  # fmt: skip
    response = gateway.http.post(f"{way.prefix}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return gateway.record(response.headers["x-request-id"])


def row(way: Way, records: Sequence[dict[str, Any]]) -> str:
    """One line of the table: medians."""
    outcomes = {f"{record['outcome']}, verdict `{record['verdict']}`" for record in records}
    cells = [
        way.name,
        *(_seconds(records, name) for name in ("ttft_ms", "ttfv_ms", "reasoning_ms", "decode_ms", "e2e_ms")),
        *(f"{median(record[name] for record in records):g}" for name in ("reasoning_tokens", "completion_tokens")),
        "; ".join(sorted(outcomes)),
    ]
    return f"| {' | '.join(cells)} |"


def _seconds(records: Sequence[dict[str, Any]], name: str) -> str:
    """Unknown in every record: it never came."""
    values = [record[name] for record in records if name in record]
    return f"{median(values) / 1000:.3f} s" if values else "never"


def caption(server: RealVllm, runs: int) -> str:
    version = server.http.get("/version").json()["version"]
    return (
        f"vLLM {version}, model `{server.model}`, {os.cpu_count()} CPU cores, one request at a time, medians of {runs}. "
        f"Question: {QUESTION}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints the README's seed experiment as Markdown, from a real run.")
    parser.add_argument("--runs", type=int, default=20, help="how often each way is asked (default: 20)")
    args = parser.parse_args()
    records: dict[str, list[dict[str, Any]]] = {way.name: [] for way in WAYS}
    with Servers() as servers, tempfile.TemporaryDirectory() as folder:
        try:
            server = servers.ordinary()
        except Unavailable as reason:
            print(f"needs a real vLLM: {reason}", file=sys.stderr)
            return 1
        with serving(CONFIG % server.url, Path(folder)) as gateway:
            for way in WAYS:
                ask(gateway, server.model, way)  # the first of each is not counted
            for _ in range(args.runs):
                for way in WAYS:
                    records[way.name].append(ask(gateway, server.model, way))
        print(f"| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}")
        for way in WAYS:
            print(row(way, records[way.name]))
        print(f"\n{caption(server, args.runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

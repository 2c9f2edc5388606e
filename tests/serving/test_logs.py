"""The log of a real process: one line per request, and never a prompt, an answer, a key or a body."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.playing import error_body
from tests.support.process import Served, served
from tests.support.raw import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    RawUpstream,
    Received,
    Wire,
    answer,
    chat,
    chunk,
    framed,
    whole,
)  # fmt: skip

CANARY = "kanarienvogel-7c1f"
KEY = f"sk-gateway-{CANARY}"
UP_KEY = f"sk-upstream-{CANARY}"
USER = {"authorization": f"Bearer {KEY}"}
CONFIG = """
listen: {port: 1}
keys:
  - {name: user, key: "${GATEWAY_KEY}", admin: true}
upstreams:
  up: {url: "%s", api_key: "${UPSTREAM_KEY}", keep_alive_s: 0}
routes:
  - name: main
    upstreams: [up]
    thinking: off
    timeouts: {idle_ms: 300, first_token_ms: 300}
    defaults: {user: "%s"}
"""


async def play(request: Received, wire: Wire) -> None:
    """Says the canary wherever a server can."""
    kind = request.json["messages"][0]["content"]
    if "error" in kind:
        await wire.send(whole(error_body(f"you said {CANARY}"), "500 Oops"))
    elif "refused" in kind:
        await wire.send(whole(error_body(f"{CANARY}: {UP_KEY} is wrong"), "401 No"))
    elif "garbage" in kind:
        await wire.send(CANARY.encode() + b"\r\n\r\n")
    elif "cut" in kind or "stall" in kind:
        await wire.send(STREAM_HEAD, framed(chunk({"content": CANARY})))
        if "stall" in kind:
            await wire.wait_closed_by_peer()
        wire.close()
    elif "stream" in kind:
        events = [chunk({"reasoning_content": CANARY}), chunk({"content": CANARY}), chunk(finish="stop"), DONE]
        await wire.send(STREAM_HEAD, *map(framed, events), LAST_CHUNK)
    else:
        await wire.send(whole(answer(CANARY)))


async def talk(running: Served) -> int:
    """Sends the canary in every place a caller can; how many requests that were."""
    kinds = ["plain", "stream", "error", "refused", "garbage", "cut", "stall"]
    for kind in kinds:
        body = chat(
            stream=kind not in ("plain", "error", "refused"), content=f"{kind} {CANARY}", user=CANARY, stop=[CANARY]
        )
        await running.ask(body, headers={**USER, "x-note": CANARY, "cookie": CANARY})
    odd = [
        (f'{{"a": "{CANARY}", broken'.encode(), USER),
        (b'{"model": "\xff' + CANARY.encode() + b'"}', USER),
        (f'{{"messages": [], "messages": ["{CANARY}"]}}'.encode(), USER),
        (chat(content=CANARY), {"authorization": f"Bearer wrong-{CANARY}"}),
        (
            json.dumps(
                {"model": "m", "messages": [{"role": "user", "content": f"bell \x07 \ud83d {CANARY}"}]}
            ).encode(),
            USER,
        ),
    ]
    for body, headers in odd:
        await running.ask(body, headers=headers)
    await running.get(f"/v1/chat/completions?q={CANARY}", USER)
    async with running.client() as client:
        await client.send(f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-bad\x01: {CANARY}\r\n\r\n".encode())
        await client.response()
    return len(kinds) + len(odd) + 2


async def test_nothing_that_was_said_is_in_the_log_the_metrics_or_an_error(tmp_path: Path) -> None:
    """C031, C142, spec §9."""
    async with RawUpstream(play) as upstream:
        path = tmp_path / "gateway.yaml"
        path.write_text(CONFIG % (upstream.url, "somebody"), encoding="utf-8")
        env = {"GATEWAY_KEY": KEY, "UPSTREAM_KEY": UP_KEY}
        async with served(tmp_path, str(path), env=env) as running:
            count = await talk(running)
            pages = [await running.get(path, USER) for path in ("/metrics", "/gateway/status")]
            for page in pages:
                assert page.status == 200
                assert CANARY.encode() not in page.body
            await asyncio.sleep(0.3)
        log = running.log.read_text(encoding="utf-8")
        assert CANARY not in log
        lines = [line for line in running.lines() if "outcome" in line]
        assert len(lines) == count
        greeting, *rest = log.splitlines()
        assert greeting.startswith("Firsttoken on http://")
        for line in rest:
            assert isinstance(json.loads(line), dict), line


async def test_a_line_tells_all_there_is_to_know_of_a_request(tmp_path: Path) -> None:
    """spec §9."""
    async with RawUpstream(play) as upstream, served(tmp_path, "--upstream", upstream.url) as running:
        await running.ask(chat(content="stream"), headers={"x-request-id": "mine-1"})
        await running.ask(chat(stream=False, content="plain"), headers={"x-request-id": "mine-2"})
        line, plain = await running.logged("mine-1"), await running.logged("mine-2")
        assert line["time"].endswith("Z")
        wanted = {
            "route": "default",
            "upstream": "upstream",
            "model": "m",
            "status": 200,
            "outcome": "complete",
            "stream": True,
        }
        assert {key: line[key] for key in wanted} == wanted
        names = ("upload", "gateway", "connect", "wait", "reasoning", "decode", "tail")
        assert sum(line[f"{name}_ms"] for name in names) == pytest.approx(line["e2e_ms"], abs=0.1)
        assert line["ttft_ms"] <= line["ttfv_ms"]
        assert (plain["prompt_tokens"], plain["completion_tokens"], plain["stream"]) == (3, 2, False)
        assert "ttft_ms" not in plain


async def test_a_failure_is_told_by_a_stable_word(tmp_path: Path) -> None:
    """C031: "Upstream request failed:" and nothing after it."""
    async with served(tmp_path, "--upstream", "http://127.0.0.1:9") as running:
        await running.ask(chat(), headers={"x-request-id": "down-1"})
        line = await running.logged("down-1")
        assert (line["outcome"], line["reason"], line["upstream"]) == ("upstream_error", "connect_refused", "upstream")
        assert (await running.logged("is down"))["level"] == "warning"

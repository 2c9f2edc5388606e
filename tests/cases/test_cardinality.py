"""Odd requests make no series, and break no page."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.support.pages import open_page, samples, text_page
from tests.support.playing import plain, serving
from tests.support.raw import Received, Wire, answer, chat, whole
from tests.support.running import Running

ROUTE = {"match": {"models": ["m", "m-*"]}}


async def series(running: Running) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    page = (await running.get("/metrics")).body
    return {(name, labels) for name, labels, _ in samples(text_page(page))}


async def many(running: Running, bodies: list[tuple[bytes, str, dict[str, str]]]) -> None:
    async def some(part: list[tuple[bytes, str, dict[str, str]]]) -> None:
        async with running.client() as client:
            for body, path, headers in part:
                await client.ask(body, path, headers)

    await asyncio.gather(*(some(bodies[start::8]) for start in range(8)))


async def test_random_models_paths_agents_and_statuses_make_no_series() -> None:
    """C107: typo'd and hallucinated names made the page grow to megabytes."""
    dice = random.Random(1)

    async def play(request: Received, wire: Wire) -> None:
        status = dice.choice([200, 404, 418, 429, *range(500, 560)])
        await wire.send(whole(answer() if status == 200 else b"{}", f"{status} X"))

    def word() -> str:
        return "".join(dice.choices("abcdefgh", k=9))

    async with serving(play, route=ROUTE) as (_, running):
        warm: list[tuple[bytes, str, dict[str, str]]] = [
            (chat(stream=False, model=model), "/v1/chat/completions", {}) for model in ("m", "unknown")
        ]
        await many(running, warm * 4)
        before = await series(running)
        requests = [
            (chat(stream=False, model=f"m-{word()}"), "/v1/chat/completions", {"user-agent": word()})
            for _ in range(200)
        ]
        requests += [(chat(stream=False, model=word(), user=word()), "/v1/chat/completions", {}) for _ in range(200)]
        requests += [(b"{}", f"/{word()}/{word()}", {}) for _ in range(200)]
        await many(running, requests)
        async with running.client() as client:
            for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "LINK"):
                await client.get("/v1/chat/completions", method=method)
        after = await series(running)
        new = {name for name, _ in after - before}
        assert len(after) - len(before) <= 40, new
        assert await running.metric("gateway_requests_total") == 8 + 600 + 6


async def test_keys_users_and_request_ids_are_no_labels() -> None:
    """C108."""
    keys = [{"name": f"key-{number}", "key": f"secret-{number}-abcdef"} for number in range(50)]
    async with serving(plain(), keys=[*keys, {"name": "ops", "key": "ops-secret-abcdef", "admin": True}]) as (
        _,
        running,
    ):
        requests = [
            (
                chat(stream=False, user=f"user-{number}"),
                "/v1/chat/completions",
                {"authorization": f"Bearer secret-{number}-abcdef", "x-request-id": f"id-{number}"},
            )
            for number in range(50)
        ]
        await many(running, requests)
        page = (await running.get("/metrics", {"authorization": "Bearer ops-secret-abcdef"})).body
        assert b'outcome="complete"} 50.0' in page
        for word in (b"key-", b"user-", b"id-", b"secret", b"127.0.0.1"):
            assert word not in page


NAMES = ['a"b\\c\nd', "\ud83d", "x" * 10_000, "a\x00\x1b[31m\x7f", "中文模型", "{}", 'le="0.5"}']


@pytest.mark.parametrize("name", NAMES, ids=["quotes", "surrogate", "long", "controls", "chinese", "braces", "label"])
async def test_one_odd_model_name_does_not_cost_the_scrape(name: str) -> None:
    """C109, for the text form and for OpenMetrics, for known and unknown models."""
    for route in ({}, {"match": {"models": ["other"]}}):
        async with serving(plain(), route=route) as (_, running):
            response = await running.ask(json.dumps({"model": name, "messages": []}).encode())
            assert response.status == (404 if route else 200)
            text = await running.get("/metrics")
            assert (text.status, text.header("content-type")) == (200, "text/plain; version=0.0.4; charset=utf-8")
            assert len(text_page(text.body)) >= 20
            accept = "application/openmetrics-text; version=1.0.0; charset=utf-8, text/plain;q=0.5"
            strict = await running.get("/metrics", {"accept": accept})
            assert (strict.header("content-type") or "").startswith("application/openmetrics-text")
            assert len(open_page(strict.body)) >= 20
            status = await running.get("/gateway/status")
            assert status.status == 200
            assert len(status.json["recent"][0]["model"]) <= 128


async def test_routes_and_upstreams_with_odd_names_are_labels_all_the_same() -> None:
    """C109: names of the configuration may hold what the page must escape."""
    route = {"name": 'a"b\\c 日本', "upstreams": ["up"]}
    async with serving(plain(), routes=[route]) as (_, running):
        await running.ask(chat(stream=False))
        assert await running.metric("gateway_requests_total", route='a"b\\c 日本', outcome="complete") == 1

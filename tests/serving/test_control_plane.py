"""Health, status, timelines, metrics page and documentation: who may see what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.metrics import METRIC_NAMES
from tests.support.pages import library_pages, open_page, samples, text_page
from tests.support.playing import plain, serving, streaming
from tests.support.raw import DONE, RawUpstream, Response, chat, chunk
from tests.support.running import Running, running_gateway, settings_for, until

ADMIN = {"authorization": "Bearer ops-secret-1234"}
USER = {"authorization": "Bearer user-secret-1234"}
OTHER = {"x-api-key": "other-secret-123"}
KEYS = [
    {"name": "ops", "key": "ops-secret-1234", "admin": True},
    {"name": "user", "key": "user-secret-1234"},
    {"name": "other", "key": "other-secret-123"},
]
HEALTH = ["/health", "/healthz", "/readyz"]
CLOSED = ["/metrics", "/gateway/status", "/gateway/docs", "/gateway/openapi.json"]


@pytest.mark.parametrize("path", HEALTH)
async def test_health_needs_no_key(path: str) -> None:
    async with serving(plain(), keys=KEYS) as (_, running):
        assert (await running.get(path)).status == 200


@pytest.mark.parametrize("path", CLOSED)
async def test_all_else_needs_a_key_of_an_admin(path: str) -> None:
    async with serving(plain(), keys=KEYS) as (_, running):
        nobody, user, admin = [await running.get(path, headers) for headers in ({}, USER, ADMIN)]
        assert [nobody.status, user.status, admin.status] == [401, 403, 200]
        assert nobody.header("www-authenticate") == "Bearer"
        assert nobody.error["code"] == "unauthorized"
        assert "admin: true" in user.error["message"]


async def test_reload_needs_a_key_of_an_admin() -> None:
    async with serving(plain(), keys=KEYS) as (_, running):
        answers = [await running.get("/gateway/reload", headers, "POST") for headers in ({}, USER, ADMIN)]
        assert [response.status for response in answers] == [401, 403, 422]
        assert "without a file" in answers[2].json["problems"][0]


@pytest.mark.parametrize("path", [*HEALTH, *CLOSED])
async def test_without_keys_all_is_open(path: str) -> None:
    async with serving(plain()) as (_, running):
        assert (await running.get(path)).status == 200


@pytest.mark.parametrize("path", ["/health/", "//health", "/gateway//status/", "/metrics/"])
async def test_odd_slashes_work_and_nothing_redirects(path: str) -> None:
    """spec §7."""
    async with serving(plain()) as (_, running):
        assert (await running.get(path)).status == 200


async def test_what_is_not_there_is_a_404_in_the_usual_shape() -> None:
    async with serving(plain()) as (_, running):
        for path in ("/gateway/nothing", "/gateway/requests/unknown", "/gateway/"):
            response = await running.get(path)
            assert (response.status, response.error["code"]) == (404, "not_found")
        refused = await running.get("/gateway/status", method="DELETE")
        assert (refused.status, refused.error["code"]) == (405, "method_not_allowed")


async def test_ready_tells_of_upstreams_and_of_the_drain() -> None:
    async with RawUpstream(plain()) as good, running_gateway(settings_for(good.url)) as running:
        await until(lambda: running.gateway.runtime.upstreams["up"].is_up is True)
        assert (await running.get("/readyz")).json == {"ready": True, "draining": False, "upstreams": {"up": True}}
        running.gateway.begin_drain()
        draining = await running.get("/readyz")
        assert (draining.status, draining.json["draining"]) == (503, True)
        assert (await running.get("/health")).status == 200


async def test_not_ready_while_every_upstream_is_down() -> None:
    async with running_gateway(settings_for("http://127.0.0.1:9")) as running:
        await until(lambda: running.gateway.runtime.upstreams["up"].is_up is False)
        assert (await running.get("/readyz")).status == 503
        assert (await running.get("/gateway/status")).json["upstreams"]["up"]["problem"]


async def timeline(running: Running, response: Response, headers: dict[str, str] | None = None) -> Response:
    return await running.get(f"/gateway/requests/{response.header('x-request-id')}", headers)


async def test_the_timeline_of_a_request_can_be_asked_for() -> None:
    async with serving(streaming(0.02, chunk({"content": "x"}), chunk(finish="stop"), DONE)) as (_, running):
        response = await running.ask(chat())
        record = (await timeline(running, response)).json
        assert record["outcome"] == "complete"
        assert record["ttft_ms"] >= 15
        names = ("upload", "gateway", "connect", "wait", "reasoning", "decode", "tail")
        assert sum(record[f"{name}_ms"] for name in names) == pytest.approx(record["e2e_ms"], abs=0.1)


async def test_ones_own_times_are_ones_own() -> None:
    """spec §7: of others not even that they exist."""
    async with serving(plain(), keys=KEYS) as (_, running):
        response = await running.ask(chat(stream=False), headers=USER)
        asked = [await timeline(running, response, headers) for headers in ({}, USER, OTHER, ADMIN)]
        assert [answer.status for answer in asked] == [401, 200, 404, 200]


async def test_a_request_id_with_a_slash_is_found() -> None:
    async with serving(plain()) as (_, running):
        response = await running.ask(chat(stream=False), headers={"x-request-id": "team/run/7"})
        assert (await timeline(running, response)).json["request_id"] == "team/run/7"


async def test_the_status_shows_routes_upstreams_and_recent_requests() -> None:
    route = {"match": {"headers": {"x-team-token": "secret-of-a-team*"}}, "thinking": "off"}
    async with serving(plain(), route=route) as (_, running):
        await running.ask(chat(stream=False), headers={"x-team-token": "secret-of-a-team-1"})
        await until(lambda: running.gateway.runtime.upstreams["up"].models != ())
        response = await running.get("/gateway/status")
        status = response.json
        assert status["upstreams"]["up"]["models"] == ["m"]
        assert status["upstreams"]["up"]["up"] is True
        assert status["routes"][0]["thinking"] == "off"
        assert status["routes"][0]["match"]["headers"] == ["x-team-token"]
        assert status["recent"][0]["outcome"] == "complete"
        assert status["running"] == 0
        assert b"secret-of-a-team" not in response.body


async def test_only_so_many_requests_are_remembered() -> None:
    async with serving(plain()) as (_, running):
        running.gateway.account._recent_limit = 5
        async with running.client() as client:
            first = await client.ask(chat(stream=False))
            for _ in range(6):
                await client.ask(chat(stream=False))
        assert (await timeline(running, first)).status == 404
        assert len((await running.get("/gateway/status")).json["recent"]) == 5


async def test_the_page_says_the_same_as_prometheus_client_would() -> None:
    """The page is written by code of ours, see web/exposition.py."""
    async with serving(streaming(chunk({"content": "x"}), chunk(finish="stop"), DONE)) as (_, running):
        await running.ask(chat())
        await running.ask(b"no json")
        lag = "gateway_loop_lag_seconds"  # goes on while we look
        pages = [
            (await running.get("/metrics", {"accept": form})).body for form in ("", "application/openmetrics-text")
        ]
        running.gateway.metrics.flush()
        theirs = library_pages(running.gateway.registry)
        for ours, their, parse in zip(pages, theirs, (text_page, open_page), strict=True):
            assert samples(parse(ours), without=lag) == samples(parse(their), without=lag)


async def test_every_metric_is_on_the_page_from_the_start() -> None:
    """An alert on a counter that appears with its first increase misses that one."""
    async with serving(plain()) as (_, running):
        page = (await running.get("/metrics")).body.decode()
        assert {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")} == set(METRIC_NAMES)
        for outcome in ("complete", "upstream_error", "client_cancelled"):
            assert f'outcome="{outcome}"}} 0.0' in page


async def test_the_page_is_written_fast() -> None:
    """F16: a scrape must not hold streams up; 50 ms for a page like this was the library's time."""
    import time

    from prometheus_client import CollectorRegistry

    from gateway.account import Account
    from gateway.metrics import Metrics
    from gateway.web.exposition import page_of

    metrics = Metrics(CollectorRegistry())
    account = Account(metrics)
    for name in ("a", "b", "c"):
        account.add_route(name)
        account.add_upstream(name)
        for upstream in ("a", "b"):
            account.add_pair(name, upstream)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        page_of(metrics, "")
        times.append(time.perf_counter() - began)
    assert min(times) < 0.02


async def test_the_api_describes_itself() -> None:
    async with serving(plain()) as (_, running):
        schema = (await running.get("/gateway/openapi.json")).json
        assert {
            "/health",
            "/readyz",
            "/metrics",
            "/gateway/status",
            "/gateway/requests/{request_id}",
            "/gateway/reload",
        } <= set(schema["paths"])
        docs = await running.get("/gateway/docs")
        assert b"/gateway/openapi.json" in docs.body


async def test_a_second_listener_takes_the_control_plane_away_from_the_first(tmp_path: Path) -> None:
    """spec §3: `listen.admin`."""
    async with serving(plain()) as (_, running):
        gateway = running.gateway
        settings = gateway.settings.model_copy(
            update={"listen": gateway.settings.listen.model_copy(update={"admin": "127.0.0.1:9"})}
        )
        gateway.runtime.settings = settings
        for path in ("/metrics", "/gateway/status"):
            assert (await running.get(path)).status == 404
        for path in HEALTH:
            assert (await running.get(path)).status == 200
        assert gateway.is_control("/metrics", 9)
        assert gateway.is_control("/anything", 9)
        assert (await running.ask(chat(stream=False))).status == 200


async def test_status_and_records_are_json_whatever_was_sent() -> None:
    async with serving(plain()) as (_, running):
        await running.ask(json.dumps({"model": "\ud83d\x00", "messages": []}).encode())
        assert json.loads((await running.get("/gateway/status")).body)["recent"][0]["model"]

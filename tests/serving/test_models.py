"""`/v1/models`: what can be asked for here."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.playing import plain, serving
from tests.support.raw import RawUpstream, Received, Wire, chat
from tests.support.running import running_gateway, settings_for

ROUTES = [
    {"name": "fast", "upstreams": ["up"], "match": {"models": ["alias", "*-mini"]}, "model": "m"},
    {"name": "deep", "upstreams": ["up"], "match": {"prefix": "/deep", "models": ["thinker"]}},
    {"name": "rest", "upstreams": ["up"], "match": {"models": ["m"]}},
]


def names(body: bytes) -> list[str]:
    listing = json.loads(body)
    assert listing["object"] == "list"
    return [entry["id"] for entry in listing["data"]]


async def test_names_of_routes_and_of_servers_are_listed_where_they_can_be_asked_for() -> None:
    async with serving(plain(), routes=ROUTES) as (_, running):
        response = await running.get("/v1/models")
        assert response.status == 200
        assert response.header("content-type") == "application/json"
        assert names(response.body) == ["alias", "m"]
        assert names((await running.get("/deep/v1/models")).body) == ["thinker"]
        for name in names(response.body):
            assert (await running.ask(chat(stream=False, model=name))).status == 200
        own, servers = response.json["data"]
        assert own == {"id": "alias", "object": "model", "created": 0, "owned_by": "firsttoken"}
        assert servers["owned_by"] == "test"


@pytest.mark.parametrize("path", ["/v1/models/", "//v1/models", "/v1//models"])
async def test_odd_slashes_work(path: str) -> None:
    """C137."""
    async with serving(plain()) as (_, running):
        assert names((await running.get(path)).body) == ["m"]


async def test_a_key_sees_its_own_routes() -> None:
    keys = [{"name": "k", "key": "secret-of-k-123", "routes": ["deep"]}, {"name": "all", "key": "secret-of-all"}]
    async with serving(plain(), routes=ROUTES, keys=keys) as (_, running):
        assert (await running.get("/v1/models")).status == 401
        assert names((await running.get("/v1/models", {"x-api-key": "secret-of-k-123"})).body) == []
        assert names((await running.get("/deep/v1/models", {"x-api-key": "secret-of-k-123"})).body) == ["thinker"]
        assert "alias" in names((await running.get("/v1/models", {"x-api-key": "secret-of-all"})).body)


ODD = ["org/name", "中文模型", "a b", "x:latest", "100%", "q?x"]


@pytest.mark.parametrize(
    "path, name",
    [
        ("/v1/models/m", "m"),
        ("/v1/models/m/", "m"),
        ("/v1/models/org/name", "org/name"),
        ("/v1/models/org%2Fname", "org/name"),
        ("/v1/models/%E4%B8%AD%E6%96%87%E6%A8%A1%E5%9E%8B", "中文模型"),
        ("/v1/models/a%20b", "a b"),
        ("/v1/models/x:latest", "x:latest"),
        ("/v1/models/100%25", "100%"),
        ("/v1/models/q%3Fx", "q?x"),
    ],
)
async def test_one_model_can_be_asked_for_in_every_spelling(path: str, name: str) -> None:
    """Clients encode the slash of `org/name` or do not."""
    async with (
        RawUpstream(plain(), models=("m", *ODD)) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
    ):
        response = await running.get(path)
        assert (response.status, response.json["id"]) == (200, name)
        assert upstream.requests == []


@pytest.mark.parametrize(
    "path", ["/v1/models/none", "/v1/models/%00", "/v1/models/..%2f..%2fsleep", "/nowhere/v1/models"]
)
async def test_an_unknown_model_or_prefix_is_a_404(path: str) -> None:
    async with serving(plain()) as (_, running):
        response = await running.get(path)
        assert response.status == 404
        assert response.error["code"] in ("model_not_found", "no_route")


async def test_a_slow_server_does_not_hide_the_models_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open WebUI gives a whole list 10 s."""
    monkeypatch.setattr("gateway.upstream.watch.MODELS_TIMEOUT_S", 0.1)
    async with RawUpstream(plain(), listing_delay=9) as slow, RawUpstream(plain()) as good:
        async with running_gateway(settings_for({"slow": slow.url, "good": good.url})) as running:
            async with asyncio.timeout(3):
                assert names((await running.get("/v1/models")).body) == ["m"]


async def test_the_list_is_asked_for_every_five_seconds_only() -> None:
    async with serving(plain()) as (upstream, running):
        for _ in range(10):
            assert names((await running.get("/v1/models")).body) == ["m"]
        assert upstream.listings == 1


@pytest.mark.parametrize(
    "listing",
    [
        b'{"data":[{"id":"m","big":12345678901234567890123,"half":"\\ud83d","nan":NaN}]}',
        b'{"data":[{"id":"m"},{"id":7},null,{"no":"id"}]}',
    ],
)
async def test_odd_entries_of_a_server_do_not_break_the_list(listing: bytes) -> None:
    """C044, C047, C048, on the way of the list."""
    async with (
        RawUpstream(plain(), listing=listing) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
    ):
        response = await running.get("/v1/models")
        assert response.status == 200
        assert names(response.body) == ["m"]


async def test_the_context_length_of_the_model_behind_a_name_is_told() -> None:
    listing = b'{"data":[{"id":"m","max_model_len":32768}]}'
    async with RawUpstream(plain(), listing=listing) as upstream:
        async with running_gateway(settings_for(upstream.url, routes=ROUTES)) as running:
            assert (await running.get("/v1/models/alias")).json["max_model_len"] == 32768


async def test_a_client_that_leaves_while_the_list_is_fetched_is_booked_as_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.upstream.watch.MODELS_CACHE_S", 0)
    async with (
        RawUpstream(plain(), listing_delay=0.2) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
    ):
        async with running.client() as client:
            await client.send(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n")
            await asyncio.sleep(0.05)
        assert (await running.last_record())["outcome"] == "client_cancelled"


async def play(request: Received, wire: Wire) -> None:
    raise AssertionError("the list must not be asked of the data path")


async def test_the_list_takes_no_connection_of_the_data_path() -> None:
    async with serving(play) as (upstream, running):
        assert (await running.get("/v1/models")).status == 200
        assert upstream.requests == []
        assert running.gateway.runtime.upstreams["up"].pool.open == 0

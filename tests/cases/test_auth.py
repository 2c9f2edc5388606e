"""Keys: whose request it is, and where keys must never show."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.playing import plain, serving
from tests.support.raw import RawUpstream, Received, Response, Wire, answer, chat, whole
from tests.support.running import Running, running_gateway, settings_for

SECRET = "gateway-secret-7f3a"
UP_KEY = "upstream-secret-91c2"
KEYS = [
    {"name": "dify", "key": SECRET, "routes": ["main"]},
    {"name": "other", "key": "another-secret-55", "routes": ["side"]},
]
ROUTES = [
    {"name": "side", "upstreams": ["up"], "match": {"prefix": "/side"}},
    {"name": "main", "upstreams": ["up"]},
]


async def ask_with(running: Running, *fields: bytes) -> Response:
    sent = chat(stream=False)
    async with running.client() as client:
        head = b"".join(b"%b\r\n" % field for field in (b"host: a", b"content-length: %d" % len(sent), *fields))
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\n" + head + b"\r\n" + sent)
        return await client.response()


GOOD = SECRET.encode()


@pytest.mark.parametrize(
    "fields",
    [
        [b"authorization: Bearer " + GOOD],
        [b"authorization: bearer " + GOOD],
        [b"Authorization: BEARER   " + GOOD + b"  \t"],
        [b"x-api-key: " + GOOD],
        [b"X-Api-Key:" + GOOD + b" "],
        [b"authorization: Bearer EMPTY", b"x-api-key: " + GOOD],
    ],
)
async def test_a_key_is_found_in_the_ways_that_clients_send_it(fields: list[bytes]) -> None:
    """C142."""
    async with serving(plain(), keys=KEYS, routes=ROUTES) as (_, running):
        assert (await ask_with(running, *fields)).status == 200
        assert (await running.last_record())["key"] == "dify"


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [b"authorization: Bearer caf\xe9"],
        ["authorization: Bearer “key”".encode()],
        [b"authorization: Bearer \xef\xbb\xbf" + GOOD],
        [b"authorization:"],
        [b"authorization: Bearer"],
        [b"authorization: Bearer "],
        [b"authorization: " + GOOD],
        [b"authorization: Basic " + GOOD],
        [b"authorization: Bearer " + GOOD + b"x"],
        [b"authorization: Bearer " + GOOD[:-1]],
        [b"authorization: Bearer " + GOOD, b"authorization: Bearer " + GOOD],
        [b"authorization: Bearer " + GOOD, b"authorization: Bearer other"],
        [b"x-api-key: wrong"],
        [b"authorization: Bearer " + b"x" * 8000],
    ],
)  # fmt: skip
async def test_anything_else_is_a_401_in_one_shape_and_never_a_traceback(fields: list[bytes]) -> None:
    """C142: a bearer token that is not ASCII gave 500 and a traceback."""
    async with serving(plain(), keys=KEYS, routes=ROUTES) as (upstream, running):
        response = await ask_with(running, *fields)
        assert (response.status, response.error["code"]) == (401, "unauthorized")
        assert response.header("www-authenticate") == "Bearer"
        assert response.header("x-should-retry") == "false"
        assert upstream.requests == []
        told = response.body + json.dumps(running.records, default=str).encode()
        assert GOOD[:-1] not in told
        await running.settled()


async def test_the_connection_goes_on_after_a_401() -> None:
    """C142: a client that first asks without its key."""
    async with serving(plain(), keys=KEYS, routes=ROUTES) as (_, running), running.client() as client:
        assert (await client.ask(chat(stream=False))).status == 401
        assert (await client.ask(chat(stream=False), headers={"x-api-key": SECRET})).status == 200


async def test_a_wrong_key_is_refused_before_the_body_is_read() -> None:
    """C142, E14: nobody uploads 60 MB to be told so."""
    async with serving(plain(), keys=KEYS, routes=ROUTES) as (_, running), running.client() as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 60000000\r\nexpect: 100-continue\r\n\r\n"
        )
        assert (await client.head()).status == 401


async def test_a_key_does_not_open_what_it_does_not_name() -> None:
    async with serving(plain(), keys=KEYS, routes=ROUTES) as (upstream, running):
        response = await running.ask(chat(stream=False), headers={"authorization": "Bearer another-secret-55"})
        assert (response.status, response.error["code"]) == (403, "route_forbidden")
        assert upstream.requests == []
        opened = await running.ask(chat(stream=False), "/side/v1/chat/completions", {"x-api-key": "another-secret-55"})
        assert opened.status == 200


async def test_a_sha256_opens_like_the_key_itself() -> None:
    import hashlib

    keys = [{"name": "k", "sha256": hashlib.sha256(GOOD).hexdigest()}]
    async with serving(plain(), keys=keys) as (_, running):
        assert (await ask_with(running, b"authorization: Bearer " + GOOD)).status == 200


CREDENTIALS = {"authorization": f"Bearer {SECRET}", "x-api-key": SECRET, "api-key": "azure", "cookie": "session=1"}


async def test_the_callers_credentials_never_reach_an_upstream() -> None:
    """C143, with and without a key of the upstream's own."""
    for upstream_settings in ({}, {"api_key": UP_KEY}):
        async with serving(plain(), keys=KEYS, routes=ROUTES, upstream=upstream_settings) as (upstream, running):
            assert (await running.ask(chat(stream=False), headers=CREDENTIALS)).status == 200
            request = upstream.requests[0]
            assert SECRET.encode() not in request.head
            for name in ("x-api-key", "api-key", "cookie"):
                assert request.header(name) is None
            expected = f"Bearer {UP_KEY}" if upstream_settings else None
            assert request.header("authorization") == expected


async def test_the_callers_credentials_stay_here_in_an_open_gateway_too() -> None:
    """C143: `auth: none` is about who may call us, not about whom we tell what they sent."""
    async with serving(plain()) as (upstream, running):
        await running.ask(chat(stream=False), headers=CREDENTIALS)
        assert upstream.requests[0].header("authorization") is None


async def test_one_upstreams_key_does_not_go_to_the_next() -> None:
    """C143: the first is down, the second has no key."""
    async with RawUpstream(plain()) as good, RawUpstream(plain()) as gone:
        settings = settings_for({"a": gone.url, "b": good.url})
        settings["upstreams"] = {"a": {"url": gone.url, "api_key": UP_KEY}, "b": {"url": good.url}}
        gone._server.close()
        await asyncio.sleep(0.01)
        async with running_gateway(settings) as running:
            assert (await running.ask(chat(stream=False))).status == 200
            assert good.requests[0].header("authorization") is None


async def test_an_upstream_that_echoes_everything_gives_no_key_away() -> None:
    """C143: in response fields and in an error's body; logs too."""

    async def play(request: Received, wire: Wire) -> None:
        fields = "\r\n".join(f"{name}: {value}" for name, value in request.headers if name.lower() != "content-length")
        status = "400 Bad" if b"bad" in request.body else "200 OK"
        body = json.dumps({"error": {"message": fields}}).encode() if b"bad" in request.body else answer()
        await wire.send(whole(body, status, fields + "\r\ncontent-type: application/json"))

    async with serving(play, keys=KEYS, routes=ROUTES, upstream={"api_key": UP_KEY}) as (_, running):
        for content in ("good", "bad"):
            response = await running.ask(chat(stream=False, content=content), headers=CREDENTIALS)
            told = repr(response.headers) + response.body.decode() + json.dumps(running.records, default=str)
            assert UP_KEY not in told
            assert SECRET not in told
            assert response.header("authorization") is None


async def test_no_page_shows_a_key() -> None:
    """spec §3: not in status, metrics, errors or `repr`."""
    keys = [*KEYS, {"name": "ops", "key": "ops-secret-1234", "admin": True}]
    async with serving(plain(), keys=keys, routes=ROUTES, upstream={"api_key": UP_KEY}) as (_, running):
        await running.ask(chat(stream=False), headers=CREDENTIALS)
        ops = {"authorization": "Bearer ops-secret-1234"}
        pages = [await running.get(path, ops) for path in ("/gateway/status", "/metrics", "/gateway/openapi.json")]
        told = b"".join(page.body for page in pages) + repr(running.gateway.settings).encode()
        told += repr(vars(running.gateway.runtime)).encode() + repr(running.gateway).encode()
        for secret in (SECRET, UP_KEY, "ops-secret-1234", "another-secret-55"):
            assert secret.encode() not in told

"""Browser pages of other origins (C139)."""

from __future__ import annotations

import pytest

from tests.support.playing import plain, serving, streaming
from tests.support.raw import DONE, Response, chat, chunk

PAGE = "https://chat.example"
CORS = {"origins": [PAGE, "http://localhost:3000/"], "max_age_s": 60}
KEYS = [{"name": "k", "key": "a-long-secret"}]
ASKED = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def cross_origin(response: Response) -> list[str]:
    return [name for name, _ in response.headers if name.lower().startswith("access-control-")]


async def test_without_the_setting_no_field_is_sent_and_a_preflight_is_a_405() -> None:
    async with serving(plain()) as (upstream, running):
        response = await running.ask(chat(stream=False), headers={"origin": PAGE})
        assert response.status == 200
        assert cross_origin(response) == []
        preflight = await running.get("/v1/chat/completions", {"origin": PAGE, **ASKED}, "OPTIONS")
        assert (preflight.status, preflight.header("allow"), cross_origin(preflight)) == (405, "POST", [])
        assert len(upstream.requests) == 1


async def test_a_preflight_is_answered_here_without_a_key() -> None:
    """A browser sends no key with it, and a model server would answer 405."""
    async with serving(plain(), cors=CORS, keys=KEYS) as (upstream, running):
        response = await running.get("/v1/chat/completions", {"origin": PAGE, **ASKED}, "OPTIONS")
        assert (response.status, response.body) == (204, b"")
        assert response.header("access-control-allow-origin") == PAGE
        assert response.header("access-control-allow-headers") == ASKED["access-control-request-headers"]
        assert "POST" in (response.header("access-control-allow-methods") or "")
        assert response.header("access-control-max-age") == "60"
        assert response.header("access-control-allow-credentials") is None
        assert "origin" in (response.header("vary") or "")
        assert upstream.requests == []
        assert (await running.last_record())["outcome"] == "complete"
        await running.settled()


async def test_a_connection_goes_on_after_a_preflight() -> None:
    async with serving(plain(), cors=CORS) as (_, running), running.client() as client:
        assert (await client.get("/v1/chat/completions", {"origin": PAGE, **ASKED}, "OPTIONS")).status == 204
        assert (await client.ask(chat(stream=False), headers={"origin": PAGE})).status == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "https://chat.example.evil.example", "http://chat.example"]
)
async def test_an_origin_that_is_not_listed_gets_nothing(origin: str) -> None:
    async with serving(plain(), cors=CORS) as (upstream, running):
        preflight = await running.get("/v1/chat/completions", {"origin": origin, **ASKED}, "OPTIONS")
        assert (preflight.status, cross_origin(preflight)) == (403, [])
        assert "cors.origins" in preflight.error["message"]
        response = await running.ask(chat(stream=False), headers={"origin": origin})
        assert (response.status, cross_origin(response)) == (200, [])  # the browser keeps it from the page
        assert response.header("vary") == "origin"
        assert len(upstream.requests) == 1


@pytest.mark.parametrize("origin", [PAGE, "HTTPS://Chat.example", "http://localhost:3000"])
async def test_answers_of_every_kind_carry_the_fields(origin: str) -> None:
    """Streams, plain answers, errors and lists: a page that cannot read an error shows none."""
    async with serving(streaming(chunk({"content": "x"}), chunk(finish="stop"), DONE), cors=CORS) as (_, running):
        given = {"origin": origin}
        answers = [
            await running.ask(chat(), headers=given),
            await running.ask(b"no json", headers=given),
            await running.ask(b"{}", "/v1/nothing", given),
            await running.get("/v1/models", given),
        ]
        assert [response.status for response in answers] == [200, 400, 404, 200]
        for response in answers:
            assert response.all("access-control-allow-origin") == [origin]
            assert "x-gateway-changes" in (response.header("access-control-expose-headers") or "")
            assert response.header("vary") == "origin"


async def test_a_star_means_every_page() -> None:
    async with serving(plain(), cors={"origins": ["*"]}) as (_, running):
        response = await running.ask(chat(stream=False), headers={"origin": "https://any.example"})
        assert response.header("access-control-allow-origin") == "*"
        assert response.header("vary") is None
        preflight = await running.get("/v1/chat/completions", {"origin": "null", **ASKED}, "OPTIONS")
        assert preflight.header("access-control-allow-origin") == "*"


async def test_an_upstreams_own_fields_never_pass() -> None:
    head = "content-type: application/json\r\naccess-control-allow-origin: *\r\naccess-control-allow-credentials: true"
    async with serving(plain(headers=head), cors=CORS) as (_, running):
        assert cross_origin(await running.ask(chat(stream=False))) == []
        response = await running.ask(chat(stream=False), headers={"origin": PAGE})
        assert response.all("access-control-allow-origin") == [PAGE]
        assert response.header("access-control-allow-credentials") is None


async def test_odd_wishes_of_a_preflight_are_not_echoed() -> None:
    asked = {**ASKED, "access-control-request-headers": "a(b);c"}
    async with serving(plain(), cors=CORS) as (_, running):
        response = await running.get("/v1/chat/completions", {"origin": PAGE, **asked}, "OPTIONS")
        assert (response.status, response.header("access-control-allow-headers")) == (204, None)


async def test_options_without_a_preflights_fields_is_a_plain_405() -> None:
    async with serving(plain(), cors=CORS) as (_, running):
        response = await running.get("/v1/chat/completions", {"origin": PAGE}, "OPTIONS")
        assert (response.status, response.header("allow")) == (405, "POST")
        assert response.header("access-control-allow-origin") == PAGE


async def test_the_control_plane_is_for_no_page() -> None:
    async with serving(plain(), cors=CORS) as (_, running):
        assert cross_origin(await running.get("/gateway/status", {"origin": PAGE})) == []

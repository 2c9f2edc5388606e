"""Where requests must not go."""

from __future__ import annotations

import pytest

from tests.support.playing import plain, serving
from tests.support.raw import Received, Wire, chat, whole
from tests.support.running import running_gateway, settings_for


@pytest.mark.parametrize(
    "status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary Redirect", "308 Permanent Redirect"]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_redirect_is_never_followed(status: str, stream: bool) -> None:
    """C144: it could name an internal address, and our key would go there."""
    hits: list[str] = []

    async def play(request: Received, wire: Wire) -> None:
        hits.append(request.target)
        await wire.send(
            whole(b"", status, f"location: http://127.0.0.1:{wire.writer.get_extra_info('sockname')[1]}/admin")
        )

    async with serving(play, upstream={"api_key": "secret-of-upstream"}) as (_, running):
        response = await running.ask(chat(stream=stream))
        assert (response.status, response.error["code"]) == (502, "upstream_bad_response")
        assert "redirect" in response.error["message"]
        assert response.header("location") is None
        assert hits == ["/v1/chat/completions"]
        assert (await running.last_record())["reason"] == "redirect"
        await running.settled()


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"])
async def test_proxies_of_the_environment_are_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C147: prompts and keys left through the corporate proxy, as NO_PROXY knows no CIDR."""
    monkeypatch.setenv(name, "socks5://127.0.0.1:9" if name.lower() == "all_proxy" else "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    async with serving(plain()) as (upstream, running):
        assert (await running.ask(chat(stream=False))).status == 200
        assert len(upstream.requests) == 1
        assert (await running.get("/v1/models")).json["data"][0]["id"] == "m"  # probes do not use them either
        assert running.gateway.runtime.upstreams["up"].is_up


async def test_a_host_name_upstream_is_reached_directly_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """C147: `localhost` and bare names."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with serving(plain()) as (upstream, _):
        async with running_gateway(settings_for(f"http://localhost:{upstream.port}")) as running:
            assert (await running.ask(chat(stream=False))).status == 200
            assert upstream.requests[0].header("host") == f"localhost:{upstream.port}"

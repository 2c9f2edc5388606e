"""Which fields pass, how bodies are framed after an edit, and where a path may lead."""

from __future__ import annotations

import json

import pytest

from tests.support.playing import plain, serving, streaming
from tests.support.raw import DONE, Received, Wire, answer, chat, chunk, usage_chunk, whole


@pytest.mark.parametrize(
    "route, content",
    [
        ({"max_tokens": {"default": 1024}, "thinking": "off"}, "hi"),
        ({"drop": ["user"]}, "你好"),
        ({"clean": {"control": True}}, "你\x07好\x07 é"),
        ({"model": "n"}, "same length"),
    ],
    ids=["longer", "shorter", "multi-byte", "equal"],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_edited_body_is_announced_with_its_length_in_bytes(
    route: dict[str, object], content: str, chunked: bool
) -> None:
    """C135: the caller's Content-Length, or a count of characters, cuts the request or lets it hang."""
    sent = chat(stream=False, content=content, user="u")
    async with serving(plain(), route=route) as (upstream, running), running.client() as client:
        if chunked:
            await client.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n",
                b"%x\r\n%b\r\n" % (len(sent[:20]), sent[:20]),
                b"%x\r\n%b\r\n0\r\n\r\n" % (len(sent[20:]), sent[20:]),
            )
        else:
            await client.post(sent)
        assert (await client.response()).status == 200
        request = upstream.requests[0]
        lengths = [value for name, value in request.headers if name.lower() == "content-length"]
        assert lengths == [str(len(request.body))]
        assert request.header("transfer-encoding") is None
        assert isinstance(request.json, dict)
        assert (await client.ask(sent)).status == 200


async def test_an_answer_without_its_usage_frame_is_framed_right() -> None:
    """C135: the frame that we asked for is taken out, so the upstream's own length would be wrong."""
    body = chunk({"content": "x"}) + chunk(finish="stop") + usage_chunk() + DONE
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(head + body)

    async with serving(play, upstream={"include_usage": "always"}) as (_, running), running.client() as client:
        response = await client.ask(chat())
        assert response.body == chunk({"content": "x"}) + chunk(finish="stop") + DONE
        assert response.header("content-length") is None
        assert (await client.ask(chat())).status == 200


async def test_fields_of_one_hop_stay_on_it() -> None:
    """C136, both ways."""
    up = (
        b"HTTP/1.1 200 OK\r\nconnection: X-Up, keep-alive\r\nx-up: 1\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nserver: up\r\n"
        b"date: yesterday\r\ncontent-type: application/json\r\nkeep-alive: timeout=5\r\nx-model-version: 7\r\n"
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(answer()), answer())
    )

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(up)

    fields = {
        "connection": "keep-alive, X-Secret", "X-Secret": "1", "TE": "trailers", "Proxy-Authorization": "x",
        "Keep-Alive": "timeout=5", "x-trace": "7", "anthropic-beta": "b",
    }  # fmt: skip
    async with serving(play) as (upstream, running):
        response = await running.ask(chat(stream=False), headers=fields)
        request = upstream.requests[0]
        for name in ("x-secret", "te", "upgrade", "proxy-authorization", "keep-alive", "connection"):
            assert request.header(name) is None, name
        assert request.header("x-trace") == "7"
        assert request.header("anthropic-beta") == "b"
        assert request.header("host") == f"127.0.0.1:{upstream.port}"
        assert response.all("set-cookie") == ["a=1", "b=2"]
        assert response.header("x-model-version") == "7"
        assert len(response.all("date")) == 1
        assert response.all("date") != ["yesterday"]
        for name in ("x-up", "server", "keep-alive"):
            assert response.header(name) is None, name


@pytest.mark.parametrize(
    "path, headers",
    [
        ("/v1/chat/completions/", {}),
        ("//v1/chat/completions", {}),
        ("/v1//chat/completions", {}),
        ("/v1/chat/completions/", {"x-forwarded-proto": "https"}),
        ("/fast//v1/chat/completions/", {}),
    ],
)
async def test_a_base_url_with_a_slash_too_many_works_without_a_redirect(path: str, headers: dict[str, str]) -> None:
    """C137: a redirect loses the key or the https."""
    routes = [
        {"name": "main", "upstreams": ["up"]},
        {"name": "fast", "upstreams": ["up"], "match": {"prefix": "/fast"}},
    ]
    async with serving(plain(), routes=routes) as (upstream, running):
        assert (await running.ask(chat(stream=False), path, headers)).status == 200
        assert upstream.requests[0].target == "/v1/chat/completions"


@pytest.mark.parametrize(
    "path, hint",
    [
        ("/v1/v1/chat/completions", "/v1 twice"),
        ("/chat/completions", "/v1 before"),
        ("/V1/Chat/Completions", "case-sensitive"),
        ("/nowhere/v1/chat/completions", "Inference endpoints"),
        ("/sleep/v1/chat/completions", "Inference endpoints"),
    ],
)
async def test_a_wrong_base_url_gets_a_404_that_says_what_is_wrong(path: str, hint: str) -> None:
    """C137."""
    async with serving(plain()) as (upstream, running):
        response = await running.ask(chat(stream=False), path)
        assert (response.status, response.error["code"]) == (404, "no_route")
        assert hint in response.error["message"]
        assert response.header("location") is None
        assert upstream.requests == []


@pytest.mark.parametrize(
    "target",
    [
        "/v1/%2e%2e/metrics", "/v1/..%2fmetrics", "/v1/../metrics", "/metrics/../v1/load_lora_adapter", "/sleep",
        "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/server_info", "/invocations",
        "/v1/chat/completions;x", "/v1/chat/completions%00", "/v1/chat%2fcompletions", "/%761/chat/completions",
        "/version", "/ping", "/v1/models/../../sleep", "/v1/files", "/v1/responses/..%2f..%2fsleep",
    ],
)  # fmt: skip
async def test_no_spelling_of_a_path_reaches_what_is_closed(target: str) -> None:
    """C138."""
    async with serving(plain()) as (upstream, running):
        for method in ("GET", "POST"):
            assert (await running.get(target, method=method)).status in (400, 404, 405)
        assert upstream.requests == []


async def test_the_authority_of_an_absolute_target_is_ignored() -> None:
    """C138."""
    async with serving(plain()) as (upstream, running), running.client() as client:
        sent = chat(stream=False)
        await client.send(
            b"POST http://evil.example/v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b"
            % (len(sent), sent)
        )
        assert (await client.response()).status == 200
        assert upstream.requests[0].target == "/v1/chat/completions"
        assert upstream.requests[0].header("host") == f"127.0.0.1:{upstream.port}"


async def test_a_query_passes_raw_and_cannot_add_a_header() -> None:
    """C138."""
    async with serving(plain()) as (upstream, running):
        assert (await running.ask(chat(stream=False), "/v1/chat/completions?x=%0d%0aX:1&beta=true")).status == 200
        assert upstream.requests[0].target == "/v1/chat/completions?x=%0d%0aX:1&beta=true"
        assert upstream.requests[0].header("x") is None


async def test_an_admin_path_is_open_only_on_the_route_that_opens_it() -> None:
    """C138: `open_paths` of one route must not open the path on another."""
    routes = [
        {"name": "ops", "upstreams": ["up"], "match": {"prefix": "/ops"}, "open_paths": ["/version"]},
        {"name": "main", "upstreams": ["up"]},
    ]
    async with serving(plain(b"{}"), routes=routes) as (upstream, running):
        assert (await running.get("/ops/version")).status == 200
        assert upstream.requests[0].target == "/version"
        for path in ("/version", "/other/version", "/ops/x/version"):
            assert (await running.get(path)).status == 404
        assert len(upstream.requests) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/audio/transcriptions", "/tokenize"])
async def test_a_method_that_is_not_served_gets_405_and_allow(path: str) -> None:
    """C139."""
    async with serving(plain()) as (upstream, running):
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH"):
            response = await running.get(path, method=method)
            assert (response.status, response.header("allow")) == (405, "POST")
        assert upstream.requests == []


async def test_head_works_where_get_does() -> None:
    """C139."""
    async with serving(plain()) as (_, running):
        for path in ("/v1/models", "/health", "/healthz", "/readyz"):
            response = await running.get(path, method="HEAD")
            assert (response.status, response.body) == (200, b"")
            assert int(response.header("content-length") or 0) == len((await running.get(path)).body)


@pytest.mark.parametrize(
    "given, kept",
    [
        ("abc-1.2:3/4", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("é", False),
        ("a\\u000a", False),
    ],
)
async def test_the_callers_request_id_is_echoed_if_it_is_sane(given: str, kept: bool) -> None:
    """C034, C140: correlated, never passed on as it is, and bounded."""
    async with serving(plain()) as (upstream, running):
        response = await running.ask(chat(stream=False), headers={"x-request-id": given})
        echoed = response.header("x-request-id") or ""
        assert (echoed == given) is kept
        assert len(echoed) <= 128
        sent = upstream.requests[0].header("x-request-id") or ""
        assert sent.startswith(echoed[:100])
        assert sent != echoed
        assert len(sent) <= 128


async def test_two_requests_with_one_id_get_two_ids_upstream() -> None:
    """C034."""
    async with serving(plain()) as (upstream, running):
        for _ in range(2):
            await running.ask(chat(stream=False), headers={"x-request-id": "abc"})
        assert len({request.header("x-request-id") for request in upstream.requests}) == 2


async def test_a_trace_context_is_passed_on_or_begun() -> None:
    """spec §7: the upstream gets `traceparent`."""
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving(plain()) as (upstream, running):
        await running.ask(chat(stream=False), headers={"traceparent": given, "tracestate": "a=1"})
        await running.ask(chat(stream=False), headers={"traceparent": "nonsense"})
        assert upstream.requests[0].header("traceparent") == given
        assert upstream.requests[0].header("tracestate") == "a=1"
        made = upstream.requests[1].header("traceparent") or ""
        assert made != "nonsense"
        assert [len(part) for part in made.split("-")] == [2, 32, 16, 2]


async def test_a_route_named_in_chinese_is_no_server_error() -> None:
    """C141."""
    route = {"name": "日本語", "model": "模型", "upstreams": ["up"]}
    async with serving(plain(), routes=[route]) as (upstream, running):
        response = await running.ask(chat(stream=False, model="你好\n\rx-evil: 1"))
        assert response.status == 200
        assert response.header("x-gateway-route") == "%E6%97%A5%E6%9C%AC%E8%AA%9E"
        assert response.header("x-evil") is None
        assert upstream.requests[0].json["model"] == "模型"
        assert (await running.last_record())["route"] == "日本語"
        assert await running.metric("gateway_requests_total", route="日本語") == 1


async def test_raw_bytes_in_fields_pass_as_bytes() -> None:
    """C141: UTF-8 or Latin-1, from either side."""
    raw = "日本".encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-up: %b\xe9\r\ncontent-length: %d\r\n\r\n" % (
        raw,
        len(answer()),
    )

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(head + answer())

    async with serving(play) as (upstream, running), running.client() as client:
        sent = chat(stream=False)
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-meta: %b\xe9\r\ncontent-length: %d\r\n\r\n%b"
            % (raw, len(sent), sent)
        )
        response = await client.response()
        assert response.status == 200
        assert (response.header("x-up") or "").encode("latin-1") == raw + b"\xe9"
        assert (upstream.requests[0].header("x-meta") or "").encode("latin-1") == raw + b"\xe9"


async def test_words_of_an_error_cannot_make_a_header() -> None:
    """C141: an upstream's text with a line end and an accent goes into bodies only."""
    odd = json.dumps({"error": {"message": "é\r\nx-evil: 1", "type": "t", "param": None, "code": 400}}).encode()

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(odd, "400 Bad Request"))

    async with serving(play) as (_, running):
        response = await running.ask(chat(stream=False))
        assert (response.status, response.body) == (400, odd)
        assert response.header("x-evil") is None


async def test_every_stream_says_that_it_must_not_be_buffered() -> None:
    """C012, from the headers' side; an upstream's own word on caching is replaced."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: max-age=9\r\nx-accel-buffering: yes\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    async with serving(streaming(chunk({"content": "x"}), chunk(finish="stop"), DONE, head=head)) as (_, running):
        response = await running.ask(chat())
        assert response.all("cache-control") == ["no-cache"]
        assert response.all("x-accel-buffering") == ["no"]

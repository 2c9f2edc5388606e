"""Table E of the fault catalogue, second part: requests that are framed, spelt or queued in ways that could hide another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.raw import RawUpstream, Received, Wire, whole
from tests.support.requests import BODY, CHUNKED, GOOD, HEAD, answers, told
from tests.support.running import running_gateway, settings_for

LIMIT = {"max_body_mb": 0.01}  # 10 485 bytes


async def test_a_length_that_lies_is_not_a_second_request() -> None:
    """E5, C146: what follows a short length is no request, and the first one is answered as it was framed."""
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        await client.send(HEAD + b"content-length: 2\r\n\r\n{}" + BODY)
        assert (await client.response()).status == 200
        assert (await told(client)).status == 400
        assert [request.body for request in upstream.requests] == [b"{}"]
        await running.settled()


async def test_pipelined_requests_are_answered_in_order() -> None:
    """E7: with the control plane and refused requests in between."""

    async def echo(request: Received, wire: Wire) -> None:
        number = request.json["n"]
        await asyncio.sleep(0.02 if number % 2 else 0)
        await wire.send(whole(b'{"n":%d}' % number))

    def post(number: int) -> bytes:
        body = b'{"model":"m","messages":[],"n":%d}' % number
        return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body

    get = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"
    wanted = [
        (post(1), b'{"n":1}'), (post(2), b'{"n":2}'), (get % b"healthz", b'"ok"'), (post(3), b'{"n":3}'),
        (get % b"nothing", b"no_route"), (post(4), b'{"n":4}'), (get % b"v1/models", b'"list"'), (get % b"readyz", b'"ready"'),
        (post(5), b'{"n":5}'),
    ]  # fmt: skip
    everything = b"".join(data for data, _ in wanted)
    async with RawUpstream(echo) as upstream, running_gateway(settings_for(upstream.url)) as running:
        for cut in (len(everything), 1, 50, 333, 700):
            async with running.client() as client:
                await client.send(everything[:cut])
                await asyncio.sleep(0.01)
                await client.send(everything[cut:])
                for _, part in wanted:
                    assert part in (await client.response()).body
        await running.settled()


async def test_thousands_of_pipelined_requests_do_not_pile_up() -> None:
    """E7: nothing more is read while answers are owed."""
    get = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    most = 0
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        await client.send(GOOD)
        flood = asyncio.create_task(client.send(get * 30_000))
        read = 0
        while read < 200:
            response = await client.response()
            assert response.status == 200
            read += 1
            connections: set[Any] = running.server.server_state.connections
            (connection,) = connections
            most = max(most, len(connection.pipeline))
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
    assert most <= 256_000 // len(get) + 1, "one read, and no more on top of it"
    await running.settled()


@pytest.mark.parametrize("piece", ["in one write", "byte by byte"])
async def test_a_broken_request_behind_a_good_one_does_not_cost_it_its_answer(piece: str) -> None:
    """C146: 200 for the first, then 400 and close; never a second request upstream."""
    data = GOOD + b"GARBAGE\x00\r\n\r\n"
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        await client.send(*([data] if piece == "in one write" else [data[i : i + 1] for i in range(len(data))]))
        assert (await client.response()).status == 200
        assert (await told(client)).status == 400
        assert len(upstream.requests) == 1
        await running.settled()


async def test_a_refused_request_s_body_is_not_given_to_the_one_before() -> None:
    """C146: the bytes of a request that was refused once could have been taken for the rest of an earlier body."""
    bad = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nhost: y\r\ncontent-length: 6\r\n\r\nSTOLEN"
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        await client.send(GOOD + bad)
        assert (await client.response()).status == 200
        assert (await told(client)).status == 400
        assert [request.body for request in upstream.requests] == [BODY]
        await running.settled()


BROKEN_BODIES = {
    "a chunk size in letters": b"zz\r\n",
    "a chunk without its line end": b"2\r\n{}XX",
    "a negative chunk": b"-1\r\n",
    "a bare line feed": b"2\n{}\n",
}


@pytest.mark.parametrize("data", BROKEN_BODIES.values(), ids=BROKEN_BODIES)
@pytest.mark.parametrize("together", [True, False])
async def test_a_body_that_breaks_its_framing_is_a_400(data: bytes, together: bool) -> None:
    """C146: the same verdict whether it came with its head or later."""
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        await client.send(*([CHUNKED + data] if together else [CHUNKED, data]))
        assert (await told(client)).status == 400
        assert upstream.requests == []
        await running.settled()


async def test_expect_100_is_answered_only_when_the_body_is_wanted() -> None:
    """E14: after authorisation and the size; curl waits a second otherwise."""
    settings = settings_for("x", listen=LIMIT, keys=[{"name": "k", "key": "secret-key"}])
    expect = b"expect: 100-continue\r\n"
    async with RawUpstream(answers) as upstream:
        settings["upstreams"] = {"up": {"url": upstream.url}}
        async with running_gateway(settings) as running:
            async with running.client() as client:
                await client.send(
                    HEAD + expect + b"authorization: Bearer secret-key\r\ncontent-length: %d\r\n\r\n" % len(BODY)
                )
                assert (await client.head()).status == 100
                await client.send(BODY)
                assert (await client.response()).status == 200
            async with running.client() as client:
                await client.send(HEAD + expect + b"content-length: 5\r\n\r\n")
                assert (await client.head()).status == 401
            async with running.client() as client:
                await client.send(HEAD + expect + b"authorization: Bearer secret-key\r\ncontent-length: 99999\r\n\r\n")
                assert (await client.head()).status == 413
            await running.settled()


ODD = {
    "CONNECT": (b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n", {405}),
    "TRACE": (b"TRACE /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", {405}),
    "OPTIONS *": (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", {400, 404, 405}),
    "OPTIONS": (b"OPTIONS /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", {405}),
    "DELETE": (b"DELETE /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n", {405}),
    "h2c": (HEAD + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\ncontent-length: 2\r\n\r\n{}", {501}),
    "websocket": (b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", {501}),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 405, 505}),
    "HTTP/0.9": (b"GET /v1/models\r\n\r\n", {400, 505}),
    "HTTP/2.0": (b"GET /v1/models HTTP/2.0\r\nhost: x\r\n\r\n", {400, 505}),
    "HTTP/1.2": (b"GET /v1/models HTTP/1.2\r\nhost: x\r\n\r\n", {400, 505}),
    "an unknown method": (b"BREW /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", {400, 405}),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400}),
    "no Host": (b"GET /v1/models HTTP/1.1\r\n\r\n", {400}),
    "two Hosts": (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", {400}),
    "Host with /": (b"GET /v1/models HTTP/1.1\r\nhost: x/y\r\n\r\n", {400}),
    "Host with ?": (b"GET /v1/models HTTP/1.1\r\nhost: x?y\r\n\r\n", {400}),
    "Host with #": (b"GET /v1/models HTTP/1.1\r\nhost: x#y\r\n\r\n", {400}),
    "Host with @": (b"GET /v1/models HTTP/1.1\r\nhost: a@b\r\n\r\n", {400}),
    "a length with a plus": (HEAD + b"content-length: +2\r\n\r\n{}", {400}),
    "a length of 20 digits": (HEAD + b"content-length: 99999999999999999999\r\n\r\n{}", {400}),
    "two lengths": (HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", {400}),
    "a length and chunked": (HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    "xchunked": (HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", {400, 501}),
    "identity, chunked": (HEAD + b"transfer-encoding: identity, chunked\r\n\r\n0\r\n\r\n", {400, 501}),
    "chunked twice": (HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", {400, 501}),
    "chunked in HTTP/1.0": (b"POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", {400, 501}),
    "bare line feeds": (b"GET /v1/models HTTP/1.1\nhost: x\n\n", {400}),
    "a space before the colon": (b"GET /v1/models HTTP/1.1\r\nhost : x\r\n\r\n", {400}),
    "a folded line": (b"GET /v1/models HTTP/1.1\r\nhost: x\r\n y\r\n\r\n", {400}),
    "NUL in a value": (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: a\0b\r\n\r\n", {400}),
}  # fmt: skip


@pytest.mark.parametrize("data, statuses", ODD.values(), ids=ODD)
@pytest.mark.parametrize("size", [10**6, 1], ids=["whole", "byte by byte"])
async def test_what_is_no_request_is_refused_and_never_forwarded(data: bytes, statuses: set[int], size: int) -> None:
    """E6, E20, E21, C146: one verdict at every split, one answer, nothing upstream."""
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        await client.send(*(data[i : i + size] for i in range(0, len(data), size)))
        response = await client.response()
        assert response.status in statuses
        assert response.header("content-type") == "application/json"
        client.half_close()
        assert await client.at_end(), "a second answer"
        assert upstream.requests == []
        await running.settled()


PATHS = [
    "/v1/%2e%2e/admin", "/v1%2fchat/completions", "/v1/chat%2fcompletions", "/v1/../v1/chat/completions", "/v1/./chat/completions",
    "/v1/chat/completions;x", "/v1/chat/completions%00", "/v1/chat\\completions", "//admin", "/V1/chat/completions",
    "/metrics/../v1/chat/completions", "/v1/chat/completions/x", "/sleep", "/reset_prefix_cache", "/v1/load_lora_adapter",
    "/%76%31/chat/completions", "/v1/chat/completions%20", "http://evil.test/sleep",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_a_path_that_is_no_exact_route_goes_nowhere(path: str) -> None:
    """E21: authorisation and dispatch see the same raw string."""
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        await client.send(GOOD.replace(b"/v1/chat/completions", path.encode(), 1))
        assert (await client.response()).status in (400, 404, 405)
        assert upstream.requests == []
        await running.settled()


async def test_a_key_in_a_trailer_opens_nothing() -> None:
    """E22: uvicorn appends trailer fields to the headers after the application has begun."""
    settings = settings_for("x", keys=[{"name": "k", "key": "secret-key"}])
    async with RawUpstream(answers) as upstream:
        settings["upstreams"] = {"up": {"url": upstream.url}}
        async with running_gateway(settings) as running, running.client() as client:
            await client.send(
                CHUNKED
                + b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
                + b"authorization: Bearer secret-key\r\nx-api-key: secret-key\r\n\r\n"
            )
            assert (await client.response()).status == 401
            assert upstream.requests == []


async def test_trailers_of_a_good_request_go_nowhere() -> None:
    """E22, C23."""
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        await client.send(CHUNKED + b"%x\r\n%b\r\n0\r\nx-evil: 1\r\n\r\n" % (len(BODY), BODY))
        assert (await client.response()).status == 200
        assert upstream.requests[0].header("x-evil") is None
        assert upstream.requests[0].header("transfer-encoding") is None
        assert upstream.requests[0].header("content-length") == str(len(BODY))
        await client.send(GOOD)
        assert (await client.response()).status == 200
        await running.settled()

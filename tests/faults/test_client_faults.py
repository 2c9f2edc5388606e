"""Table E of the fault catalogue: clients that are slow, huge, odd or hostile."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.plays import sends, streams
from tests.support.raw import DONE, RawClient, RawUpstream, Received, Response, Wire, answer, chat, chunk, whole
from tests.support.running import running_gateway, settings_for, until

BODY = chat(stream=False)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway.test\r\n"
GOOD = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
LISTEN = {"header_timeout_s": 0.3, "body_idle_timeout_s": 0.3, "body_timeout_s": 0.9, "keep_alive_s": 30}


async def answers(request: Received, wire: Wire) -> None:
    await wire.send(whole(answer()))


async def told(client: RawClient) -> Response:
    """The answer to a request that is refused, and that the connection ends with it."""
    response = await client.response()
    assert response.header("connection") == "close"
    assert response.header("x-request-id")
    assert set(response.json) == {"error", "request_id"}
    assert await client.at_end()
    return response


async def test_slow_heads_are_ended_and_disturb_nobody() -> None:
    """E1: uvicorn keeps such connections for ever."""
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url, listen=LISTEN)) as running:
        clients = [RawClient(running.port) for _ in range(50)]
        for client in clients:
            await client.__aenter__()
            await client.send(GOOD[:20])

        async def drip(client: RawClient) -> Response:
            for byte in GOOD[20:30]:
                await asyncio.sleep(0.1)
                if client.reader.at_eof():
                    break
                client.writer.write(bytes([byte]))
            return await told(client)

        tasks = [asyncio.create_task(drip(client)) for client in clients]
        for _ in range(5):
            assert (await running.ask(BODY)).status == 200
        for response in await asyncio.gather(*tasks):
            assert (response.status, response.error["code"]) == (408, "client_too_slow")
        for client in clients:
            client.close()
        await until(lambda: not running.server.server_state.connections)
        await running.settled()


async def test_a_connection_that_says_nothing_is_closed_silently() -> None:
    """E2."""
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url, listen=LISTEN)) as running:
        async with running.client() as client:
            assert await client.at_end()
        await until(lambda: not running.server.server_state.connections)
        assert running.records == []


@pytest.mark.parametrize("pause, least", [(5.0, 0.25), (0.1, 0.8)], ids=["idle", "in total"])
async def test_a_slow_body_is_refused_and_contacts_nobody(pause: float, least: float) -> None:
    """E3: idle, and dripping just fast enough not to be idle."""
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url, listen=LISTEN)) as running, running.client() as client:
        await client.send(HEAD + b"content-length: 10000\r\n\r\n{")
        before = time.monotonic()

        async def drip() -> None:
            while True:
                await asyncio.sleep(pause)
                await client.send(b" ")

        dripping = asyncio.create_task(drip())
        response = await client.response()
        assert least < time.monotonic() - before < 4
        assert (response.status, response.error["code"]) == (408, "client_too_slow")
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        assert upstream.requests == []
        assert (await running.last_record())["reason"] == "body_timeout"
        await running.settled()


async def test_a_kept_connection_is_not_told_that_it_is_slow() -> None:
    """A body that came in two reads once left its time to the next head: an idle connection got a 408 nobody asked for."""
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url, listen=LISTEN)) as running, running.client() as client:
        for _ in range(2):
            await client.send(GOOD[:-10])
            await asyncio.sleep(0.05)
            await client.send(GOOD[-10:])
            assert (await client.response()).status == 200
            await asyncio.sleep(1.0)
        upload = float(str((await running.last_record(count=2))["upload_ms"]))
        assert upload < 800, "the idle second before the request is not part of it"
        assert not client.reader.at_eof()


LARGE_HEADS = {
    "one value": (HEAD + b"x: " + b"a" * 200_000 + b"\r\n\r\n", 431),
    "many fields": (HEAD + b"x: a\r\n" * 20_000 + b"\r\n", 431),
    "101 fields": (HEAD + b"x: a\r\n" * 100 + b"content-length: 0\r\n\r\n", 431),
    "the target": (b"POST /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
    "a target of 9 kB": (b"POST /" + b"a" * 9_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
}


@pytest.mark.parametrize("data, status", LARGE_HEADS.values(), ids=LARGE_HEADS)
@pytest.mark.parametrize("is_second", [False, True], ids=["first request", "after another"])
async def test_a_huge_head_is_refused_wherever_it_comes(data: bytes, status: int, is_second: bool) -> None:
    """E4: httptools accepts an 8 MiB value and 20 000 fields."""
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url)) as running, running.client() as client:
        if is_second:
            await client.send(GOOD)
            assert (await client.response()).status == 200
        await client.send(data)
        response = await client.response()
        assert response.status == status
        assert response.error["code"] == ("head_too_large" if status == 431 else "target_too_long")
        assert await client.at_end()
        assert len(upstream.requests) == int(is_second)
        await running.settled()


LIMIT = {"max_body_mb": 0.01}  # 10 485 bytes
BIG = b"x" * 20_000
OVERSIZE = {
    "an honest length": HEAD + b"content-length: 20000\r\n\r\n" + BIG,
    "an honest length, nothing sent": HEAD + b"content-length: 20000\r\n\r\n",
    "chunks": CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BIG), BIG),
    "chunks without an end": CHUNKED + b"fffffff\r\n" + BIG,
}


@pytest.mark.parametrize("data", OVERSIZE.values(), ids=OVERSIZE)
async def test_a_body_over_the_limit_is_refused_and_the_answer_can_be_read(data: bytes) -> None:
    """E5: 413 before reading on; the connection closes where the rest of the body may still come."""
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url, listen=LIMIT)) as running, running.client() as client:
        await client.send(data)
        response = await client.response()
        assert (response.status, response.error["code"]) == (413, "body_too_large")
        assert upstream.requests == []
        if response.header("connection") == "close":
            assert await client.at_end()
        else:  # it was all there before anybody looked, so the next request is where it should be
            assert (await client.ask(BODY)).status == 200
        await running.settled()


async def test_a_length_that_lies_is_not_a_second_request() -> None:
    """E5, C146: what follows a short length is no request, and the first one is answered as it was framed."""
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url)) as running, running.client() as client:
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
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url)) as running, running.client() as client:
        await client.send(GOOD)
        flood = asyncio.create_task(client.send(get * 30_000))
        read = 0
        while read < 200:
            response = await client.response()
            assert response.status == 200
            read += 1
            (connection,) = running.server.server_state.connections
            most = max(most, len(connection.pipeline))
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
    assert most <= 256_000 // len(get) + 1, "one read, and no more on top of it"
    await running.settled()


@pytest.mark.parametrize("piece", ["in one write", "byte by byte"])
async def test_a_broken_request_behind_a_good_one_does_not_cost_it_its_answer(piece: str) -> None:
    """C146: 200 for the first, then 400 and close; never a second request upstream."""
    data = GOOD + b"GARBAGE\x00\r\n\r\n"
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url)) as running, running.client() as client:
        await client.send(*([data] if piece == "in one write" else [data[i : i + 1] for i in range(len(data))]))
        assert (await client.response()).status == 200
        assert (await told(client)).status == 400
        assert len(upstream.requests) == 1
        await running.settled()


async def test_a_refused_request_s_body_is_not_given_to_the_one_before() -> None:
    """C146: the bytes of a request that was refused once could have been taken for the rest of an earlier body."""
    bad = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nhost: y\r\ncontent-length: 6\r\n\r\nSTOLEN"
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url)) as running, running.client() as client:
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
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url)) as running, running.client() as client:
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
                await client.send(HEAD + expect + b"authorization: Bearer secret-key\r\ncontent-length: %d\r\n\r\n" % len(BODY))
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
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url)) as running, running.client() as client:
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
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url)) as running, running.client() as client:
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
                CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY) + b"authorization: Bearer secret-key\r\nx-api-key: secret-key\r\n\r\n"
            )
            assert (await client.response()).status == 401
            assert upstream.requests == []


async def test_trailers_of_a_good_request_go_nowhere() -> None:
    """E22, C23."""
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url)) as running, running.client() as client:
        await client.send(CHUNKED + b"%x\r\n%b\r\n0\r\nx-evil: 1\r\n\r\n" % (len(BODY), BODY))
        assert (await client.response()).status == 200
        assert upstream.requests[0].header("x-evil") is None
        assert upstream.requests[0].header("transfer-encoding") is None
        assert upstream.requests[0].header("content-length") == str(len(BODY))
        await client.send(GOOD)
        assert (await client.response()).status == 200
        await running.settled()


async def test_an_old_client_gets_a_stream_it_can_read() -> None:
    """HTTP/1.0 (nginx' default towards us until 1.29) knows no chunks: the body ends with the connection."""
    events = [chunk({"content": "hello"}), chunk(finish="stop"), DONE]
    async with RawUpstream(streams(*events)) as upstream, running_gateway(settings_for(upstream.url)) as running, running.client() as client:
        body = chat()
        await client.send(b"POST /v1/chat/completions HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        head = await client.head()
        assert (head.status, head.header("transfer-encoding"), head.header("connection")) == (200, None, "close")
        assert await client.reader.read() == b"".join(events)
        await running.settled()


async def test_an_old_client_sees_that_a_plain_answer_was_cut() -> None:
    """Where only the end of the connection ends a body, a cut must not look like one."""
    large = b'{"x":"' + b"a" * 400_000
    handler = sends(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(large), large), end="close")
    async with RawUpstream(handler) as upstream, running_gateway(settings_for(upstream.url)) as running, running.client() as client:
        await client.send(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY)
        assert (await client.head()).status == 200
        with pytest.raises(ConnectionResetError):
            while await client.reader.read(65536):
                pass
        await running.settled()


async def test_a_reader_that_stops_at_the_end_of_its_answer_is_let_go() -> None:
    """E11: the answer is complete for us and not for the network."""
    import socket

    async def large(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer("x" * 8_000_000)))

    async with RawUpstream(large) as upstream, running_gateway(settings_for(upstream.url, listen={"write_stall_s": 0.3})) as running:
        for extra in (b"", b"connection: close\r\n"):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", running.port))
            sock.sendall(HEAD + extra + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
            await until(lambda: bool(running.server.server_state.connections))
            await until(lambda: not running.server.server_state.connections)
            sock.close()
        await running.settled()



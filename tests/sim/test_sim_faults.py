"""Every scripted fault does to the bytes what its name says, and leaves nothing behind in the server."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest

from gateway.sim.client import Client, Response
from gateway.sim.faults import (
    CLOSE,
    FAULTS,
    RESET,
    FaultError,
    Script,
    describe,
    parse_fault,
    replay,
    stream,
)
from gateway.sim.memory import MemoryNetwork
from gateway.sim.profiles import FAST
from gateway.sim.transport import Server

PROFILE = FAST.with_fields(answer_tokens=(6, 6), decode_tokens_per_s=100, models=("fast",))
DONE = b"data: [DONE]\n\n"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server(PROFILE)
    yield made
    await made.close()
    assert (made.connections, made.engine.running, list(made.engine.waiting)) == (set(), set(), [])
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("sim ")] == []


async def faulty(server: Server, fault: str, *, streamed: bool = True, wait_s: float = 50.0) -> tuple[Client, Response]:
    """One request with a fault: what there is when it ended, or after `wait_s` virtual seconds."""
    _, client = await server.connect(Client)
    body = {"model": "fast", "messages": [{"role": "user", "content": "hi"}], "stream": streamed}
    client.ask("/v1/chat/completions", body, headers=[(b"x-sim-fault", fault.encode())])
    try:
        async with asyncio.timeout(wait_s):
            return client, await client.response()
    except TimeoutError:
        return client, client._response


def events(response: Response) -> int:
    return response.body.count(b"data: ")


Check = Callable[[Client, Response], bool]
REFUSED: Check = lambda c, r: r.complete and r.status >= 400  # noqa: E731
FIN: Check = lambda c, r: c.at_eof and not r.complete  # noqa: E731

STREAMED: list[tuple[str, Check]] = [
    ("stall_headers", lambda c, r: c.received == b"" and not c.lost),
    ("stall_headers=7", lambda c, r: r.complete and r.head_at == 7),
    ("reset_before", lambda c, r: c.received == b"" and isinstance(c.lost_by, ConnectionResetError)),
    ("close_before", lambda c, r: c.received == b"" and c.at_eof and c.lost_by is None),
    ("cut_head", lambda c, r: c.received == b"HTTP/1.1 200 OK\r\nContent-Le" and c.at_eof),
    ("not_http", lambda c, r: c.received.startswith(b"SSH-2.0") and c.framing_error is not None),
    ("not_http=tls", lambda c, r: c.received.startswith(b"\x15\x03")),
    ("reset", lambda c, r: events(r) == 3 and isinstance(c.lost_by, ConnectionResetError) and not r.complete),
    ("reset=1", lambda c, r: events(r) == 1 and isinstance(c.lost_by, ConnectionResetError)),
    ("restart", lambda c, r: c.received == b"" and isinstance(c.lost_by, ConnectionResetError)),
    ("idle_close=1", lambda c, r: r.complete),
    ("close_on_reuse", lambda c, r: r.complete),
    ("surplus", lambda c, r: r.complete and c.received.endswith(b'{"smuggled": true}')),
    ("status", lambda c, r: r.status == 500 and r.json()["error"]["code"] == 500),  # type: ignore[index]
    ("status=503:7", lambda c, r: r.status == 503 and r.header(b"retry-after") == b"7"),
    ("status=429", lambda c, r: r.status == 429 and r.header(b"retry-after") is None),
    ("context_400", lambda c, r: r.status == 400 and b"maximum context length" in r.body),
    ("loading", lambda c, r: r.status == 503 and b"Loading model" in r.body),
    ("html", lambda c, r: r.status == 200 and r.header(b"content-type") == b"text/html; charset=utf-8"),
    ("html=502", lambda c, r: r.status == 502 and b"<html>" in r.body),
    ("no_type", lambda c, r: r.complete and r.header(b"content-type") is None),
    ("error_200", lambda c, r: r.status == 200 and list(r.json()) == ["error"]),
    ("wrong_mode", lambda c, r: r.json()["object"] == "chat.completion"),
    ("bad_status", lambda c, r: c.received.startswith(b"HTTP/1.1 abc OK") and c.framing_error is not None),
    ("bad_status=999", lambda c, r: c.received.startswith(b"HTTP/1.1 999 OK")),
    ("interim=20", lambda c, r: r.complete and c.received.count(b"100 Continue") == 20),
    ("switching", lambda c, r: c.received.startswith(b"HTTP/1.1 101 ") and c.at_eof),
    ("big_head=5000", lambda c, r: r.complete and r.header(b"x-big") == b"a" * 5000),
    ("many_fields=300", lambda c, r: r.complete and len(r.headers) > 300),
    ("hop_headers", lambda c, r: r.complete and r.header(b"x-gateway-route") == b"forged"),
    ("redirect", lambda c, r: r.status == 302 and r.header(b"location") == b"http://169.254.169.254/"),
    ("cl_and_te", lambda c, r: r.header(b"content-length") == b"5" and b"transfer-encoding: chunked" in c.received),
    ("bad_framing", lambda c, r: c.received.count(b"content-length") == 2),
    ("bad_framing=negative", lambda c, r: b"content-length: -1" in c.received),
    ("bad_framing=text", lambda c, r: b"content-length: five" in c.received),
    ("bad_framing=coding", lambda c, r: b"transfer-encoding: gzip, chunked" in c.received),
    ("error_stream", lambda c, r: r.status == 500 and events(r) == 1),
    ("stall_first", lambda c, r: r.status == 200 and r.body == b"" and not c.lost),
    ("stall_first=4", lambda c, r: r.complete and r.pieces[0][0] == 4),
    ("stall", lambda c, r: events(r) == 3 and not c.lost and not r.complete),
    ("stall=2:9", lambda c, r: r.complete and r.pieces[2][0] - r.pieces[1][0] >= 9),
    ("cut", lambda c, r: events(r) == 4 and c.received.endswith(b'"hal') and FIN(c, r)),
    ("no_last_chunk", lambda c, r: r.body.endswith(DONE) and FIN(c, r)),
    ("no_last_chunk=2", lambda c, r: events(r) == 2 and FIN(c, r)),
    ("bad_chunk", lambda c, r: b"zz\r\nhello\r\n" in c.received and c.framing_error is not None),
    ("error_first", lambda c, r: r.body.startswith(b'data: {"error":{') and r.body.endswith(DONE) and events(r) == 2),
    ("error_first=flat", lambda c, r: r.body.startswith(b'data: {"object":"error",')),
    ("error_first=named", lambda c, r: r.body.startswith(b'event: error\ndata: {"error":')),
    ("error_after", lambda c, r: events(r) == 5 and b'"error"' in r.body and r.complete),
    ("error_after=2:flat", lambda c, r: events(r) == 4 and b'"object":"error"' in r.body),
    ("wrong_length", lambda c, r: r.header(b"content-length") == b"1000010" and FIN(c, r)),
    ("drip=0.001", lambda c, r: r.complete and all(len(piece) == 1 for _, piece in r.pieces)),
    ("split=7", lambda c, r: r.complete and max(len(piece) for _, piece in r.pieces) == 7),
    ("coalesce", lambda c, r: r.complete and len(r.pieces) == 1),
    ("coalesce=3", lambda c, r: r.complete and len(r.pieces) == 3),
    ("burst=500", lambda c, r: events(r) == 509),
    ("endless=1", lambda c, r: 45 <= events(r) <= 55 and not c.lost),
    ("no_done", lambda c, r: r.complete and DONE not in r.body and b'"finish_reason":"stop"' in r.body),
    ("no_finish", lambda c, r: r.complete and DONE not in r.body and b'"finish_reason":"' not in r.body),
    ("two_done", lambda c, r: r.complete and r.body.endswith(DONE + DONE)),
    ("after_done", lambda c, r: r.complete and b'"late"' in r.body.split(DONE)[1]),
    ("linger", lambda c, r: r.body.endswith(DONE) and not r.complete and not c.lost),
    ("bad_json", lambda c, r: b"data: {oops\n\n" in r.body),
    ("bad_utf8", lambda c, r: b'"\xff"' in r.body),
    ("odd_chunks", lambda c, r: events(r) == 13 and b'"delta":null' in r.body),
    ("early_role", lambda c, r: r.pieces[0][0] == 0 and r.body.count(b'"role":"assistant"') == 1),
    ("giant=200000", lambda c, r: max(map(len, r.body.split(b"\n"))) >= 190_000),
    ("crlf", lambda c, r: r.body.endswith(b"data: [DONE]\r\n\r\n") and b"}\n" not in r.body),
    ("lone_cr", lambda c, r: r.body.endswith(b"data: [DONE]\r\r") and b"\n" not in r.body),
    ("bom", lambda c, r: r.body.startswith(b"\xef\xbb\xbfdata: {")),
    ("id_lines", lambda c, r: r.body.startswith(b"id: 0\ndata: ") and b"\nid: 8\ndata: [DONE]" in r.body),
    ("retry_lines", lambda c, r: r.body.count(b"retry: 500\n") == events(r)),
    ("comments=2", lambda c, r: r.body.startswith(b": ping\n\n") and r.body.count(b": ping\n\n") == 5),
    ("usage_everywhere", lambda c, r: all("usage" in chunk for _, chunk in r.chunks())),
    ("trailers", lambda c, r: c.received.endswith(b"0\r\nx-late: trailer\r\n\r\n")),
    ("gzip", lambda c, r: zlib.decompress(r.body, 31).endswith(DONE) and r.header(b"content-encoding") == b"gzip"),
    ("crlf+comments=1", lambda c, r: r.body.startswith(b": ping\n\ndata: ") and r.body.endswith(b"[DONE]\r\n\r\n")),
]

PLAIN: list[tuple[str, Check]] = [
    ("reset", lambda c, r: 0 < len(r.body) < 600 and isinstance(c.lost_by, ConnectionResetError)),
    ("cut", lambda c, r: r.status == 200 and FIN(c, r)),
    ("no_last_chunk=4", lambda c, r: r.body != b"" and FIN(c, r)),
    ("stall", lambda c, r: r.body != b"" and not c.lost and not r.complete),
    ("stall_first", lambda c, r: r.status == 200 and r.body == b"" and not c.lost),
    ("wrong_length", lambda c, r: orjson.loads(r.body)["object"] == "chat.completion" and FIN(c, r)),
    ("wrong_length=-5", lambda c, r: r.complete and not r.body.endswith(b"}")),
    ("cl_and_te", lambda c, r: b"content-length" in c.received and b"transfer-encoding: chunked" in c.received),
    ("surplus", lambda c, r: r.json()["object"] == "chat.completion" and c.received.endswith(b'{"smuggled": true}')),
    ("gzip", lambda c, r: orjson.loads(zlib.decompress(r.body, 31))["object"] == "chat.completion" and r.complete),
    ("wrong_mode", lambda c, r: r.header(b"content-type") == b"text/event-stream; charset=utf-8"),
    ("error_200=503", lambda c, r: r.json()["error"]["code"] == 503),  # type: ignore[index]
    ("status=502", REFUSED),
]


@pytest.mark.looptime
@pytest.mark.parametrize("fault,check", STREAMED, ids=[name for name, _ in STREAMED])
async def test_a_streams_fault_shows_in_its_bytes(server: Server, fault: str, check: Check) -> None:
    assert check(*await faulty(server, fault))


@pytest.mark.looptime
@pytest.mark.parametrize("fault,check", PLAIN, ids=[name for name, _ in PLAIN])
async def test_a_plain_answers_fault_shows_in_its_bytes(server: Server, fault: str, check: Check) -> None:
    assert check(*await faulty(server, fault, streamed=False))


def test_every_fault_is_tried_and_described() -> None:
    tried = {name.partition("=")[0] for name, _ in STREAMED}
    assert set(FAULTS) <= tried
    assert all(text.startswith(name) and ":" in text for name, text in describe())


@pytest.mark.looptime
async def test_after_a_fault_that_keeps_the_connection_it_serves_on(server: Server) -> None:
    for fault in ("surplus", "crlf", "status=503", "no_done"):
        client, response = await faulty(server, fault)
        assert response.complete
        before = len(client.received)
        client.ask("/health")
        await asyncio.sleep(0.1)
        assert client.received[before:].startswith(b"HTTP/1.1 200 OK"), fault


@pytest.mark.looptime
async def test_idle_close_and_reuse_faults_end_the_connection_between_requests(server: Server) -> None:
    client, _ = await faulty(server, "idle_close=0.5")
    await asyncio.sleep(0.4)
    assert not client.lost
    await asyncio.sleep(0.2)
    assert client.lost
    client, _ = await faulty(server, "close_on_reuse")
    before = len(client.received)
    client.ask("/health")
    await client.closed()
    assert len(client.received) == before


@pytest.mark.looptime
async def test_a_restart_loses_cache_and_compiled_shapes_and_refuses_meanwhile() -> None:
    server = Server(PROFILE.with_fields(jit_first_call_s=2))
    _, first = await faulty(server, "no_done")
    assert first.pieces[0][0] >= 2
    assert len(server.engine.cache) > 0
    client, _ = await faulty(server, "restart=3")
    assert client.lost
    with pytest.raises(ConnectionRefusedError):
        await server.connect(Client)
    assert len(server.engine.cache) == 0
    await asyncio.sleep(3.1)
    began = asyncio.get_running_loop().time()
    _, again = await faulty(server, "no_done")
    assert again.pieces[0][0] - began >= 2
    await server.close()


@pytest.mark.looptime
async def test_a_server_in_a_network_is_refused_while_it_is_down() -> None:
    network = MemoryNetwork(latency_s=0.01)
    server = Server(PROFILE)
    server.listen_in(network, "thor", 8000)
    assert server.url == "http://thor:8000"
    for path in ("/health", "/version"):
        _, client = await network.create_connection(Client, "thor", 8000)
        client.ask(path)
        await client.response()
        client.ask("/ping")
        await client.response()
    assert [request.connection for request in server.requests] == [1, 1, 2, 2]
    arrived = [request.arrived_at for request in server.requests]
    assert arrived == pytest.approx([0.03, 0.05, 0.09, 0.11], abs=1e-4), (
        "connecting takes a round trip, bytes half of one"
    )
    restart = asyncio.get_running_loop().create_task(server.restart(1))
    await asyncio.sleep(0.5)
    with pytest.raises(ConnectionRefusedError):
        await network.create_connection(Client, "thor", 8000)
    await restart
    await network.create_connection(Client, "thor", 8000)
    await server.close()
    with pytest.raises(ConnectionRefusedError):
        await network.create_connection(Client, "thor", 8000)


@pytest.mark.looptime
async def test_an_anthropic_stream_fails_in_its_own_shape(server: Server) -> None:
    _, client = await server.connect(Client)
    body = {"messages": [], "max_tokens": 50, "stream": True}
    client.ask("/v1/messages", body, headers=[(b"x-sim-fault", b"error_after=2")])
    response = await client.response()
    assert response.body.endswith(
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"simulated engine error"}}\n\n'
    )


@pytest.mark.looptime
async def test_a_model_name_can_carry_the_fault_through_any_proxy(server: Server) -> None:
    _, client = await server.connect(Client)
    client.ask("/v1/chat/completions", b'{"messages":[], "model" : "fast!status=503:2"}')
    assert (await client.response()).header(b"retry-after") == b"2"
    client.ask(
        "/v1/chat/completions", b'{"model":"fast!no_done","stream":true,"messages":[{"role":"user","content":"a!"}]}'
    )
    assert b'"model":"fast"' in (await client.response()).body


@pytest.mark.looptime
async def test_header_beats_model_beats_script_beats_default() -> None:
    server = Server(PROFILE, fault="status=404", script=["status=403", None])
    got: list[int] = []
    for header, model in ((True, True), (False, True), (False, False), (False, False), (False, False)):
        _, client = await server.connect(Client)
        name = "fast!status=402" if model else "fast"
        headers = [(b"x-sim-fault", b"status=401")] if header else []
        client.ask("/v1/chat/completions", {"model": name, "messages": []}, headers=headers)
        got.append((await client.response()).status)
        client.ask("/v1/models")
        assert (await client.response()).status == 200, "only inference requests draw faults"
    assert got == [401, 402, 403, 200, 404]
    await server.close()


@pytest.mark.looptime
async def test_an_unknown_fault_is_told_to_the_caller(server: Server) -> None:
    _, response = await faulty(server, "explode")
    assert response.status == 400
    assert b"unknown fault `explode`; known: stall_headers" in response.body


@pytest.mark.parametrize(
    "text", ["", "+", "nope", "stall=x", "reset=-1", "not_http=gopher", "error_first=loud", "bad_framing=x"]
)
def test_a_wrong_description_of_a_fault_is_refused(text: str) -> None:
    with pytest.raises(FaultError):
        parse_fault(text)


def test_a_script_refuses_an_unknown_fault_when_it_is_written() -> None:
    script = Script()
    with pytest.raises(FaultError, match="nope"):
        script.push(None, "nope")


@pytest.mark.looptime
async def test_a_transcript_is_written_byte_for_byte(server: Server) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"
    server.script.push(replay(head, 0.5, b"abc", 1.0, b"def"), replay(head + b"abc", RESET))
    _, client = await server.connect(Client)
    body: dict[str, Any] = {"model": "fast", "messages": []}
    client.ask("/v1/chat/completions", body)
    response = await client.response()
    assert response.pieces == [(0.5, b"abc"), (1.5, b"def")]
    client.ask("/v1/chat/completions", body)
    await client.closed()
    assert isinstance(client.lost_by, ConnectionResetError)


@pytest.mark.looptime
async def test_a_scripted_stream_has_one_chunk_per_item(server: Server) -> None:
    server.script.push(stream(b"data: a", 0.2, b"b\n\n"), stream(b"data: x\n\n", complete=False), stream(b"y", CLOSE))
    for pieces, complete in (([b"data: a", b"b\n\n"], True), ([b"data: x\n\n"], False), ([b"y"], False)):
        _, client = await server.connect(Client)
        client.ask("/v1/chat/completions", {"model": "fast", "messages": [], "stream": True})
        response = await client.response()
        assert [piece for _, piece in response.pieces] == pieces
        assert response.complete is complete
        assert response.header(b"content-type") == b"text/event-stream; charset=utf-8"


@pytest.mark.looptime
async def test_a_deaf_server_accepts_and_never_reads(server: Server) -> None:
    server.deaf = True
    _, client = await server.connect(Client)
    client.ask("/health")
    await asyncio.sleep(60)
    assert client.received == b""
    assert not client.lost

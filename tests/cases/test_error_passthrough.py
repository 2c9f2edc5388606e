"""What a caller is told when the model server refuses, breaks or talks nonsense."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.faulty import faulty
from tests.support.plays import sends, streams
from tests.support.raw import DONE, STREAM_HEAD, Handler, RawUpstream, Received, Wire, answer, chat, chunk, whole
from tests.support.running import running_gateway, settings_for

HELLO = chunk({"content": "hello"})
STOP = chunk(finish="stop")
VLLM = b"""{"object":"error","message":"This model's maximum context length is 4096 tokens.","type":"BadRequestError","param":null,"code":400}"""
NESTED = b'{"error":{"message":"slow down","type":"rate_limit","param":null,"code":"rate_limit_exceeded"}}'

REFUSALS = [
    ("400 Bad Request", VLLM, "", "refused"),
    ("401 Unauthorized", b'{"error":"no"}', "", "refused"),
    ("403 Forbidden", b'{"detail":"no"}', "", "refused"),
    ("404 Not Found", b'{"object":"error","message":"The model `x` does not exist.","code":404}', "", "refused"),
    ("413 Payload Too Large", b"too large", "", "refused"),
    ("422 Unprocessable Entity", b'{"detail":[{"loc":["body"],"msg":"bad"}]}', "", "refused"),
    ("429 Too Many Requests", NESTED, "retry-after: 7\r\n", "refused"),
    ("500 Internal Server Error", b"Internal Server Error", "", "upstream_error"),
    ("503 Service Unavailable", b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}', "retry-after: 3\r\n", "upstream_error"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status, body, extra, outcome", REFUSALS, ids=[row[0] for row in REFUSALS])
async def test_a_server_s_own_refusal_arrives_as_it_was_written(
    status: str, body: bytes, extra: str, outcome: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """C037, B14–B16: a deterministic 400 became 502, and clients sent it 2 200 times."""
    handler = sends(whole(body, status, f"{extra}content-type: application/json; x=1"))
    async with faulty(handler, caplog) as fault:
        response = await fault.ask(stream=stream)
        assert response.status == int(status[:3])
        if body.startswith(b"{") and b'"error":' not in body:  # flat: a bare number to some SDKs (client-contract §6)
            assert response.body.startswith(body[:-1] + b',"error":{"message":')
            assert response.error["message"].encode() in body
        else:
            assert response.body == body
        assert response.header("content-type") == "application/json; x=1"
        assert response.header("retry-after") == (extra.split()[1] if extra else None)
        assert len(fault.upstream.requests) == 1, "never sent again"
        record = await fault.running.last_record()
        assert (record["outcome"], record["status"]) == (outcome, int(status[:3]))


async def test_an_upstream_that_is_not_there_is_told_in_our_form(caplog: pytest.LogCaptureFixture) -> None:
    """C038, A4: never a 400, never HTML, never `detail`."""
    async with faulty(sends(), caplog) as fault:
        fault.upstream._server.close()
        response = await fault.ask(stream=True)
        assert response.status == 503
        error = response.error
        assert (error["code"], error["type"], error["param"]) == ("upstream_unavailable", "upstream_error", None)
        assert "`up`" in error["message"]
        assert response.header("content-type") == "application/json"
        assert response.header("retry-after")
        assert response.json["request_id"] == response.header("x-request-id")


FAILURES = {
    "a reset": (streams(HELLO, HELLO, HELLO, end="reset"), "reset_mid", "upstream_truncated"),
    "a chunk cut in half": (streams(HELLO, HELLO, HELLO, end="half"), "body_cut", "upstream_truncated"),
    "a close between chunks": (streams(HELLO, HELLO, HELLO, end="close"), "body_cut", "upstream_truncated"),
    "a clean end without a finish": (streams(HELLO, HELLO, HELLO), "no_finish", "upstream_truncated"),
    "a close-delimited body": (
        sends(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", HELLO, HELLO, HELLO, end="close"),
        "no_finish", "upstream_truncated",
    ),
    "a stall": (streams(HELLO, HELLO, HELLO, end="open"), "stall", "upstream_timeout"),
}  # fmt: skip


@pytest.mark.parametrize("include_usage", ["never", "always"])
@pytest.mark.parametrize("handler, reason, outcome", FAILURES.values(), ids=FAILURES)
async def test_a_stream_that_breaks_ends_with_one_error_event(
    handler: Handler, reason: str, outcome: str, include_usage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C039, C3–C5, C9: it just stopped after 200, and SDKs took it for a complete answer."""
    route = {"timeouts": {"idle_ms": 250}}
    async with faulty(handler, caplog, route=route, upstream={"include_usage": include_usage}) as fault:
        response = await fault.ask(stream=True)
        assert response.status == 200
        assert response.is_whole
        assert response.body.startswith(HELLO * 3)
        told, done = response.body[len(HELLO * 3) :].split(b"\n\n", 1)
        event = json.loads(told.removeprefix(b"data: "))
        assert done == DONE
        assert set(event) == {"error"}
        assert set(event["error"]) == {"message", "type", "param", "code"}
        assert event["error"]["type"] == "upstream_error"
        record = await fault.running.last_record()
        assert (record["outcome"], record["reason"], record["chunks"]) == (outcome, reason, 3)


@pytest.mark.parametrize("end", ["reset", "close"])
async def test_a_half_written_event_is_closed_before_the_error(end: str, caplog: pytest.LogCaptureFixture) -> None:
    """C039: never a second event after a partial one."""
    half = HELLO[:40]
    async with faulty(streams(HELLO, half, end=end), caplog) as fault:  # type: ignore[arg-type]
        response = await fault.ask(stream=True)
        assert response.body.startswith(HELLO + half + b'\n\ndata: {"error"')
        assert response.body.endswith(b"}}\n\n" + DONE)


async def test_the_anthropic_form_of_a_broken_stream() -> None:
    """client-contract §5, §12: `event: error` and no `[DONE]`."""
    start = b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3}}}\n\n'
    async with (
        RawUpstream(streams(start, end="reset")) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
    ):
        response = await running.ask(b'{"model":"m","max_tokens":9,"stream":true,"messages":[]}', "/v1/messages")
        assert response.body.startswith(start + b"event: error\ndata: {")
        error = json.loads(response.events[-1].split(b"data: ", 1)[1])
        assert error["type"] == "error"
        assert error["error"]["type"] == "api_error"
        assert b"[DONE]" not in response.body
        assert response.is_whole
        await running.settled()


async def test_a_plain_answer_that_breaks_after_it_began_is_visibly_cut(caplog: pytest.LogCaptureFixture) -> None:
    """fault-catalogue 5.0: fewer bytes than announced, never a shortened JSON that looks whole."""
    body = json.dumps({"choices": [{"message": {"content": "x" * 400_000}}]}).encode()
    async with faulty(sends(whole(body)[:-10], end="close"), caplog) as fault:
        response = await fault.ask(stream=False)
        assert response.status == 200
        assert not response.is_whole
        record = await fault.running.last_record()
        assert (record["outcome"], record["reason"]) == ("upstream_truncated", "body_cut")


async def test_a_compressed_stream_that_breaks_is_cut_and_not_mixed_with_text(caplog: pytest.LogCaptureFixture) -> None:
    """An error event in clear text would be garbage inside gzip."""
    head = STREAM_HEAD.replace(b"transfer-encoding", b"content-encoding: gzip\r\ntransfer-encoding")
    async with faulty(streams(b"\x1f\x8bsomething", head=head, end="reset"), caplog) as fault:
        response = await fault.ask(stream=True)
        assert not response.is_whole
        assert b"".join(piece for _, piece in response.pieces) == b"\x1f\x8bsomething"


SERVER_ERROR = b'data: {"error":{"code":"server_error","message":"template failed","type":"server_error"}}\n\n'
VLLM_ERROR = (
    b'data: {"error":{"object":"error","message":"bad request","type":"BadRequestError","param":null,"code":400}}\n\n'
)


@pytest.mark.parametrize(
    "event, status, outcome", [(SERVER_ERROR, 502, "upstream_error"), (VLLM_ERROR, 400, "refused")]
)
@pytest.mark.parametrize("pieces", [1, 2, 40])
async def test_an_error_as_the_first_event_becomes_a_real_status(
    event: bytes, status: int, outcome: str, pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    """C040: the gateway counted success; nothing has been promised to the caller yet."""
    size = len(event) // pieces + 1
    parts = [event[i : i + size] for i in range(0, len(event), size)]
    async with faulty(streams(*parts, DONE), caplog) as fault:
        response = await fault.ask(stream=True)
        assert response.status == status
        assert response.error["message"] in ("template failed", "bad request")
        assert response.header("content-type") == "application/json"
        record = await fault.running.last_record()
        assert (record["outcome"], record["ttft_ms"]) == (outcome, None)


@pytest.mark.parametrize("end", [DONE, b""], ids=["with [DONE]", "without [DONE]"])
@pytest.mark.parametrize("event", [SERVER_ERROR, b'data: {"object":"error","message":"bad","code":400}\n\n'])
async def test_an_error_after_five_tokens_is_passed_on_and_booked(
    event: bytes, end: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """C040, C13: forwarded as it came; `[DONE]` is added where the server left it out. A flat error is told in the one
    shape that every SDK raises for (client-contract §5: some ignore another one silently)."""
    events = [*[HELLO] * 5, event] + ([end] if end else [])
    async with faulty(streams(*events), caplog) as fault:
        response = await fault.ask(stream=True)
        told = response.body.removeprefix(HELLO * 5).removesuffix(DONE)
        if event == SERVER_ERROR:
            assert told == event
        else:
            assert json.loads(told.removeprefix(b"data: "))["error"]["message"] == "bad"
        assert response.body.endswith(DONE)
        assert response.body.count(DONE) == 1
        assert (await fault.running.last_record())["outcome"] == "upstream_error"


async def test_an_error_whose_blank_line_is_missing_is_closed_before_done(caplog: pytest.LogCaptureFixture) -> None:
    """C13: `[DONE]` on the next line would become part of the error's JSON."""
    for include_usage in ("never", "always"):
        async with faulty(
            streams(HELLO, SERVER_ERROR[:-1]), caplog, upstream={"include_usage": include_usage}
        ) as fault:
            response = await fault.ask(stream=True)
            blocks = [block.strip(b"\n") for block in response.body.split(b"\n\n") if block.strip(b"\n")]
            assert blocks == [HELLO[:-2], SERVER_ERROR[:-2], b"data: [DONE]"]


async def test_an_error_in_a_plain_answer_with_a_good_status_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """B19."""
    async with faulty(sends(whole(b'{"error":{"message":"no","type":"x","code":429}}')), caplog) as fault:
        assert (await fault.ask(stream=False)).status == 429
    async with faulty(sends(whole(b'{"error":{"message":"no","type":"x","code":"odd"}}')), caplog) as fault:
        assert (await fault.ask(stream=False)).status == 502


BIG = "x" * 3_000_000


async def test_an_early_refusal_of_an_upload_passes_when_the_server_reads_on() -> None:
    """C041, A12: the upstream's 413 arrived as a bare 502."""
    body = b'{"error":{"message":"image too large","type":"x","code":413}}'

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(whole(body, "413 Payload Too Large"))
        while await reader.read(65536):
            pass
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with running_gateway(settings_for(url)) as running:
        response = await running.ask(chat(stream=False, content=BIG))
        assert (response.status, response.body) == (413, body)
        await running.settled()
    server.close()


async def test_an_early_refusal_that_closes_is_an_error_of_the_server_and_not_tried_again() -> None:
    """C041: a reset may eat the answer; never `connect error`, never a second upload."""
    asked = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        if b"POST" in await reader.readuntil(b"\r\n\r\n"):
            asked += 1
            writer.write(whole(b"{}", "413 Payload Too Large"))
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with running_gateway(settings_for(url)) as running:
        response = await running.ask(chat(stream=False, content=BIG))
        assert response.status in (413, 502)
        assert asked == 1
        await running.settled()
    server.close()


async def test_our_own_limit_answers_before_anybody_is_contacted(caplog: pytest.LogCaptureFixture) -> None:
    """C041, E5: and the caller can read the answer although it is still sending."""
    async with faulty(sends(whole(answer())), caplog, listen={"max_body_mb": 0.1}) as fault:
        response = await fault.ask(stream=False, padding="x" * 2_000_000)
        assert (response.status, response.error["code"]) == (413, "body_too_large")
        assert "listen.max_body_mb" in response.error["message"]
        assert fault.upstream.requests == []


@pytest.mark.parametrize("size", [200, 400_000])
async def test_an_error_that_comes_after_heartbeats_is_one_event_whatever_its_size(size: int) -> None:
    """C039, C037: the status is gone, and an error page poured into an event stream would be lost on every client."""
    page = json.dumps({"error": {"message": "e" * size, "type": "server_error", "code": 500}}).encode()

    async def play(request: Received, wire: Wire) -> None:
        await asyncio.sleep(0.15)
        await wire.send(whole(page, "500 Internal Server Error"))

    route = {"budget": {"ttft_ms": 50, "heartbeat_ms": 50}}
    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url, route=route)) as running:
        response = await running.ask(chat())
        assert response.status == 200
        assert response.events[0].startswith(b": keep-alive")
        assert response.error["message"]
        assert response.body.endswith(DONE)
        assert len(response.body) < 2 * size + 2000
        assert (await running.last_record())["outcome"] == "upstream_error"
        await running.settled()

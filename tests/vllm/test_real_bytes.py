"""The caller gets the server's bytes: those of a direct call but for ids and times, those that passed but for none.

A stream's events can differ between two calls although the model says the same: a busy server joins tokens into one
event. So two calls are compared until they were cut alike, while the recording in between allows no excuse.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest

from tests.vllm.gateway_process import GatewayProcess, serving
from tests.vllm.real_vllm import RealVllm, Servers, Unavailable

pytestmark = pytest.mark.vllm

CHAT = "/v1/chat/completions"
TRIES = 10
HELD_BYTES = 256 * 1024  # a longer plain answer streams through before it is complete
Chat = Callable[..., dict[str, Any]]

_VARYING = (
    (re.compile(rb'"id":"chatcmpl-[0-9a-f-]+"'), b'"id":ID'),
    (re.compile(rb'"created":\d+'), b'"created":TIME'),
    (re.compile(rb'"metrics":\{[^{}]*\}'), b'"metrics":TIMES'),
)


def masked(body: bytes) -> bytes:
    """The same bytes with ids and times replaced, and nothing else."""
    for pattern, mask in _VARYING:
        body = pattern.sub(mask, body)
    return body


def without_ids(body: bytes) -> dict[str, Any]:
    """The JSON of a plain answer, less ids and times."""
    answer: dict[str, Any] = json.loads(body)
    return {key: value for key, value in answer.items() if key not in ("id", "created", "metrics")}


def equal_once(direct: Callable[[], bytes], through: Callable[[], bytes]) -> None:
    """Whether two calls were cut into the same events, in as many tries as a busy server needs."""
    seen: set[bytes] = set()
    got = b""
    for _ in range(TRIES):
        seen.add(masked(direct()))
        got = masked(through())
        if got in seen:
            return
    assert got in seen


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "not_thinking"])
def test_a_plain_answer_is_that_of_a_direct_call_but_for_ids_and_times(
    vllm: RealVllm, gateway: GatewayProcess, chat: Chat, thinking: bool
) -> None:
    body = chat("你好, what is a gateway?", seed=7, chat_template_kwargs={"thinking": thinking})
    direct, through = vllm.http.post(CHAT, json=body), gateway.http.post(CHAT, json=body)
    assert without_ids(through.content) == without_ids(direct.content)
    assert masked(through.content) == masked(direct.content)
    assert through.headers["content-type"] == direct.headers["content-type"]


def test_a_stream_whose_usage_was_asked_for_is_that_of_a_direct_call(
    vllm: RealVllm, gateway: GatewayProcess, chat: Chat
) -> None:
    body = chat(
        "你好", seed=7, stream=True, stream_options={"include_usage": True}, chat_template_kwargs={"thinking": False}
    )
    equal_once(lambda: vllm.http.post(CHAT, json=body).content, lambda: gateway.http.post(CHAT, json=body).content)
    assert b'"usage":{' in gateway.http.post(CHAT, json=body).content


def test_a_stream_whose_usage_was_not_asked_for_holds_none_and_is_counted_all_the_same(
    vllm: RealVllm, gateway: GatewayProcess, chat: Chat, new_id: str
) -> None:
    """vLLM says `system_fingerprint` once, in its last event, which is the usage event where there is one."""
    body = chat("你好", seed=7, stream=True, chat_template_kwargs={"thinking": False})
    equal_once(
        lambda: re.sub(rb',"system_fingerprint":"[^"]*"', b"", vllm.http.post(CHAT, json=body).content),
        lambda: gateway.http.post(CHAT, json=body).content,
    )
    response = gateway.http.post(CHAT, json=body, headers={"x-request-id": new_id})
    assert b'"usage"' not in response.content
    assert response.content.endswith(b"data: [DONE]\n\n")
    assert response.headers["x-gateway-changes"] == "usage=added"
    record = gateway.record(new_id)
    assert record["completion_tokens"] > 1
    assert record["reasoning_tokens"] == 0
    assert record["wait_causes"]["prefill_ms"] > 0


class Tap:
    """A wire between the gateway and vLLM that keeps what passed, by connection."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        tap = self
        self.recordings: list[tuple[bytearray, bytearray]] = []  # asked, said

        class Wire(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                asked, said = bytearray(), bytearray()
                tap.recordings.append((asked, said))
                with socket.create_connection((host, int(port))) as server:
                    back = threading.Thread(target=_pipe, args=(server, self.request, said), daemon=True)
                    back.start()
                    _pipe(self.request, server, asked)
                    back.join()

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Wire)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def last_body(self) -> bytes:
        """The body of the newest answer to a chat request."""
        return body_in(next(bytes(said) for asked, said in reversed(self.recordings) if asked.startswith(b"POST")))


def _pipe(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            kept += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def body_in(said: bytes) -> bytes:
    """The body of a recorded response, without its framing."""
    head, _, rest = said.partition(b"\r\n\r\n")
    return b"".join(_chunks(rest)) if b"transfer-encoding: chunked" in head.lower() else rest


def _chunks(rest: bytes) -> Iterator[bytes]:
    """What the chunks hold; the last one, which is empty, may still be on its way."""
    size, _, rest = rest.partition(b"\r\n")
    while size and (length := int(size, 16)):
        yield rest[:length]
        size, _, rest = rest[length + 2 :].partition(b"\r\n")


@pytest.fixture(scope="module")
def tapped(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tap, GatewayProcess]]:
    """A gateway whose every request opens a connection of its own to the server, and the recordings of these."""
    try:
        url = servers.ordinary().url
    except Unavailable as reason:
        pytest.skip(f"needs a real vLLM: {reason}")
    if not url.startswith("http://"):
        pytest.skip("TLS cannot be recorded")
    with Tap(url) as tap:
        config = f'upstreams:\n  vllm: {{url: "{tap.url}", keep_alive_s: 0}}\n'
        with serving(config, tmp_path_factory.mktemp("tapped")) as gateway:
            yield tap, gateway


TWO: dict[str, object] = {"n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 5}


@pytest.mark.parametrize(
    "more, status, least",
    [
        ({"stream": True, "stream_options": {"include_usage": True}}, 200, 50_000),
        ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, 200, 50_000),
        ({"stream": True, "stream_options": {"include_usage": True}, **TWO}, 200, 100_000),
        ({}, 200, 1000),
        (TWO, 200, HELD_BYTES),
        ({"max_tokens": 64}, 200, 500),
        ({"stream": True, "temperature": -1}, 400, 100),
    ],
    ids=["stream", "usage_in_every_event", "two_choices", "plain", "large_plain", "burnt", "refused"],
)
def test_what_passes_the_gateway_is_what_the_server_said_to_the_last_byte(
    chat: Chat, tapped: tuple[Tap, GatewayProcess], more: dict[str, object], status: int, least: int
) -> None:
    tap, gateway = tapped
    response = gateway.http.post(CHAT, json=chat("你好", **more))
    assert response.status_code == status
    assert response.content == tap.last_body()
    assert len(response.content) > least


def test_of_a_stream_only_the_usage_that_the_gateway_asked_for_is_taken_out(
    chat: Chat, tapped: tuple[Tap, GatewayProcess]
) -> None:
    tap, gateway = tapped
    response = gateway.http.post(CHAT, json=chat("你好", stream=True))
    said = tap.last_body()
    start = said.rindex(b"data: {")  # the usage event is the last but for [DONE]
    end = said.index(b"\n\n", start) + 2
    assert b'"choices":[]' in said[start:end]
    assert response.content == said[:start] + said[end:]

"""A model server that costs next to nothing: canned answers, paced as the request asks.

`python -m benchmarks.upstream PORT` is the stand-in for native/upstream.c where there is no compiler, with the same
interface: `x-bench: chunks=16,pause_ms=1`, as a header or in the beginning of the body, chooses the stream; chunks=0 a
plain answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

import uvloop

MODELS = json.dumps(
    {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "bench"}]}
).encode()
PLAIN = json.dumps({
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 40}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 40, "total_tokens": 50},
}).encode()  # fmt: skip
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
MAX_SEEN = 2048  # bytes of a body in which the marker is looked for
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_BENCH = re.compile(rb"x-bench: *chunks=(\d+),pause_ms=([\d.]+)", re.IGNORECASE)


def _event(content: str, finish: str | None = None) -> bytes:
    payload = {
        "id": "chatcmpl-8f14e45fceea167a5a36dedd4bea2543", "object": "chat.completion.chunk", "created": 1700000000,
        "model": "m",
        "choices": [
            {"index": 0, "delta": {"content": content}, "logprobs": None, "finish_reason": finish, "token_ids": None}
        ],
    }  # fmt: skip
    data = b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN, LAST = _event(" word"), _event("", "stop")
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Canned(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.buffer = bytearray()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.buffer[: end + 2])
            length = int(found[1]) if (found := _LENGTH.search(head)) else 0
            if len(self.buffer) < end + 4 + length:
                return
            seen = bytes(self.buffer[end + 4 : end + 4 + min(length, MAX_SEEN)])
            del self.buffer[: end + 4 + length]
            self.answer(head, seen)

    def answer(self, head: bytes, seen: bytes) -> None:
        if head.startswith(b"GET"):
            self.plain(MODELS if b"/v1/models" in head else b"{}")
            return
        found = _BENCH.search(head) or _BENCH.search(seen)
        chunks, pause = (int(found[1]), float(found[2]) / 1000) if found else (0, 0.0)
        if chunks == 0:
            self.plain(PLAIN)
        elif chunks == 1:
            self.transport.write(HEAD + LAST + END)
        else:
            self.transport.write(HEAD + TOKEN)
            now = self.loop.time()
            self.loop.call_at(now + pause, self.more, chunks - 2, pause, now + 2 * pause)

    def more(self, left: int, pause: float, due: float) -> None:
        if self.transport.is_closing():
            return
        if left > 0:
            self.transport.write(TOKEN)
            self.loop.call_at(due, self.more, left - 1, pause, due + pause)
        else:
            self.transport.write(LAST + END)

    def plain(self, body: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))

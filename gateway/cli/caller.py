"""A small HTTP client: the callers of `firsttoken demo`, one connection for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httptools
import orjson

from gateway.cli.stage import HOST


class Answer:
    """One response as its caller gets it; the methods in the middle are httptools' callbacks."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.is_complete = False
        self._pieces: list[bytes] = []

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    def heartbeats(self) -> int:
        """Comment blocks of a stream."""
        return sum(line.startswith(b":") for line in self.body.split(b"\n"))

    def text(self) -> str:
        """What a reader of the answer sees."""
        body = self.body
        if body.startswith(b"{"):
            return _content(orjson.loads(body), "message")
        data = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: {"))
        return "".join(_content(orjson.loads(event), "delta") for event in data).strip()


def _content(payload: object, key: str) -> str:
    choices = payload.get("choices") if isinstance(payload, dict) else None
    part = choices[0].get(key) if isinstance(choices, list) and choices else None
    content = part.get("content") if isinstance(part, dict) else None
    return content if isinstance(content, str) else ""


async def post(port: int, path: str, body: bytes, fields: Mapping[str, str]) -> Answer:
    """A request with JSON in it. `fields`: more header fields."""
    described = {"content-type": "application/json", "content-length": str(len(body)), **fields}
    return await _ask(port, f"POST {path}", described, body)


async def get(port: int, path: str, fields: Mapping[str, str]) -> Answer:
    """A request without a body."""
    return await _ask(port, f"GET {path}", fields, b"")


async def _ask(port: int, line: str, fields: Mapping[str, str], body: bytes) -> Answer:
    answer = Answer()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        head = f"{line} HTTP/1.1\r\nhost: {HOST}\r\n" + "".join(f"{name}: {fields[name]}\r\n" for name in fields)
        writer.write(f"{head}\r\n".encode() + body)
        while not answer.is_complete and (data := await reader.read(65536)):
            answer.parser.feed_data(data)
    finally:
        writer.close()
    return answer

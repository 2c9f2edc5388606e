"""What the model server does in these tests, in the form that was asked for: a stream or JSON, OpenAI's or Anthropic's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from tests.support.plays import End, finish
from tests.support.raw import DONE, STREAM_HEAD, Handler, Received, Wire, answer, chunk, usage_chunk, whole

WORDS = ("你好", ", ", "world 🌍", " — that is all.")
FULL = "".join(WORDS)
THOUGHTS = ("Let me ", "think.")

_ANTHROPIC_FINISH = {"stop": "end_turn", "length": "max_tokens"}


class Asked:
    """A request as the model server understands it, and the events and bodies that answer it."""

    def __init__(self, request: Received) -> None:
        self.is_stream = request.json.get("stream") is True
        self.is_anthropic = request.target.endswith("/messages")
        self._wants_usage = (request.json.get("stream_options") or {}).get("include_usage") is True

    def opening(self) -> bytes:
        if not self.is_anthropic:
            return chunk({"role": "assistant", "content": ""})
        start: dict[str, object] = {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
            "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 0},
        }  # fmt: skip
        block = {"type": "text", "text": ""}
        return _event("message_start", message=start) + _event("content_block_start", index=0, content_block=block)

    def word(self, text: str) -> bytes:
        if not self.is_anthropic:
            return chunk({"content": text})
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def words(self, texts: Sequence[str] = WORDS) -> list[bytes]:
        return [self.word(text) for text in texts]

    def closing(self, finish: str = "stop") -> list[bytes]:
        if not self.is_anthropic:
            usage = [usage_chunk()] if self._wants_usage else []
            return [chunk({}, finish=finish), *usage, DONE]
        delta = {"stop_reason": _ANTHROPIC_FINISH[finish], "stop_sequence": None}
        return [
            _event("content_block_stop", index=0),
            _event("message_delta", delta=delta, usage={"output_tokens": 2}),
            _event("message_stop"),
        ]

    def body(self, text: str | None = FULL, finish: str = "stop", **message: object) -> bytes:
        """The whole answer as JSON."""
        if not self.is_anthropic:
            return answer(text, finish, **message)
        content = [{"type": "text", "text": text}] if text is not None else []
        usage = {"input_tokens": 3, "output_tokens": 2}
        return json.dumps({
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": content,
            "stop_reason": _ANTHROPIC_FINISH[finish], "stop_sequence": None, "usage": usage,
        }).encode()  # fmt: skip

    def error(self, message: str) -> bytes:
        """An error as this API's servers put it."""
        told: dict[str, object] = {"error": {"message": message, "type": "InternalServerError", "code": "boom"}}
        if self.is_anthropic:
            told = {"type": "error", "error": {"type": "api_error", "message": message}}
        return json.dumps(told).encode()

    def error_event(self, message: str) -> bytes:
        name = b"event: error\n" if self.is_anthropic else b""
        return name + b"data: " + self.error(message) + b"\n\n"


def _event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


async def gives(
    wire: Wire, request: Received, *, wait: float = 0.0, pause: float = 0.0, texts: Sequence[str] = WORDS
) -> None:
    """The whole answer; `wait` before its first byte, `pause` between the words of a stream, in seconds."""
    asked = Asked(request)
    if not asked.is_stream:
        await asyncio.sleep(wait)
        await wire.send(whole(asked.body("".join(texts))))
        return
    await wire.send(STREAM_HEAD)
    await asyncio.sleep(wait)
    await wire.stream(asked.opening())
    await wire.stream(*asked.words(texts), pause=pause)
    await wire.stream(*asked.closing())
    await finish(wire, "last_chunk")


def thinks_first(*, pause: float) -> Handler:
    """Thoughts with pauses around them, then the answer; a plain caller and Anthropic's just wait."""

    async def play(request: Received, wire: Wire) -> None:
        asked = Asked(request)
        if not asked.is_stream or asked.is_anthropic:
            await gives(wire, request, wait=pause)
            return
        await wire.send(STREAM_HEAD)
        await wire.stream(asked.opening(), *(chunk({"reasoning_content": text}) for text in THOUGHTS), pause=pause)
        await wire.stream(*asked.words(), *asked.closing())
        await finish(wire, "last_chunk")

    return play


def answers(*, wait: float = 0.0, pause: float = 0.0) -> Handler:
    async def play(request: Received, wire: Wire) -> None:
        await gives(wire, request, wait=wait, pause=pause)

    return play


def says_status(
    status: str, message: str, *, headers: str = "", wait: float = 0.0, body: bytes | None = None
) -> Handler:
    """An error answer, after `wait` seconds."""

    async def play(request: Received, wire: Wire) -> None:
        await asyncio.sleep(wait)
        lines = "content-type: application/json" + (f"\r\n{headers}" if headers else "")
        await wire.send(whole(body or Asked(request).error(message), status, lines))

    return play


def resets(*, wait: float = 0.0) -> Handler:
    """RST before the first byte of an answer."""

    async def play(request: Received, wire: Wire) -> None:
        await asyncio.sleep(wait)
        wire.reset()

    return play


def breaks_off(end: End) -> Handler:
    """Half of an answer, then `end`; `open` is silence."""

    async def play(request: Received, wire: Wire) -> None:
        asked = Asked(request)
        if asked.is_stream:
            await wire.send(STREAM_HEAD)
            await wire.stream(asked.opening(), *asked.words()[:2])
        else:
            half = whole(asked.body())[:-20]
            await wire.send(half)
        if end == "open":
            await wire.wait_closed_by_peer(10)
        else:
            await finish(wire, end)

    return play


async def pretends_to_be_a_page(request: Received, wire: Wire) -> None:
    await wire.send(whole(b"<html><body>Sign in</body></html>", headers="content-type: text/html"))


async def mistakes_the_mode(request: Received, wire: Wire) -> None:
    """JSON where a stream was asked for, a stream where JSON was."""
    asked = Asked(request)
    if asked.is_stream:
        await wire.send(whole(asked.body()))
        return
    await wire.send(STREAM_HEAD)
    await wire.stream(asked.opening(), *asked.words(), *asked.closing())
    await finish(wire, "last_chunk")


def tells_an_error(message: str, *, words: int = 2, is_flat: bool = False) -> Handler:
    """An error with a good status: inside a stream after some words, or in place of an answer."""

    async def play(request: Received, wire: Wire) -> None:
        asked = Asked(request)
        flat = json.dumps({"object": "error", "message": message, "type": "BadRequestError", "code": 400}).encode()
        body, event = asked.error(message), asked.error_event(message)
        if is_flat:
            body, event = flat, b"data: " + flat + b"\n\n"
        if not asked.is_stream:
            await wire.send(whole(body))
            return
        await wire.send(STREAM_HEAD)
        if words:
            await wire.stream(asked.opening(), *asked.words()[:words])
        await wire.stream(event, *([] if asked.is_anthropic else [DONE]))
        await finish(wire, "last_chunk")

    return play


async def says_nothing(request: Received, wire: Wire) -> None:
    """A good status, and an end."""
    if Asked(request).is_stream:
        await wire.send(STREAM_HEAD)
        await finish(wire, "last_chunk")
    else:
        await wire.send(whole(b""))


async def never_finishes(request: Received, wire: Wire) -> None:
    """A stream that ends in good order without finish reason and end mark; JSON that is not closed."""
    asked = Asked(request)
    if not asked.is_stream:
        await wire.send(whole(asked.body()[:-12]))
        return
    await wire.send(STREAM_HEAD)
    await wire.stream(asked.opening(), *asked.words()[:2])
    await finish(wire, "last_chunk")


def answers_emptily(finish_reason: str = "stop", *, thoughts: Sequence[str] = ()) -> Handler:
    """A whole answer without a visible word."""

    async def play(request: Received, wire: Wire) -> None:
        asked = Asked(request)
        if not asked.is_stream:
            more = {"reasoning_content": "".join(thoughts)} if thoughts else {}
            await wire.send(whole(asked.body(None, finish_reason, **more)))
            return
        await wire.send(STREAM_HEAD)
        await wire.stream(asked.opening(), *(chunk({"reasoning_content": text}) for text in thoughts))
        await wire.stream(*asked.closing(finish_reason))
        await finish(wire, "last_chunk")

    return play


async def is_done_at_once(request: Received, wire: Wire) -> None:
    """Nothing but the end mark, or an answer without choices."""
    asked = Asked(request)
    if asked.is_stream:
        await wire.send(STREAM_HEAD)
        await wire.stream(asked.closing()[-1])
        await finish(wire, "last_chunk")
        return
    body = json.loads(asked.body())
    body["content" if asked.is_anthropic else "choices"] = []
    await wire.send(whole(json.dumps(body).encode()))

"""Streams of `/v1/messages`: message_start, content blocks, message_delta, message_stop.

`ping` is a keep-alive like a comment and counts as nothing. Usage comes in two parts: the prompt with the start, the
completion with `message_delta`.
"""

from __future__ import annotations

from gateway.wire.answer import JsonObject, Usage, as_object, as_text, finish_word, usage_of
from gateway.wire.sse import Event
from gateway.wire.stream import NOTHING, StreamReader


class MessagesReader(StreamReader):
    """Messages events; all content blocks are one choice."""

    __slots__ = ()

    @property
    def usage(self) -> Usage | None:
        return usage_of(self._usage)

    def _take(self, events: list[Event], now: int) -> None:
        super()._take([event for event in events if event[0] != b"ping"], now)

    def _read(self, name: bytes, payload: JsonObject, body: bytes, now: int) -> None:
        kind = as_text(payload.get("type")) or name.decode("latin-1")
        token = NOTHING
        if kind == "content_block_delta":
            token = self._delta(as_object(payload.get("delta")), now)
        elif kind == "content_block_start":
            token = self._block(as_object(payload.get("content_block")), now)
        elif kind == "message_start":
            self._start(as_object(payload.get("message")))
        elif kind == "message_delta":
            self._late(payload)
            self._finish(0, as_object(payload.get("delta")).get("stop_reason"))
        elif kind == "message_stop":
            self.is_done = True
        else:
            self._take_error(name, payload, body)
        if token:
            self._token(token, now)

    def _start(self, message: JsonObject) -> None:
        usage = as_object(message.get("usage"))
        usage.pop("output_tokens", None)  # 0 or 1, a placeholder that a cut stream would leave standing
        self._late({"usage": usage})

    def _late(self, payload: JsonObject) -> None:
        usage = {name: count for name, count in as_object(payload.get("usage")).items() if count is not None}
        if usage:
            self._usage = {**(self._usage or {}), **usage}

    def _delta(self, delta: JsonObject, now: int) -> int:
        kind = delta.get("type")
        choice = self._choice()
        if kind == "text_delta":
            piece = as_text(delta.get("text"))
            return self._take_text(choice, piece, now) if piece else NOTHING
        if kind == "thinking_delta":
            return self._take_reasoning(choice) if delta.get("thinking") else NOTHING
        if kind == "input_json_delta":
            return self._take_tool(choice, now) if delta.get("partial_json") else NOTHING
        return NOTHING  # signatures and citations are no tokens

    def _block(self, block: JsonObject, now: int) -> int:
        """The start of a block: empty for text and thinking, with the tool's name for a call."""
        kind = as_text(block.get("type"))
        choice = self._choice()
        if is_tool_use(block):
            return self._take_tool(choice, now) if block.get("name") else NOTHING
        if block.get("thinking") or block.get("data"):
            return self._take_reasoning(choice)
        piece = as_text(block.get("text"))
        return self._take_text(choice, piece, now) if kind == "text" and piece else NOTHING


def is_tool_use(block: JsonObject) -> bool:
    """A block that calls a tool, the caller's or the server's."""
    return as_text(block.get("type")).endswith("tool_use")


def finish_of(message: JsonObject) -> str:
    """How a message ended, in chat completions' words; "" when it does not say."""
    return finish_word(as_text(message.get("stop_reason")))

"""Streams of `/v1/responses`: named events, one object each.

`response.created` and `response.in_progress` come before the engine is asked and are no tokens (upstream-contract
§4.1). The final event carries usage; vLLM names it `response.completed` even when the answer is incomplete, so the
object's own status decides.
"""

from __future__ import annotations

from gateway.wire.answer import (
    JsonObject,
    ServerTimes,
    Usage,
    as_list,
    as_object,
    as_text,
    finish_word,
    server_times_of,
    usage_of,
)  # fmt: skip
from gateway.wire.openai import is_reasoning
from gateway.wire.stream import NOTHING, StreamReader

_FINAL = frozenset(("response.completed", "response.incomplete", "response.failed", "response.cancelled"))


class ResponsesReader(StreamReader):
    """Responses events; all of a response is one choice."""

    __slots__ = ()

    @property
    def usage(self) -> Usage | None:
        return usage_of(self._usage)

    @property
    def server(self) -> ServerTimes | None:
        return server_times_of(self._metrics)

    def _read(self, name: bytes, payload: JsonObject, body: bytes, now: int) -> None:
        kind = as_text(payload.get("type")) or name.decode("latin-1")
        if kind.endswith(".delta"):
            token = self._delta(kind, as_text(payload.get("delta")), now)
        elif kind == "response.output_item.added":
            token = self._item(as_object(payload.get("item")), now)
        elif kind in _FINAL:
            token = self._end(kind, as_object(payload.get("response")), body, now)
        else:
            self._take_error(name, payload, body)
            return
        if token:
            self._token(token, now)

    def _late(self, payload: JsonObject) -> None:
        response = as_object(payload.get("response"))
        self._usage = as_object(response.get("usage")) or self._usage
        self._metrics = response.get("metrics") or self._metrics

    def _delta(self, kind: str, piece: str, now: int) -> int:
        if not piece:
            return NOTHING
        choice = self._choice()
        if kind == "response.output_text.delta":
            return self._take_text(choice, piece, now)
        if kind.startswith("response.reasoning"):
            return self._take_reasoning(choice)
        if "call" in kind or "tool" in kind:
            return self._take_tool(choice, now)
        return self._take_visible(choice, now)  # a refusal, audio

    def _item(self, item: JsonObject, now: int) -> int:
        """A new output item: the name of a tool is its first token, the rest come as deltas."""
        if is_call(item) and item.get("name"):
            return self._take_tool(self._choice(), now)
        return NOTHING

    def _end(self, kind: str, response: JsonObject, body: bytes, now: int) -> int:
        self.is_done = True
        self._late({"response": response})
        self._finish(0, finish_of(response) or finish_word(kind.removeprefix("response.")))
        self._take_error(b"error" if kind == "response.failed" else b"", response, body)
        choice = self._choice()
        if choice.t_visible:
            return NOTHING
        return self._whole_output(response, now)

    def _whole_output(self, response: JsonObject, now: int) -> int:
        """Output that only the last event shows, from a server that sends no deltas for it."""
        choice, token = self._choice(), NOTHING
        for raw in as_list(response.get("output")):
            item = as_object(raw)
            if is_call(item):
                token = max(token, self._take_tool(choice, now))
            elif text_of(item).strip() and choice.phase == "start":
                token = max(token, self._take_text(choice, text_of(item), now))
        return token


def is_call(item: JsonObject) -> bool:
    """An output item that calls a tool."""
    return as_text(item.get("type")).endswith("_call")


def text_of(item: JsonObject) -> str:
    """Text and refusals of a `message` item."""
    if item.get("type") != "message":
        return ""
    parts = [as_object(part) for part in as_list(item.get("content"))]
    return "".join(as_text(part.get("text")) or as_text(part.get("refusal")) for part in parts)


def reasoning_of(item: JsonObject) -> str:
    """Text of a `reasoning` item: its content, else its summary."""
    if item.get("type") != "reasoning":
        return ""
    parts = as_list(item.get("content")) or as_list(item.get("summary"))
    if not is_reasoning(parts):
        return ""
    return "".join(as_text(as_object(part).get("text")) for part in parts)


def finish_of(response: JsonObject) -> str:
    """How a response ended, in chat completions' words; "" while it runs."""
    reason = as_text(as_object(response.get("incomplete_details")).get("reason"))
    status = as_text(response.get("status"))
    return "" if status in ("in_progress", "queued") else finish_word(reason or status)

"""Choices of a streamed `/v1/chat/completions` answer, as the plain answer has them.

Where vLLM's two ways differ (`chat_completion/serving.py` of 0.32):

- `content` without text is "" when a tool was forced, else null where a reasoning parser ran or a tool was called,
  else "". A stream begins with `content: ""` in any case.
- With `tool_choice: auto` a plain answer that calls a tool finishes with `tool_calls` whatever ended it, a stream only
  if the model stopped. With `required`, a plain answer that stopped finishes so even without a call.
- Of a call that was cut inside an argument, a plain answer has the arguments before it, as whole JSON; a stream has
  said the beginning of it already. What the plain answer would be depends on the server's parser: `is_doubtful`.
"""

from __future__ import annotations

import orjson

from gateway.wire.answer import JsonObject
from gateway.wire.assemble_completions import Asked, ChoiceParts, text_of
from gateway.wire.assemble_layout import Layout, arrange
from gateway.wire.assemble_parts import Kept, Text

_TEXTS = frozenset(("content", "reasoning", "reasoning_content", "refusal"))
_CALL_TEXTS = frozenset(("name", "arguments", "input"))
_CALL_BYTES = 300  # what a call of its own costs, roughly


class CallParts:
    """Parts of a tool call, or of the older function call, which is only what `function` is in the other."""

    __slots__ = ("_fields", "_functions")

    def __init__(self) -> None:
        self._fields = Kept()
        self._functions: dict[str, FunctionParts] = {}

    def take(self, raw: JsonObject) -> int:
        held = 0
        for key, value in raw.items():
            if key in ("function", "custom") and isinstance(value, dict):
                if key not in self._functions:
                    self._functions[key] = FunctionParts()
                held += self._functions[key].take(value)
            elif key in ("id", "type"):
                held += self._fields.first(key, value)
            else:
                held += self._fields.put(key, value)
        return held

    @property
    def is_cut(self) -> bool:
        function = self._functions.get("function")
        return function is not None and function.is_cut

    def build(self, layout: Layout) -> dict[str, object]:
        found = {key: value for key, value in self._fields.values.items() if value is not None}
        if not layout.has_call_index:
            found.pop("index", None)
        found.update((key, function.build()) for key, function in self._functions.items())
        return arrange(layout.call, found)


class FunctionParts:
    __slots__ = ("_fields", "_texts")

    def __init__(self) -> None:
        self._fields = Kept()
        self._texts: dict[str, Text] = {}

    def take(self, raw: JsonObject) -> int:
        held = 0
        for key, value in raw.items():
            if key not in _CALL_TEXTS:
                held += self._fields.put(key, value)
                continue
            text = self._texts.setdefault(key, Text())
            piece = text_of(key, value)
            if key != "name" or piece != str(text):  # some servers say the name with every piece
                held += text.add(piece)
        return held

    @property
    def is_cut(self) -> bool:
        """The arguments are not whole JSON."""
        try:
            orjson.loads(str(self._texts.get("arguments", "")))
        except ValueError:
            return True
        return False

    def build(self) -> dict[str, object]:
        return {key: str(text) for key, text in self._texts.items()} | self._fields.values


class ChatChoiceParts(ChoiceParts):
    """Parts of one choice and of its message."""

    __slots__ = ("_calls", "_function_call", "_message", "_texts")

    def __init__(self) -> None:
        super().__init__()
        self._message = Kept()
        self._texts: dict[str, Text] = {}
        self._calls: dict[int, CallParts] = {}
        self._function_call: FunctionParts | None = None

    @property
    def has_reasoning(self) -> bool:
        return any(self._texts.get(key) for key in ("reasoning", "reasoning_content"))

    @property
    def is_doubtful(self) -> bool:
        return any(call.is_cut for call in self._calls.values())

    def _take_own(self, key: str, value: object) -> int:
        if key not in ("delta", "message"):  # some servers send the whole message in the last chunk
            return self._fields.put(key, value)
        return self._take_delta(value) if isinstance(value, dict) else 0

    def _take_delta(self, delta: JsonObject) -> int:
        held = 0
        for key, value in delta.items():
            if key in _TEXTS:
                text = self._texts.get(key)
                if text is None:
                    text = self._texts[key] = Text()
                held += text.add(text_of(key, value))
            elif key == "tool_calls":
                held += self._take_calls(value)
            elif key == "function_call" and isinstance(value, dict):
                self._function_call = self._function_call or FunctionParts()
                held += self._function_call.take(value)
            elif key == "role":
                held += self._message.first(key, value)
            elif isinstance(value, list) and isinstance(self._message.values.get(key), list):
                held += self._message.put(key, [*self._message.values[key], *value])  # type: ignore[misc]
            else:
                held += self._message.put(key, value)
        return held

    def _take_calls(self, calls: object) -> int:
        held = 0
        for place, raw in enumerate(calls if isinstance(calls, list) else ()):
            if not isinstance(raw, dict):
                continue
            index = raw.get("index")
            index = index if type(index) is int else place
            if index not in self._calls:
                self._calls[index] = CallParts()
                held += _CALL_BYTES
            held += self._calls[index].take(raw)
        return held

    def build(self, index: int, layout: Layout, asked: Asked, *, has_reasoning_parser: bool) -> dict[str, object]:
        found = self._common(index)
        found["message"] = self._build_message(layout, asked, has_reasoning_parser)
        if layout.has_vllm_finish:
            is_call = (asked.tools == "auto" and self._calls) or (asked.tools == "required" and self.finish == "stop")
            found["finish_reason"] = "tool_calls" if is_call else self.finish
        return arrange(layout.choice, found)

    def _build_message(self, layout: Layout, asked: Asked, has_reasoning_parser: bool) -> dict[str, object]:
        found = dict(self._message.values)
        known = {key for key, _ in layout.message.fields}
        for key, text in self._texts.items():
            if text or key not in known:
                found[key] = str(text) or None
        if self._texts.get("content"):
            pass
        elif layout.empty_content == "vllm":
            is_null = asked.tools not in ("required", "named") and (has_reasoning_parser or self._calls)
            found["content"] = None if is_null else ""
        else:
            found["content"] = None if layout.empty_content == "null" else ""
        if self._calls:
            found["tool_calls"] = [self._calls[index].build(layout) for index in sorted(self._calls)]
        if self._function_call is not None:
            found["function_call"] = self._function_call.build()
        message = arrange(layout.message, found)
        if "reasoning_content" in found and "reasoning" not in found and "reasoning_content" not in known:
            message.pop("reasoning", None)  # a server from before the new name (upstream-contract §3.1)
        return message

"""Reading a complete JSON answer that was not streamed: usage, times, and whether it was an answer at all.

The bytes go to the caller as they came; this only looks. It never raises: what cannot be read is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.wire import anthropic, responses
from gateway.wire.answer import (
    JsonObject,
    ServerTimes,
    StreamError,
    Usage,
    Verdict,
    as_list,
    as_object,
    as_text,
    error_of,
    finish_word,
    judge,
    lenient_loads,
    server_times_of,
    split_thinking,
    usage_of,
    usage_of_timings,
    worst_of,
)  # fmt: skip
from gateway.wire.kinds import Kind
from gateway.wire.openai import has_tool_call, is_reasoning

# Vectors are large and hold nothing of interest but the usage at their end: above this, only the end is read.
LARGE_BYTES = 256 * 1024
_TAIL_BYTES = 2048
_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*\})')


@dataclass(slots=True)
class Part:
    """What one choice of an answer holds; lengths in characters."""

    finish: str | None = None
    content_chars: int = 0
    reasoning_chars: int = 0
    has_visible: bool = False
    has_tool: bool = False

    def add_text(self, text: str) -> None:
        """Text of the answer, which may begin with a `<think>` span."""
        thinking, answer = split_thinking(text)
        self.reasoning_chars += len(thinking)
        self.content_chars += len(answer)
        self.has_visible = self.has_visible or bool(answer.strip())


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """What a whole answer says about itself. Everything is empty or None where the body does not tell."""

    usage: Usage | None = None
    server: ServerTimes | None = None
    error: StreamError | None = None
    parts: dict[int, Part] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    is_json: bool = True

    @property
    def verdict(self) -> Verdict | None:
        return worst_of(self.verdicts)

    @property
    def finish_reasons(self) -> dict[int, str]:
        return {index: part.finish for index, part in self.parts.items() if part.finish}

    @property
    def has_visible(self) -> bool:
        """Visible output of any kind, tool calls included."""
        return any(part.has_visible or part.has_tool for part in self.parts.values())

    @property
    def has_reasoning(self) -> bool:
        """Reasoning text, or reasoning tokens in the usage."""
        counted = self.usage is not None and bool(self.usage.reasoning)
        return counted or any(part.reasoning_chars for part in self.parts.values())

    @property
    def reasoning_chars(self) -> int:
        return sum(part.reasoning_chars for part in self.parts.values())

    @property
    def content_chars(self) -> int:
        return sum(part.content_chars for part in self.parts.values())


def read_plain(kind: Kind, body: bytes, *, max_tokens: int | None = None, is_thinking_off: bool = False) -> PlainAnswer:
    """Read the body of a 200. `max_tokens` is the budget sent upstream, `is_thinking_off` the route's policy."""
    parse = _PARTS.get(kind)
    if parse is None and len(body) > LARGE_BYTES:
        return _read_end(body)
    payload, is_sound = lenient_loads(body)
    if not isinstance(payload, dict):
        return PlainAnswer(is_json=is_sound)
    timings, metrics = payload.get("timings"), payload.get("metrics")
    usage = usage_of(payload.get("usage")) or (usage_of_timings(timings) if timings else None)
    server = server_times_of(metrics, timings) if metrics or timings else None
    error = error_of(payload, body)
    if error is not None or parse is None:
        return PlainAnswer(usage, server, error, is_json=is_sound)
    parts = parse(payload)
    own = usage if len(parts) == 1 else None
    verdicts: dict[int, Verdict] = {}
    for index, part in parts.items():
        verdict = judge(
            finish=part.finish,
            has_output=part.has_visible or part.has_tool,
            has_reasoning=part.reasoning_chars > 0,
            usage=own,
            max_tokens=max_tokens,
            is_thinking_off=is_thinking_off,
        )
        if verdict is not None:
            verdicts[index] = verdict
    return PlainAnswer(usage, server, None, parts, verdicts, is_sound)


def _read_end(body: bytes) -> PlainAnswer:
    found = _USAGE.search(body[-_TAIL_BYTES:])
    return PlainAnswer(usage_of(lenient_loads(found.group(1))[0]) if found else None)


def _choices(payload: JsonObject) -> list[tuple[int, JsonObject]]:
    choices = [as_object(raw) for raw in as_list(payload.get("choices"))]
    indices = [choice.get("index") for choice in choices]
    return [(index if type(index) is int else place, choices[place]) for place, index in enumerate(indices)]


def _chat_parts(payload: JsonObject) -> dict[int, Part]:
    return _ordinary_part(payload) or _any_chat_parts(payload)


def _ordinary_part(payload: JsonObject) -> dict[int, Part] | None:
    """One choice with text and nothing else, as nearly every answer is; None for all others. Same result, sooner."""
    choices = payload.get("choices")
    if type(choices) is not list or len(choices) != 1 or type(choices[0]) is not dict:
        return None
    message, finish = choices[0].get("message"), choices[0].get("finish_reason")
    if type(message) is not dict or finish != "stop" or choices[0].get("index") != 0:
        return None
    content = message.get("content")
    if type(content) is not str or "</think>" in content or content.lstrip()[:1] in ("", "<"):
        return None
    for name in _EXTRA_FIELDS:
        if message.get(name):
            return None
    return {0: Part("stop", len(content), has_visible=True)}


_EXTRA_FIELDS = (
    "reasoning", "reasoning_content", "reasoning_details", "tool_calls", "function_call", "refusal", "audio",
)  # fmt: skip


def _any_chat_parts(payload: JsonObject) -> dict[int, Part]:
    parts: dict[int, Part] = {}
    for index, choice in _choices(payload):
        part = parts[index] = Part(finish_word(as_text(choice.get("finish_reason"))) or None)
        message = as_object(choice.get("message"))
        content = message.get("content")
        part.add_text(as_text(content) or "".join(as_text(as_object(piece).get("text")) for piece in as_list(content)))
        part.reasoning_chars += _reasoning_chars(message)
        part.has_tool = has_tool_call(message)
        audio = as_object(message.get("audio"))
        if as_text(message.get("refusal")) or audio.get("data") or audio.get("transcript"):
            part.has_visible = True
    return parts


def _reasoning_chars(message: JsonObject) -> int:
    """Length of the reasoning under the first of its names that holds any; copies are not counted twice."""
    for name in ("reasoning", "reasoning_content", "reasoning_details"):
        value = message.get(name)
        if is_reasoning(value):
            return len(value) if isinstance(value, str) else sum(_chars(part) for part in as_list(value))
    thoughts = [as_object(piece).get("thinking") for piece in as_list(message.get("content"))]
    return sum(len(thought) if isinstance(thought, str) else sum(map(_chars, as_list(thought))) for thought in thoughts)


def _chars(part: object) -> int:
    fields = as_object(part)
    return len(as_text(fields.get("text")) or as_text(fields.get("summary")) or as_text(fields.get("data")))


def _completion_parts(payload: JsonObject) -> dict[int, Part]:
    parts: dict[int, Part] = {}
    for index, choice in _choices(payload):
        part = parts[index] = Part(finish_word(as_text(choice.get("finish_reason"))) or None)
        part.add_text(as_text(choice.get("text")))
    return parts


def _response_parts(payload: JsonObject) -> dict[int, Part]:
    part = Part(responses.finish_of(payload) or None)
    for raw in as_list(payload.get("output")):
        item = as_object(raw)
        part.add_text(responses.text_of(item))
        part.reasoning_chars += len(responses.reasoning_of(item))
        part.has_tool = part.has_tool or responses.is_call(item)
    return {0: part}


def _message_parts(payload: JsonObject) -> dict[int, Part]:
    part = Part(anthropic.finish_of(payload) or None)
    for raw in as_list(payload.get("content")):
        block = as_object(raw)
        if block.get("type") == "text":
            part.add_text(as_text(block.get("text")))
        part.reasoning_chars += len(as_text(block.get("thinking")) or as_text(block.get("data")))
        part.has_tool = part.has_tool or anthropic.is_tool_use(block)
    return {0: part}


_PARTS: dict[Kind, Callable[[JsonObject], dict[int, Part]]] = {
    "chat": _chat_parts,
    "completions": _completion_parts,
    "responses": _response_parts,
    "messages": _message_parts,
}

"""Plain calls that are sent upstream as streams, and their answers put together again (route option `stream_upstream`).

`can_assemble` says which requests this holds for: those whose plain answer can be made from a stream, field by field.
The others go up as they came. An answer that was assembled differs from the server's own in nothing but its id and
times, and in the spelling of numbers (`1e-5` for `1e-05`), which the server itself writes in two ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.wire.answer import StreamError, error_of
from gateway.wire.assemble_chat import ChatChoiceParts
from gateway.wire.assemble_completions import Asked, ChoiceParts, asked_of
from gateway.wire.assemble_layout import Layout, arrange, layout_of
from gateway.wire.assemble_parts import Kept
from gateway.wire.exact import dumps_exactly, loads_exactly
from gateway.wire.kinds import Kind
from gateway.wire.sse import Event, EventSplitter
from gateway.wire.stream import MAX_CHOICES

# What the parts of one answer may hold; the answer itself is about as large.
MAX_HELD_BYTES: Final = 8 * 1024 * 1024

_CHOICE_BYTES: Final = 1000  # what a choice of its own costs, roughly
# Of these the first chunk's stay: a plain answer is dated once, SGLang's chunks are dated each.
_FIRST: Final = frozenset(("id", "created", "model"))
# Only streams have these.
_STREAM_ONLY: Final = frozenset(("object", "obfuscation", "prompt_progress"))
# After the end mark these are still welcome (fault-catalogue C12).
_LATE: Final = frozenset(("usage", "metrics", "timings"))

# A plain answer to a request with one of these holds what no stream does, the server refuses it in a stream, or it has
# rules of its own. vLLM: `prompt_logprobs`, transfer parameters, `routed_experts`, beams. SGLang: `return_…`.
_REFUSED: Final = frozenset((
    "prompt_logprobs", "best_of", "use_beam_search", "kv_transfer_params", "ec_transfer_params",
    "routed_experts_prompt_start", "return_token_offsets", "return_mm_kwargs", "mm_payload", "prompt_embeds",
    "return_meta_info", "return_prompt_token_ids", "return_hidden_states", "return_routed_experts",
    "return_cached_tokens_details", "return_progress", "audio", "functions", "function_call", "stream_options",
))  # fmt: skip


def can_assemble(kind: Kind, data: Mapping[str, object], engine: str) -> bool:
    """Whether this plain request can be sent as a stream and its answer put together faithfully.

    A caller who asks for vLLM's header `endpoint-load-metrics`, which streams do not have, is not seen here. With `n`,
    `cached_tokens` is that of the first choice where vLLM's plain answer has that of the last.
    """
    layout = layout_of(kind, engine)
    if layout is None or layout.unsaid:
        return False
    if data.get("stream") is not None and data.get("stream") is not False:
        return False
    if any(data.get(key) for key in _REFUSED) or data.get("prompt_logprobs") is not None:
        return False
    if not _has_known_count(data, layout) or data.get("modalities") not in (None, ["text"]):
        return False
    if kind == "chat":
        return not data.get("echo") and (layout.has_tools or not data.get("tools"))
    return _is_one_prompt(data.get("prompt")) and _can_echo(data, layout)


def _has_known_count(data: Mapping[str, object], layout: Layout) -> bool:
    count = data.get("n")
    if count is None:
        return True
    return type(count) is int and 1 <= count <= (MAX_CHOICES if layout.has_several_choices else 1)


def _is_one_prompt(prompt: object) -> bool:
    """One text, or the tokens of one. With several prompts vLLM's usage says the first's cached tokens in a stream and
    the last's in a plain answer.
    """
    if isinstance(prompt, list):
        return len(prompt) == 1 or (bool(prompt) and all(type(token) is int for token in prompt))
    return isinstance(prompt, str)


def _can_echo(data: Mapping[str, object], layout: Layout) -> bool:
    """vLLM's plain answer adds `prompt_logprobs` when log probabilities are asked for too (with chat's `echo`, always);
    its stream has the prompt for the first choice only.
    """
    if not data.get("echo"):
        return True
    return layout.has_echo and data.get("logprobs") is None and data.get("n") in (None, 1)


def stream_fields(data: Mapping[str, object]) -> dict[str, object]:  # noqa: ARG001
    """The members of the request to set, so that it becomes a stream that says all a plain answer does.

    vLLM sends `metrics` only beside usage. Running usage (`continuous_usage_stats`) would say nothing more.
    """
    return {"stream": True, "stream_options": {"include_usage": True}}


class Assembler:
    """Feed the bytes of the stream, then take the plain answer's body from `finish`.

    `data` is the request as the caller sent it. When an answer holds more than `max_bytes`, or what cannot be joined
    comes, `is_lost` is set, what was held is let go and there is no body.
    """

    __slots__ = (
        "_asked", "_choices", "_held", "_is_garbled", "_layout", "_make", "_max_bytes", "_splitter", "_top", "error",
        "is_done",
    )  # fmt: skip

    def __init__(self, kind: Kind, data: Mapping[str, object], engine: str, *, max_bytes: int = MAX_HELD_BYTES) -> None:
        layout = layout_of(kind, engine)
        if layout is None:
            raise ValueError(f"answers of {engine} to {kind} cannot be assembled")
        self.error: StreamError | None = None
        """An error inside the stream; there is no body then."""
        self.is_done = False
        """`[DONE]` came."""
        self._layout = layout
        self._asked: Asked = asked_of(data)
        self._max_bytes = max_bytes
        self._make: type[ChoiceParts] = ChatChoiceParts if kind == "chat" else ChoiceParts
        self._splitter = EventSplitter()
        self._top = Kept()
        self._choices: dict[int, ChoiceParts] = {}
        self._held = 0
        self._is_garbled = False

    def __repr__(self) -> str:
        state = "lost" if self.is_lost else "failed" if self.error else "done" if self.is_done else "open"
        return f"Assembler({state}, {len(self._choices)} choices, {self._held} bytes held)"

    @property
    def is_lost(self) -> bool:
        """Part of the stream could not be read, or there was too much of it."""
        return self._is_garbled or self._splitter.overflowed

    @property
    def is_whole(self) -> bool:
        """There is a body: the end mark came, or every choice has ended and usage was said (cases C007)."""
        if self.is_lost or self.error is not None or not self._choices:
            return False
        has_ended = bool(self._top.values.get("usage")) and all(part.finish for part in self._choices.values())
        return self.is_done or has_ended

    @property
    def is_doubtful(self) -> bool:
        """A tool call was cut inside its arguments: the server's own plain answer may hold fewer of them."""
        return any(part.is_doubtful for part in self._choices.values())

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream, split anywhere."""
        for event in self._splitter.feed(data):
            self._take(event)

    def finish(self) -> bytes | None:
        """The stream ended: the body of the plain answer, or None when it was cut, failed or was lost."""
        for event in self._splitter.finish():
            if event[1].strip() == b"[DONE]" or _is_json(event[1]):  # else the stream was cut inside an event
                self._take(event)
        if not self.is_whole:
            return None
        layout = self._layout
        found = dict(self._top.values)
        found["object"] = layout.word
        has_parser = self._has_reasoning_parser()
        found["choices"] = [
            self._choices[index].build(index, layout, self._asked, has_reasoning_parser=has_parser)
            for index in sorted(self._choices)
        ]
        try:
            return dumps_exactly(arrange(layout.top, found))
        except RecursionError:
            self._lose()
            return None

    def _has_reasoning_parser(self) -> bool:
        """vLLM counts reasoning tokens only where a parser runs (0.28 and later); older ones show it by reasoning."""
        usage = self._top.values.get("usage")
        if isinstance(usage, dict) and usage.get("completion_tokens_details") is not None:
            return True
        return any(part.has_reasoning for part in self._choices.values())

    def _take(self, event: Event) -> None:
        name, body = event
        if self.is_lost or self.error is not None:
            return
        stripped = body.strip()
        if stripped == b"[DONE]":
            self.is_done = True
            return
        if not stripped:
            return
        try:
            payload = loads_exactly(body)
            if isinstance(payload, dict):
                self._take_payload(name, payload, body)
        except (ValueError, RecursionError):
            self._lose()

    def _take_payload(self, name: bytes, payload: dict[str, object], body: bytes) -> None:
        if self.is_done:
            payload = {key: value for key, value in payload.items() if key in _LATE}
        elif name or payload.get("choices") is None or payload.get("error"):
            self.error = error_of(payload, body, is_error_event=name == b"error")
            if self.error is not None:
                return
        held = 0
        for key, value in payload.items():
            if key == "choices":
                held += self._take_choices(value)
            elif key in _FIRST:
                held += self._top.first(key, value)
            elif key not in _STREAM_ONLY:
                held += self._top.put(key, value)
        self._held += held
        if self._held > self._max_bytes:
            self._lose()

    def _take_choices(self, choices: object) -> int:
        held = 0
        for raw in choices if isinstance(choices, list) else ():
            if not isinstance(raw, dict):
                continue
            index = raw.get("index")
            index = index if type(index) is int else 0
            part = self._choices.get(index)
            if part is None:
                if len(self._choices) >= MAX_CHOICES:
                    raise ValueError("more choices than any request asks for")
                part = self._choices[index] = self._make()
                held += _CHOICE_BYTES
            held += part.take(raw)
        return held

    def _lose(self) -> None:
        self._is_garbled = True
        self._choices = {}
        self._top = Kept()


def _is_json(body: bytes) -> bool:
    try:
        loads_exactly(body)
    except (ValueError, RecursionError):
        return False
    return True

"""Streams of `/v1/chat/completions` and `/v1/completions`, as vLLM, SGLang, llama.cpp, Ollama and others send them.

A token is non-empty text, reasoning under any of its names (upstream-contract §3.1), a refusal, audio, or a tool
call with a name or arguments. The role-only first chunk, empty deltas, prompt progress and usage are events only.
"""

from __future__ import annotations

import re

from gateway.wire.answer import (
    JsonObject,
    ServerTimes,
    Usage,
    as_list,
    as_object,
    as_text,
    server_times_of,
    usage_of,
    usage_of_timings,
)  # fmt: skip
from gateway.wire.choice import Choice
from gateway.wire.stream import NOTHING, REASONING, TOKEN, StreamReader
from gateway.wire.template import MAX_TRIES, Template, is_plain_text, learn

# Keys of an event that matter besides its choices.
_EXTRAS = frozenset(("error", "usage", "timings", "metrics"))
# For bytes that no JSON reader takes: JSON strings escape quotes, so these can only be keys.
_SCAN_TEXT = re.compile(rb'"(?:content|text|refusal|arguments)"\s*:\s*"[^"]')
_SCAN_REASONING = re.compile(rb'"(?:reasoning|reasoning_content)"\s*:\s*"[^"]')
_SCAN_FINISH = re.compile(rb'"finish_reason"\s*:\s*"([a-z_]{1,32})"')


class ChatReader(StreamReader):
    """Chat completion chunks."""

    __slots__ = ("_only", "_template", "_tries")

    def __init__(self) -> None:
        super().__init__()
        self._template: Template | None = None
        self._only = Choice()  # the choice that the template is of
        self._tries = 0

    def feed(self, data: bytes, now: int) -> None:
        """One read. An ordinary chunk, which is like the one before but for its text, is not parsed again."""
        template = self._template
        if template is not None:
            before, after, kind = template
            only = self._only
            if (
                (kind == REASONING or (only.phase == "answer" and not only.carry))
                and data.startswith(before)
                and data.endswith(after)
                and is_plain_text(data, len(before), len(data) - len(after))
                and not self._splitter.is_open
                and not self.is_done
            ):
                self.events += 1
                self._token(kind, now)
                return
        if self._tries < MAX_TRIES:
            self._feed_and_learn(data, now)
        else:
            super().feed(data, now)

    def _feed_and_learn(self, data: bytes, now: int) -> None:
        was_open, events, tokens, reasoning = self.is_open, self.events, self.token_events, self.reasoning_events
        super().feed(data, now)
        if was_open or self.events != events + 1 or self.token_events != tokens + 1 or len(self.choices) != 1:
            return
        kind = REASONING if self.reasoning_events > reasoning else TOKEN
        (choice,) = self.choices.values()
        self._only = choice
        if self.finish_reasons or self.error or (kind == TOKEN and (choice.phase != "answer" or choice.carry)):
            return
        self._tries += 1
        self._template = learn(data, kind)

    @property
    def usage(self) -> Usage | None:
        return usage_of(self._usage) or usage_of_timings(self._timings)

    @property
    def server(self) -> ServerTimes | None:
        return server_times_of(self._metrics, self._timings)

    def _read(self, name: bytes, payload: JsonObject, body: bytes, now: int) -> None:
        choices = payload.get("choices")
        if type(choices) is list:
            kind = NOTHING
            for raw in choices:
                if type(raw) is dict:
                    part = self._choice_of(raw, now)
                    if part > kind:
                        kind = part
            if kind:
                self._token(kind, now, 1 if self.t_last else _tokens_in(payload))
        if payload.get("usage") or payload.get("timings") or payload.get("metrics"):
            self._late(payload)
        if name or choices is None or payload.get("error"):
            self._take_error(name, payload, body)

    def _late(self, payload: JsonObject) -> None:
        self._usage = as_object(payload.get("usage")) or self._usage
        self._metrics = payload.get("metrics") or self._metrics
        self._timings = payload.get("timings") or self._timings

    def _choice_of(self, raw: JsonObject, now: int) -> int:
        """One member of `choices`; what kind of token it holds."""
        index = raw.get("index")
        choice = self.choices.get(index) if type(index) is int else None
        if choice is None:
            choice = self._choice(index)
        if raw.get("finish_reason"):
            self._finish(index, raw["finish_reason"])
        return self._content_of(choice, raw, now)

    def _content_of(self, choice: Choice, raw: JsonObject, now: int) -> int:
        delta = raw.get("delta")
        if type(delta) is not dict:
            delta = as_object(raw.get("message"))  # some servers send the whole message in the last chunk
        text = delta.get("content")
        kind = self._text_of(choice, text, now) if text else NOTHING
        if kind == NOTHING or len(delta) > 1:
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or delta.get("reasoning_details")
            if reasoning and (type(reasoning) is str or is_reasoning(reasoning)):
                kind = self._take_reasoning(choice)
            if delta.get("tool_calls") or delta.get("refusal") or delta.get("function_call") or delta.get("audio"):
                kind = max(kind, self._output_of(choice, delta, now))
        return kind

    def _text_of(self, choice: Choice, text: object, now: int) -> int:
        if isinstance(text, str):
            if choice.is_settled or (choice.phase == "answer" and not choice.carry and "<" not in text):
                return TOKEN  # the same answer as below, without the calls
            return self._take_text(choice, text, now)
        kind = NOTHING
        for part in as_list(text):  # Mistral's servers stream content as parts
            fields = as_object(part)
            if is_reasoning(fields.get("thinking")):
                kind = max(kind, self._take_reasoning(choice))
            piece = as_text(fields.get("text"))
            if piece:
                kind = max(kind, self._take_text(choice, piece, now))
        return kind

    def _output_of(self, choice: Choice, delta: JsonObject, now: int) -> int:
        """Output that is neither text nor reasoning."""
        if has_tool_call(delta):
            return self._take_tool(choice, now)
        audio = as_object(delta.get("audio"))
        if as_text(delta.get("refusal")) or audio.get("data") or audio.get("transcript"):
            return self._take_visible(choice, now)
        return NOTHING

    def _scan(self, body: bytes, now: int) -> bool:
        finish = _SCAN_FINISH.search(body)
        if finish is not None:
            self._finish(0, finish.group(1).decode())
        if _SCAN_TEXT.search(body):
            self._token(self._take_visible(self._choice(), now), now)
        elif _SCAN_REASONING.search(body):
            self._token(self._take_reasoning(self._choice()), now)
        elif finish is None:
            return False
        return True


class CompletionsReader(ChatReader):
    """Text completion chunks: the text is in `choices[].text`, and there is no role chunk."""

    __slots__ = ()

    def _content_of(self, choice: Choice, raw: JsonObject, now: int) -> int:
        text = raw.get("text")
        return self._text_of(choice, text, now) if text else NOTHING


def has_tool_call(delta: JsonObject) -> bool:
    """A tool call, or the older function call, with a name or arguments."""
    for raw in as_list(delta.get("tool_calls")):
        call = as_object(raw)
        function = as_object(call.get("function") or call.get("custom"))
        if function.get("name") or function.get("arguments") or function.get("input"):
            return True
    function = as_object(delta.get("function_call"))
    return bool(function.get("name") or function.get("arguments"))


def is_reasoning(value: object) -> bool:
    """Reasoning that is not empty: a string, or a list of parts with text."""
    if isinstance(value, list):
        parts = [as_object(part) for part in value]
        return any(part.get("text") or part.get("summary") or part.get("data") for part in parts)
    return isinstance(value, str) and bool(value)


def _tokens_in(payload: JsonObject) -> int:
    """Tokens in the first token chunk: from running usage, token ids or logprobs where the caller asked for them."""
    usage = usage_of(payload.get("usage"))
    if usage is not None and usage.completion:
        return usage.completion
    total = 0
    for raw in as_list(payload.get("choices")):
        choice = as_object(raw)
        logprobs = as_object(choice.get("logprobs"))
        total += len(as_list(choice.get("token_ids")) or as_list(logprobs.get("content")))
    return total or 1

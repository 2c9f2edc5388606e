"""What an answer says about itself: usage, server times, errors, how it finished, and whether it was one at all.

Everything here reads JSON that a server sent, of any shape, and never raises: a field that is not what it should be
is unknown. The words for the end of an answer are OpenAI's for every API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import orjson

JsonObject = dict[str, object]
Number = TypeVar("Number", int, float)
Verdict = Literal["ok", "burnt_by_thinking", "empty", "misrouted"]

# A count above this is not a count; it also keeps sums inside what a float holds exactly.
MAX_COUNT = 2**53
# A finish word is a short identifier; what is longer is cut, since it ends up in logs.
MAX_WORD = 64


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer; None where the server did not say."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    reasoning: int | None = None

    @property
    def visible(self) -> int | None:
        """Completion less reasoning, never negative: some servers count one more token as reasoning (cases C091)."""
        return None if self.completion is None else max(0, self.completion - (self.reasoning or 0))


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """What the server measured for this request, in ms; None where it did not say.

    `prefill_ms` is scheduled → first token and does not hold the queue (upstream-contract §5).
    """

    queue_ms: float | None = None
    prefill_ms: float | None = None
    generation_ms: float | None = None


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error a server sent under status 200.

    `status` is 400 to 599 where the body tells it, else 0. `code` is the server's word or number, "" when absent.
    `data` are the bytes as they came.
    """

    status: int
    message: str
    code: str
    data: bytes


def as_object(value: object) -> JsonObject:
    """`value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[object]:
    """`value` if it is a JSON array, else an empty one."""
    return value if isinstance(value, list) else []


def as_text(value: object) -> str:
    """`value` if it is a string, else an empty one."""
    return value if isinstance(value, str) else ""


def lenient_loads(data: bytes) -> tuple[object, bool]:
    """The JSON value in `data` and whether it is sound; (None, False) when nothing can be read.

    orjson refuses NaN, infinities and lone surrogates; servers send them, so Python's reader is asked next (cases
    C047, C050). Invalid UTF-8 is read with replacements and is not sound.
    """
    try:
        return orjson.loads(data), True
    except ValueError:
        pass
    try:
        return json.loads(data), True  # noqa: TID251 - only what orjson refuses, and only to look at it
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(data.decode("utf-8", "replace")), False  # noqa: TID251 - the same
    except (ValueError, RecursionError):
        return None, False


def usage_of(raw: object) -> Usage | None:
    """`usage` in OpenAI's chat, OpenAI's Responses or Anthropic's form; None when it holds no count."""
    if type(raw) is not dict or not raw:
        return None
    fields: JsonObject = raw
    details_in = fields.get("prompt_tokens_details") or fields.get("input_tokens_details")
    details_out = fields.get("completion_tokens_details") or fields.get("output_tokens_details")
    cached = _count(details_in, "cached_tokens") if type(details_in) is dict else None
    reasoning = _count(details_out, "reasoning_tokens") if type(details_out) is dict else None
    if reasoning is None and "reasoning_tokens" in fields:
        reasoning = _count(fields, "reasoning_tokens")
    prompt = _first(_count(fields, "prompt_tokens"), _count(fields, "input_tokens"))
    completion = _first(_count(fields, "completion_tokens"), _count(fields, "output_tokens"))
    if "cache_read_input_tokens" in fields:
        read = _count(fields, "cache_read_input_tokens")
        cached = _first(cached, read)
        if prompt is not None:  # Anthropic's `input_tokens` are those that no cache read or wrote
            prompt += (read or 0) + (_count(fields, "cache_creation_input_tokens") or 0)
    if prompt is None and cached is None and completion is None and reasoning is None:
        return None
    return Usage(prompt, cached, completion, reasoning)


def usage_of_timings(raw: object) -> Usage | None:
    """Usage from llama.cpp's `timings`, which its last chunk carries even when no usage was asked for."""
    fields = as_object(raw)
    computed, cached = _count(fields, "prompt_n"), _count(fields, "cache_n")
    prompt = None if computed is None or cached is None else computed + cached
    found = Usage(prompt, cached, _count(fields, "predicted_n"))
    return None if found == Usage() else found


def server_times_of(metrics: object, timings: object = None) -> ServerTimes | None:
    """Times from vLLM's `metrics`, else from llama.cpp's `timings`."""
    fields, other = as_object(metrics), as_object(timings)
    found = ServerTimes(
        queue_ms=_ms(fields, "queue_time_ms"),
        prefill_ms=_first(_ms(fields, "time_to_first_token_ms"), _ms(other, "prompt_ms")),
        generation_ms=_first(_ms(fields, "generation_time_ms"), _ms(other, "predicted_ms")),
    )
    return None if found == ServerTimes() else found


# Words of Anthropic and OpenAI for errors that the caller made or that pass; other words leave the status unknown.
_STATUS_WORDS = {
    "invalid_request_error": 400, "authentication_error": 401, "permission_error": 403, "not_found_error": 404,
    "request_too_large": 413, "rate_limit_error": 429, "rate_limit_exceeded": 429, "overloaded_error": 529,
    "api_error": 500, "timeout_error": 504,
}  # fmt: skip


def error_of(payload: JsonObject, data: bytes, *, is_error_event: bool = False) -> StreamError | None:
    """The error in a payload, or None: `{"error": {…}}`, `{"error": "text"}`, flat, or of an `error` event."""
    error = payload.get("error")
    if isinstance(error, dict) and error:
        return _error_from(error, as_text(error.get("message")), data)
    if isinstance(error, str) and error:
        return _error_from(payload, error, data)
    if error or is_error_event or payload.get("object") == "error" or payload.get("type") == "error":
        return _error_from(payload, as_text(payload.get("message")), data)
    return None


def _error_from(fields: JsonObject, message: str, data: bytes) -> StreamError:
    status = 0
    for name in ("code", "status", "status_code"):
        status = status or _status(fields.get(name))
    words = [word for word in (fields.get("code"), fields.get("type")) if isinstance(word, str) and word]
    for word in words:
        status = status or _STATUS_WORDS.get(word, 0)
    code = fields.get("code")
    number = str(code) if isinstance(code, int) and not isinstance(code, bool) and abs(code) < MAX_COUNT else ""
    return StreamError(status, printable(message), printable(number or (words[0] if words else ""))[:MAX_WORD], data)


def _status(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) == 3:
        value = int(value)
    return value if isinstance(value, int) and 400 <= value <= 599 else 0


def printable(text: str) -> str:
    """The same text with lone surrogates replaced, so that it can be encoded (cases C050)."""
    return text.encode("utf-8", "replace").decode()


_FINISH_WORDS = {
    "end_turn": "stop", "stop_sequence": "stop", "pause_turn": "stop", "completed": "stop", "eos": "stop",
    "max_tokens": "length", "max_output_tokens": "length", "model_context_window_exceeded": "length",
    "incomplete": "length", "tool_use": "tool_calls", "refusal": "content_filter",
    "cancelled": "abort", "failed": "error",
}  # fmt: skip


def finish_word(word: str) -> str:
    """OpenAI's word for the end of an answer, whatever the API; unknown words stay as they are, cut to 64."""
    return _FINISH_WORDS.get(word) or printable(word[:MAX_WORD])


def judge(
    *,
    finish: str | None,
    has_output: bool,
    has_reasoning: bool,
    usage: Usage | None = None,
    max_tokens: int | None = None,
    is_thinking_off: bool = False,
) -> Verdict | None:
    """Whether one choice of a whole answer was an answer (latency-methods §4, "empty success").

    `has_output` is visible text, a refusal, audio or a tool call; `has_reasoning` is reasoning text. `usage` is that
    of this choice alone, None when it is not known. None: the server broke the answer off, there is nothing to judge.
    """
    if has_output or finish in ("tool_calls", "function_call"):
        return "ok"
    if finish in ("abort", "error"):
        return None
    if is_thinking_off and has_reasoning and finish == "stop":
        return "misrouted"
    completion, thought = (usage.completion, bool(usage.reasoning)) if usage is not None else (None, False)
    if completion is not None and max_tokens and completion >= 0.9 * max_tokens:
        return "burnt_by_thinking"
    if finish == "length" and (completion is None or not max_tokens):
        return "burnt_by_thinking"  # the budget is gone, and nothing says on what else
    if finish in (None, "length") and (has_reasoning or thought):
        return "burnt_by_thinking"
    return "empty"


def worst_of(verdicts: Mapping[int, Verdict]) -> Verdict | None:
    """The verdict of the first choice, by index, that is not ok; None when there is none at all."""
    found = [verdict for _, verdict in sorted(verdicts.items())]
    return next((verdict for verdict in found if verdict != "ok"), "ok" if found else None)


def split_thinking(text: str) -> tuple[str, str]:
    """A whole text as (thinking, answer): `<think>…</think>` at its start, or all before a closing tag without one.

    A tag that is mentioned in the middle of an answer is text (cases C088).
    """
    start = text.lstrip()
    if start.startswith("<think>"):
        thinking, _, answer = start[7:].partition("</think>")
        return thinking, answer
    thinking, close, answer = text.partition("</think>")
    if close and "<think>" not in thinking:
        return thinking, answer
    return "", text


def _count(fields: JsonObject, name: str) -> int | None:
    value = fields.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT:
        return value
    return None


def _ms(fields: JsonObject, name: str) -> float | None:
    value = fields.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT:
        return float(value)  # NaN and infinity fail the comparison
    return None


def _first(value: Number | None, other: Number | None) -> Number | None:
    return other if value is None else value

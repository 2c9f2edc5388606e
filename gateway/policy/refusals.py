"""What an upstream's 400 is about: did an edit of ours cause it? Only then is a request sent again without it.

Read is what the server says, never what it echoes: a validation error repeats the caller's input, and a prompt may
hold any word. Bodies are nested as vLLM's (`{"error": {"message", "param"}}`), flat as SGLang's and old vLLM's, or
FastAPI's `{"detail": [{"loc", "msg"}]}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import orjson

_STATUSES: Final = frozenset({400, 422})  # 422 is what strict FastAPI servers say to an unknown field
_MAX_TEXT: Final = 4096  # characters of a message; all known ones say what they mean in the first few hundred
_SWITCH: Final = re.compile(
    r"chat_template|enable_thinking|\bthinking(?:_mode|_budget)?\b|reasoning_effort|\breasoning\b(?!-parser)|output_config|\bkwargs?\b"
)
_CONTEXT: Final = re.compile(
    r"context[ _](?:length|size|window)|max_model_len|max_(?:completion_|output_|total_)?tokens|too many tokens"
    r"|(?:prompt|input|request) is too (?:long|large)|maximum (?:\w+ )?length"
)
_USAGE: Final = re.compile(r"stream_options|include_usage")
_ECHO: Final = re.compile(r"'input':.*?(?='type':|$)", re.DOTALL)  # pydantic's errors, printed as text


def is_switch_rejected(status: int, body: bytes) -> bool:
    """True if the server refuses the keys that switch thinking (C086)."""
    return _is_about(_SWITCH, status, body)


def is_context_overflow(status: int, body: bytes) -> bool:
    """True if prompt and token budget together are more than the model takes, or the budget alone is (C092)."""
    return _is_about(_CONTEXT, status, body)


def is_usage_rejected(status: int, body: bytes) -> bool:
    """True if the server refuses `stream_options` (C096)."""
    return _is_about(_USAGE, status, body)


def _is_about(pattern: re.Pattern[str], status: int, body: bytes) -> bool:
    return status in _STATUSES and any(pattern.search(text.lower()) is not None for text in _sayings(body))


def _sayings(body: bytes) -> Iterator[str]:
    """The texts in which an error body says what is wrong."""
    try:
        payload: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        yield body[:_MAX_TEXT].decode("utf-8", "replace")
        return
    if not isinstance(payload, Mapping):
        return
    error = payload.get("error", payload)
    detail = payload.get("detail")
    if isinstance(error, Mapping):
        yield from (_own_words(text) for key in ("message", "param") if isinstance(text := error.get(key), str))
    for item in (error, detail):
        if isinstance(item, str):
            yield _own_words(item)
    for entry in detail if isinstance(detail, list) else ():
        if isinstance(entry, Mapping):
            yield f"{entry.get('loc')} {entry.get('msg')}"[:_MAX_TEXT]


def _own_words(text: str) -> str:
    return _ECHO.sub("", text[:_MAX_TEXT])

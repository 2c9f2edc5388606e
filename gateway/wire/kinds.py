"""Which path of the data plane carries which kind of request.

Paths are canonical: no route prefix, no double or trailing slash. What is not listed is not the data plane: the
servers' admin endpoints above all (`/sleep`, `/reset_prefix_cache`, `/v1/load_lora_adapter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

# chat to messages generate text and have rules of their own; embeddings and opaque are passed on, by JSON or not.
Kind = Literal["chat", "completions", "responses", "messages", "embeddings", "opaque"]

GENERATING: Final[frozenset[Kind]] = frozenset({"chat", "completions", "responses", "messages"})

JSON_KINDS: Final[frozenset[Kind]] = GENERATING | {"embeddings"}  # those whose bodies are read

DATA_PLANE_PATHS: Final[Mapping[str, Kind]] = MappingProxyType({
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "opaque",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/v1/rerank": "opaque",
    "/v2/rerank": "opaque",
    "/rerank": "opaque",
    "/v1/score": "opaque",
    "/score": "opaque",
    "/v1/classify": "opaque",
    "/classify": "opaque",
    "/v1/pooling": "opaque",
    "/pooling": "opaque",
    "/v1/moderations": "opaque",
    "/v1/audio/transcriptions": "opaque",
    "/v1/audio/translations": "opaque",
    "/v1/audio/speech": "opaque",
    "/v1/images/generations": "opaque",
    "/tokenize": "opaque",
    "/detokenize": "opaque",
})  # fmt: skip


def kind_of(path: str) -> Kind | None:
    """The kind of request that a canonical path takes; None if it is not of the data plane."""
    return DATA_PLANE_PATHS.get(path)

"""Which software answers behind an upstream, and what follows from that (upstream-contract §9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from gateway.wire.answer import JsonObject, as_list, as_object, as_text

Engine = Literal["vllm", "sglang", "llamacpp", "ollama", "openai"]
"""`openai` is anything that speaks the API and cannot be told apart."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about one engine's server."""

    wants_usage: bool
    """`stream_options.include_usage` has to be added for token counts, and is known to be understood."""
    has_early_headers: bool
    """A stream's headers come before the first token: their time says nothing about the queue."""
    keep_alive_s: float
    """How long the server keeps an idle connection."""
    metrics_prefix: str
    """Prefix of its names on `/metrics`; "" when it has none."""
    ready_path: str
    """Path whose 200 says that requests are served, without making the engine work."""
    ends_errors_with_done: bool
    """After an error inside a stream it still sends `[DONE]`."""


FACTS: MappingProxyType[Engine, EngineFacts] = MappingProxyType({
    "vllm": EngineFacts(True, True, 5, "vllm:", "/health", True),
    # `/health` of SGLang generates a token and takes a second.
    "sglang": EngineFacts(True, False, 5, "sglang:", "/ready", True),
    # Its last chunk carries `timings` with the counts. Asking for usage would move them into the chunk that is
    # taken out again, and callers such as Open WebUI read them.
    "llamacpp": EngineFacts(False, False, 5, "llamacpp:", "/health", False),
    "ollama": EngineFacts(True, False, 5, "", "/", False),
    # Strict or old servers refuse the field with 400 (cases C096), so it is not added on a guess.
    "openai": EngineFacts(False, False, 5, "", "/v1/models", False),
})  # fmt: skip

_OWNERS: dict[str, Engine] = {
    "vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "library": "ollama", "ollama": "ollama",
}  # fmt: skip


def detect_engine(models_payload: object, headers: Iterable[tuple[bytes, bytes]] = ()) -> Engine:
    """The engine, from the body of `/v1/models` and that response's headers; `openai` when nothing tells."""
    payload: JsonObject = as_object(models_payload)
    for raw in as_list(payload.get("data")):
        owner = as_text(as_object(raw).get("owned_by")).lower()
        if owner in _OWNERS:
            return _OWNERS[owner]
    for name, value in headers:
        if name.lower() == b"server" and b"llama.cpp" in value.lower():
            return "llamacpp"
    return "openai"


def wants_usage(engine: Engine) -> bool:
    """Whether usage has to be asked for in a stream of this engine (`include_usage: auto`)."""
    return FACTS[engine].wants_usage

"""How each engine writes an answer that is not streamed: keys, their order, and what stands where nothing was said.

A stream leaves out much of that. The tables are of vLLM 0.32 (`chat_completion/protocol.py`, `completion/protocol.py`
and a running server), SGLang's `serving_chat.py`, a running llama.cpp, and Ollama's `openai/openai.go`. Other versions
of vLLM have a few more or fewer keys that are null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal

from gateway.wire.engines import Engine


class Absent(Enum):
    """The only value of this type stands for a key that is written only when there is something to write."""

    ABSENT = 0


ABSENT: Final = Absent.ABSENT


@dataclass(frozen=True, slots=True)
class Shape:
    """An object's keys in order with what stands there if nothing was said, and the shapes of objects inside."""

    fields: tuple[tuple[str, object], ...]
    inner: Mapping[str, Shape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """The answers of one engine to one kind of request."""

    word: str
    """Value of `object`."""
    top: Shape
    choice: Shape
    message: Shape = Shape(())
    call: Shape = Shape(())
    unsaid: str = ""
    """What a plain answer says and a stream does not; with such an engine nothing can be assembled faithfully."""
    empty_content: Literal["", "null", "vllm"] = ""
    """`content` without text: the empty string, null, or by vLLM's rules (`assemble_chat.py`)."""
    has_vllm_finish: bool = False
    """`finish_reason` of tool calls differs between streams and plain answers as it does in vLLM."""
    has_several_choices: bool = False
    has_echo: bool = False
    has_tools: bool = True
    has_call_index: bool = False
    """Calls keep the `index` that streams need."""


def arrange(shape: Shape, found: Mapping[str, object]) -> dict[str, object]:
    """`found` in the shape's order, with what stands where nothing was said; keys it does not know come last."""
    arranged: dict[str, object] = {}
    for key, default in shape.fields:
        if key in found:
            arranged[key] = found[key]
        elif default is not ABSENT:
            arranged[key] = default
    arranged.update((key, value) for key, value in found.items() if key not in arranged)
    for key, inner in shape.inner.items():
        value = arranged.get(key)
        if isinstance(value, dict):
            arranged[key] = arrange(inner, value)
    return arranged


def _shape(said: str, **defaults: object) -> Shape:
    """Keys in the order of `said`; those among the defaults stand there always."""
    return Shape(tuple((key, defaults.get(key, ABSENT)) for key in said.split()))


def _nulls(said: str, *nulls: str) -> Shape:
    return _shape(said, **dict.fromkeys(nulls))


_FUNCTION = _shape("name arguments", name="", arguments="")
_CALL = Shape(_shape("id type function", type="function").fields, {"function": _FUNCTION})

_VLLM_USAGE = Shape(
    _nulls(
        "prompt_tokens total_tokens completion_tokens prompt_tokens_details completion_tokens_details",
        "prompt_tokens_details", "completion_tokens_details",
    ).fields,
    {"prompt_tokens_details": _shape(
        "cached_tokens created_cache_tokens multimodal_tokens",
        cached_tokens=None, created_cache_tokens=None, multimodal_tokens=None,
    )},
)  # fmt: skip
_VLLM_METRICS = _shape(
    "time_to_first_token_ms generation_time_ms queue_time_ms mean_itl_ms tokens_per_second speculative_decoding",
    **dict.fromkeys((
        "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
        "speculative_decoding",
    )),
)  # fmt: skip
_VLLM_INNER = {"usage": _VLLM_USAGE, "metrics": _VLLM_METRICS}

_VLLM_CHAT = Layout(
    word="chat.completion",
    top=Shape(
        _nulls(
            "id object created model choices service_tier system_fingerprint usage prompt_logprobs prompt_token_ids "
            "prompt_text kv_transfer_params ec_transfer_params metrics",
            "service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", "prompt_text",
            "kv_transfer_params", "ec_transfer_params", "metrics",
        ).fields,
        _VLLM_INNER,
    ),
    choice=_nulls(
        "index message logprobs finish_reason stop_reason token_ids routed_experts",
        "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts",
    ),
    message=_shape(
        "role content refusal annotations audio function_call tool_calls reasoning",
        role="assistant", content=None, refusal=None, annotations=None, audio=None, function_call=None, reasoning=None,
    ),
    call=_CALL,
    empty_content="vllm",
    has_vllm_finish=True,
    has_several_choices=True,
)  # fmt: skip

_VLLM_COMPLETIONS = Layout(
    word="text_completion",
    top=Shape(
        _nulls(
            "id object created model choices service_tier system_fingerprint usage kv_transfer_params "
            "ec_transfer_params metrics",
            "service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics",
        ).fields,
        _VLLM_INNER,
    ),
    choice=_nulls(
        "index text logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids routed_experts",
        "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids",
        "routed_experts",
    ),
    has_several_choices=True,
    has_echo=True,
)  # fmt: skip

_SGLANG_UNSAID = "`metadata.weight_version`, and top log probabilities of chunks with several tokens"
_SGLANG_CHAT = Layout(
    word="chat.completion",
    top=_shape("id object created model choices usage metadata"),
    choice=_nulls("index message logprobs finish_reason matched_stop", "logprobs", "finish_reason", "matched_stop"),
    message=_shape(
        "role content reasoning_content tool_calls",
        role="assistant", content="", reasoning_content=None, tool_calls=None,
    ),
    call=Shape(_shape("id index type function", type="function").fields, {"function": _FUNCTION}),
    unsaid=_SGLANG_UNSAID,
    has_call_index=True,
)  # fmt: skip
_SGLANG_COMPLETIONS = Layout(
    word="text_completion",
    top=_shape("id object created model choices usage metadata"),
    choice=_nulls("index text logprobs finish_reason matched_stop", "logprobs", "finish_reason", "matched_stop"),
    unsaid=_SGLANG_UNSAID,
)

_LLAMA_TOP = _shape("choices created model system_fingerprint object usage id timings")
_LLAMA_CHAT = Layout(
    word="chat.completion",
    top=_LLAMA_TOP,
    choice=_shape("finish_reason index message logprobs"),
    message=_shape("role content reasoning_content tool_calls", role="assistant", content=""),
    call=Shape(_shape("type function id", type="function").fields, {"function": _FUNCTION}),
    has_several_choices=True,
    has_tools=False,  # its two ways of writing a message with calls were not compared
)
_LLAMA_COMPLETIONS = Layout(
    word="text_completion",
    top=_LLAMA_TOP,
    choice=_nulls("text index logprobs finish_reason", "logprobs"),
    has_several_choices=True,
)

_OLLAMA_TOP = _shape("id object created model system_fingerprint choices usage")
_OLLAMA_CHAT = Layout(
    word="chat.completion",
    top=_OLLAMA_TOP,
    choice=_shape("index message finish_reason logprobs", finish_reason=None),
    message=_shape("role content reasoning tool_calls", role="assistant", content=""),
    call=Shape(_shape("id index type function", type="function").fields, {"function": _FUNCTION}),
    has_call_index=True,
)
_OLLAMA_COMPLETIONS = Layout(
    word="text_completion",
    top=_OLLAMA_TOP,
    choice=_shape("text index finish_reason logprobs", finish_reason=None),
)

_UNKNOWN = "whatever the unknown server writes, and usage, which it may refuse to be asked for"
_OTHER_CHAT = Layout(
    word="chat.completion",
    top=_shape("id object created model choices usage service_tier system_fingerprint"),
    choice=_nulls("index message logprobs finish_reason", "logprobs", "finish_reason"),
    message=_shape("role content refusal tool_calls", role="assistant", content=None, refusal=None),
    call=_CALL,
    unsaid=_UNKNOWN,
    empty_content="null",
)
_OTHER_COMPLETIONS = Layout(
    word="text_completion",
    top=_shape("id object created model choices usage system_fingerprint"),
    choice=_nulls("text index logprobs finish_reason", "logprobs", "finish_reason"),
    unsaid=_UNKNOWN,
)

AssembledKind = Literal["chat", "completions"]

LAYOUTS: Final[Mapping[tuple[Engine, AssembledKind], Layout]] = MappingProxyType({
    ("vllm", "chat"): _VLLM_CHAT,
    ("vllm", "completions"): _VLLM_COMPLETIONS,
    ("sglang", "chat"): _SGLANG_CHAT,
    ("sglang", "completions"): _SGLANG_COMPLETIONS,
    ("llamacpp", "chat"): _LLAMA_CHAT,
    ("llamacpp", "completions"): _LLAMA_COMPLETIONS,
    ("ollama", "chat"): _OLLAMA_CHAT,
    ("ollama", "completions"): _OLLAMA_COMPLETIONS,
    ("openai", "chat"): _OTHER_CHAT,
    ("openai", "completions"): _OTHER_COMPLETIONS,
})  # fmt: skip


def layout_of(kind: str, engine: str) -> Layout | None:
    """The layout of an engine's answers to this kind of request; None for a kind or an engine without one."""
    for (known, of_kind), layout in LAYOUTS.items():
        if known == engine and of_kind == kind:
            return layout
    return None

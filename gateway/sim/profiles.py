"""What a simulated server is like: one frozen `Profile`, and the ready-made ones.

Durations are seconds, rates tokens per second; `math.inf` means "takes no time". Nothing here runs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

EngineKind = Literal["vllm", "llamacpp"]
ReasoningField = Literal["reasoning", "reasoning_content", "both", "inline", "inline_unopened"]

VLLM_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Profile:
    """One model server: its speed, its capacity, its model's habits and its dialect on the wire."""

    name: str
    models: tuple[str, ...]  # served names; "*" takes any name
    engine: EngineKind = "vllm"
    version: str = "0.33.0"

    # Speed
    render_s: float = 0.0  # chat template and tokenizer: spent before the headers
    overhead_s: float = 0.0  # constant part of the first token, not shared between requests
    prefill_tokens_per_s: float = math.inf  # of tokens that the prefix cache does not hold; one request at a time
    decode_tokens_per_s: float = math.inf  # per stream
    jit_first_call_s: float = 0.0  # extra time of the first request after a start
    jit_new_shape_s: float = 0.0  # extra time whenever the uncached prompt reaches a new power of two
    jitter: float = 0.0  # each step takes 1 ± jitter times its time, seeded

    # Capacity
    slots: int = 256  # max_num_seqs; the rest waits, first come first served
    max_queued: int | None = None  # unfinished requests beyond which 503 is answered; None: no limit, as vLLM
    max_model_len: int = 32768
    context_overflow: Literal["clamp", "refuse"] = "clamp"  # prompt + max_tokens too long: vLLM 0.32+, or before
    prefix_cache: bool = True
    cache_blocks: int = 8192
    block_tokens: int = 16

    # Thinking
    thinking: bool = False  # when nobody switches
    thinking_tokens: tuple[int, int] = (200, 400)
    switch_keys: tuple[str, ...] = ("thinking", "enable_thinking")  # what the prompt reads; () cannot be switched
    parser_keys: tuple[str, ...] | None = None  # what the reasoning parser reads; None: the same
    switch_at: Literal["start", "end"] = "end"  # where the switch alters the prompt: at the start nothing is shared
    efforts: tuple[str, ...] = VLLM_EFFORTS  # others are refused with 400
    rejects_kwargs: bool = False  # any chat_template_kwargs is a 400, as with Mistral's tokenizer
    reasoning_field: ReasoningField = "reasoning"
    lead: str = "\n\n"  # blank content between the thoughts and the answer

    # Answers
    answer_tokens: tuple[int, int] = (12, 40)
    calls_tools: bool = False  # calls the first tool also when tool_choice is "auto"

    # Wire
    early_headers: bool = True  # False: with the first token, as SGLang and llama.cpp
    include_usage: bool = True  # False: stream_options.include_usage is ignored, as old servers do
    force_usage: bool = False  # --enable-force-include-usage
    per_request_metrics: bool = True  # --enable-per-request-metrics
    shows_cached_tokens: bool = True  # --enable-prompt-tokens-details
    request_id_headers: bool = False  # --enable-request-id-headers
    comment_interval_s: float = 0.0  # --sse-keep-alive-interval; 0: off
    keep_alive_s: float = 5.0  # idle connections are closed after this; uvicorn's and vLLM's default
    embeddings: bool = True

    def scaled(self, factor: float) -> Profile:
        """The same server, `factor` times as fast in everything but its keep-alive."""
        if not factor > 0:
            raise ValueError(f"speed factor must be above 0, got {factor}")
        return dataclasses.replace(
            self,
            render_s=self.render_s / factor,
            overhead_s=self.overhead_s / factor,
            prefill_tokens_per_s=self.prefill_tokens_per_s * factor,
            decode_tokens_per_s=self.decode_tokens_per_s * factor,
            jit_first_call_s=self.jit_first_call_s / factor,
            jit_new_shape_s=self.jit_new_shape_s / factor,
        )

    def with_fields(self, **changes: object) -> Profile:
        """A copy with other values; TypeError for a name that is no field."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def with_text(self, assignment: str) -> Profile:
        """A copy with `NAME=VALUE` set, the value read as the field's type; ValueError says what is wrong."""
        name, given, text = assignment.partition("=")
        hints = get_type_hints(Profile)
        if not given or name not in hints:
            raise ValueError(f"`{assignment}` is not NAME=VALUE with one of: {', '.join(hints)}")
        try:
            return self.with_fields(**{name: _read(hints[name], text)})
        except ValueError as error:
            raise ValueError(f"`{name}`: {error}") from None

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models: at least one name is needed")
        for name in ("slots", "block_tokens", "max_model_len", "prefill_tokens_per_s", "decode_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        for name in ("thinking_tokens", "answer_tokens"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"{name} must be two counts, the smaller first")
        if not 0 <= self.jitter < 1:
            raise ValueError("jitter must be at least 0 and below 1")


def _read(hint: object, text: str) -> object:
    """`text` as a value of the type `hint`: a number, a switch, a word of a closed set, or a list with commas."""
    options = get_args(hint)
    if type(None) in options:
        return None if text in ("", "none", "null") else _read(next(o for o in options if o is not type(None)), text)
    if hint is bool:
        if text.lower() not in _SWITCHES:
            raise ValueError(f"one of {', '.join(_SWITCHES)}")
        return _SWITCHES[text.lower()]
    if get_origin(hint) is Literal:
        if text not in options:
            raise ValueError(f"one of {', '.join(options)}")
        return text
    if get_origin(hint) is tuple:
        return tuple(options[0](part.strip()) for part in text.split(",") if part.strip())
    return int(text) if hint is int else float(text) if hint is float else text


_SWITCHES = {"on": True, "off": False, "true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}

FAST = Profile(name="fast", models=("fast",), answer_tokens=(16, 16), slots=100_000)

# The seed experiment. With 27.8 tok/s, 1,252 thinking tokens and a thirty-character answer it takes
# 0.67 s + 1,284 / 27.8 = 46.86 s, without thinking 0.67 s + 30 / 27.8 = 1.75 s.
DEEPSEEK_V4 = Profile(
    name="deepseek-v4",
    models=("deepseek-v4",),
    overhead_s=0.665,
    prefill_tokens_per_s=8_000,
    decode_tokens_per_s=27.8,
    slots=32,
    max_model_len=131_072,
    thinking=True,
    thinking_tokens=(1252, 1252),
    switch_at="start",
    answer_tokens=(30, 30),
)

DEMO = dataclasses.replace(DEEPSEEK_V4.scaled(10), name="demo")

QWEN3 = Profile(
    name="qwen3",
    models=("qwen3",),
    overhead_s=0.05,
    prefill_tokens_per_s=12_000,
    decode_tokens_per_s=60,
    slots=64,
    max_model_len=40_960,
    thinking=True,
    thinking_tokens=(250, 700),
    switch_keys=("enable_thinking",),
    answer_tokens=(20, 80),
    jitter=0.05,
)

LLAMACPP = Profile(
    name="llamacpp",
    models=("llamacpp",),
    engine="llamacpp",
    version="b9700",
    overhead_s=0.02,
    prefill_tokens_per_s=900,
    decode_tokens_per_s=35,
    slots=4,
    max_model_len=8192,
    context_overflow="refuse",
    thinking=True,
    thinking_tokens=(80, 200),
    switch_keys=("enable_thinking",),
    reasoning_field="reasoning_content",
    lead="",
    answer_tokens=(20, 60),
    early_headers=False,
    per_request_metrics=False,
    jitter=0.05,
)

PROFILES: dict[str, Profile] = {profile.name: profile for profile in (FAST, DEEPSEEK_V4, DEMO, QWEN3, LLAMACPP)}

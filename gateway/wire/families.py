"""Model families: which key each one's chat template listens to, and what switches its thinking off and on.

One row per row of the servers' sources (vLLM 0.33, SGLang 0.5; [2nd] where only documentation or a vendor's recipe
says so). Two things go wrong when a key is missing or is sent to the wrong model: parser off and template on lets the
whole chain of thought leak into `content`; parser on and template off puts the whole answer into `reasoning`. So:

- Hybrids get both `thinking` and `enable_thinking` with the same value. Templates drop the key that they do not know,
  and the presence of `enable_thinking` stops vLLM from deriving it from `reasoning_effort`.
- Models that always think get nothing: `false` would switch off their parser only.

Rows are in the order in which model names are tried: a special name before the general one it contains.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TypeAlias

Default = Literal["on", "off", "model"]  # what happens without a switch; `model`: it depends on the checkpoint
Pairs: TypeAlias = tuple[tuple[str, str | int | bool], ...]

_OFF: Final[Pairs] = (("thinking", False), ("enable_thinking", False))
_ON: Final[Pairs] = (("thinking", True), ("enable_thinking", True))
_BOTH: Final = ("thinking", "enable_thinking")
_NO_THINK: Final[Pairs] = (("reasoning_effort", "no_think"),)


@dataclass(frozen=True, slots=True)
class Family:
    """One row. `off` and `on` go into `chat_template_kwargs`; `off_effort` is the API's own effort field."""

    name: str  # what `family:` takes
    parsers: tuple[str, ...] = ()  # vLLM's --reasoning-parser names; `family:` takes these too
    models: str = ""  # regular expression over the lower-case model name without its directory; empty: never guessed
    listens_to: tuple[str, ...] = ()  # template keys that decide, to understand what a caller asked for
    default: Default = "on"
    can_switch: bool = True  # thinking can be switched off
    off: Pairs = ()
    on: Pairs = ()
    off_effort: str | None = None  # effort to send for "off": `none`, or the least there is
    efforts: tuple[str, ...] = ()  # values its effort field takes, where others are answered 400; empty: all or unknown
    sglang_default: Default | None = None  # where SGLang's differs
    is_effort_its_own: bool = False  # the effort words are not the API's, so those must not be sent along
    note: str = ""  # what an operator should know; also the reason when "off" cannot be had


def _hybrid(
    name: str,
    parsers: tuple[str, ...],
    models: str,
    listens_to: tuple[str, ...],
    default: Default = "on",
    note: str = "",
) -> Family:
    """A family switched by both keys."""
    return Family(name, parsers, models, listens_to, default, off=_OFF, on=_ON, note=note)


def _always(name: str, parsers: tuple[str, ...], models: str, note: str) -> Family:
    """A family that thinks whatever is sent."""
    return Family(name, parsers, models, can_switch=False, note=note)


UNKNOWN: Final = _hybrid(
    "unknown", (), "", _BOTH, "model", "the family is not known; set `family:` if thinking goes on"
)

FAMILIES: Final[tuple[Family, ...]] = (
    _always(
        "deepseek_r1", ("deepseek_r1",),
        r"deepseek-?r1|\br1-|\bqwq\b|qwen-?3.*(?<!no)(?<!non-)thinking|\bstep-?5",
        "DeepSeek R1, its distills, QwQ, Qwen3-*-Thinking and Step-5 always think",
    ),
    _hybrid(
        "deepseek_v31", ("deepseek_v3",), r"deepseek.*v3\.?1", ("thinking",), "off",
        "`enable_thinking` or an effort alone switches the parser on but not the template",
    ),
    _hybrid("deepseek_v32", ("deepseek_v3", "deepseek_v32"), r"deepseek.*v3\.?2", _BOTH, "off"),
    Family(
        "deepseek_v41", ("deepseek_v41",), r"deepseek.*v4\.?1", _BOTH, off=_OFF, on=_ON,
        efforts=("none", "low", "high", "xhigh", "max"),
        note="other efforts are answered 400; on and off share no prefix cache",
    ),
    Family(
        "deepseek_v4", ("deepseek_v4",), r"deepseek.*v4", _BOTH, off=_OFF, on=_ON,
        sglang_default="off", note="off only if no present key is true; on and off share no prefix cache",
    ),
    _hybrid("qwen3", ("qwen3",), r"qwen-?3", ("enable_thinking",), note="`thinking: false` alone does nothing"),
    _always("glm53", (), r"glm-?5\.3", "GLM-5.3 always thinks; it has efforts only"),
    _hybrid(
        "glm45", ("glm45", "glm47"), r"glm-?(4\.[5-9]|5)", ("enable_thinking",),
        note="`thinking: false` alone turns off only the parser: thoughts leak into the answer",
    ),
    _always(
        "kimi_k2_thinking", ("kimi_k2",), r"kimi-?k2.*thinking",
        "Kimi-K2-Thinking always thinks; `false` would only make its thoughts leak into the answer",
    ),
    _hybrid("kimi_k25", ("kimi_k2",), r"kimi-?k2[.p][5-9]", ("thinking",), note="the key is the vendor's [2nd]"),
    Family(
        "kimi_k3", ("kimi_k3",), r"kimi-?k3", _BOTH, off=_OFF, on=_ON, efforts=("none", "low", "high", "max"),
        note="other efforts are answered 400",
    ),
    _always("minimax_m2", ("minimax_m2", "minimax_m2_append_think"), r"minimax-?m2", "MiniMax M2 always thinks"),
    Family(
        "minimax_m3", ("minimax_m3",), r"minimax-?m3", ("thinking_mode",), "model",
        off=(("thinking_mode", "disabled"),), on=(("thinking_mode", "enabled"),), note="adaptive by default [2nd]",
    ),
    Family(
        "gpt_oss", ("openai_gptoss", "gptoss", "gpt-oss"), r"gpt-?oss", can_switch=False, off_effort="low",
        efforts=("low", "medium", "high"), note="gpt-oss cannot stop thinking: the least effort is asked for instead",
    ),
    _hybrid("gemma4", ("gemma4",), r"gemma-?4", ("enable_thinking",), "off"),
    _hybrid("granite32", ("granite",), r"granite-?3\.[23]", ("thinking",), "off"),
    _hybrid("granite42", ("granite_thinking_parser",), r"granite-?4\.2", ("enable_thinking",)),
    _hybrid("nemotron3", ("nemotron_v3", "nemotron_3"), r"nemotron-?3", ("enable_thinking",)),
    _hybrid("hunyuan_a13b", ("hunyuan_a13b",), r"hunyuan-?a13b", ("enable_thinking",)),
    Family(
        "hunyuan_v3", ("hy_v3",), r"(hunyuan|\bhy)-?v?3\b", ("reasoning_effort",), "off", off=_NO_THINK,
        on=(("reasoning_effort", "high"),), is_effort_its_own=True, note="only the template argument takes `no_think`",
    ),
    Family(
        "hunyuan_v4", ("hy_v4",), r"(hunyuan|\bhy)-?v?4\b", ("reasoning_effort",), "on", off=_NO_THINK,
        on=(("reasoning_effort", "high"),), is_effort_its_own=True, note="only the template argument takes `no_think`",
    ),
    Family(
        "mistral", ("mistral",), r"mistral|magistral|ministral|devstral|codestral|pixtral|voxtral", default="model",
        can_switch=False, note="Mistral's tokenizer refuses every template argument with 400; the model decides",
    ),
    Family(
        "seed_oss", ("seed_oss",), r"seed-?oss", ("enable_thinking", "thinking_budget"),
        off=(("thinking_budget", 0), ("enable_thinking", False)), on=(("enable_thinking", True),),
        note="the template reads `thinking_budget` [2nd], the parser `enable_thinking`",
    ),
    _hybrid("ernie45", ("ernie45",), r"ernie-?4\.5", _BOTH, note="which key it reads is not verified"),
    _hybrid(
        "mimo", ("mimo", "plamo3", "minicpmv"), r"\bmimo\b|plamo-?3|minicpm-?v-?4", ("enable_thinking",),
        note="MiMo, PLaMo 3, MiniCPM-V 4; the bundled template of MiniCPM-V 4.5 has it off",
    ),
    _hybrid("ling3", ("ling3",), r"\bling-?3", _BOTH, note="which key it reads is not verified"),
    _hybrid("holo2", ("holo2",), r"\bholo-?2", ("thinking",)),
    _hybrid("poolside", ("poolside_v1",), r"\blaguna", ("enable_thinking",), "off", "on by default in Laguna S-2.1"),
    _always("step3", ("step3", "step3p5", "olmo3"), r"\bstep-?3|olmo-?3.*think", "Step-3 and Olmo 3 always think"),
    Family(
        "k2_horizon", ("k2_horizon",), r"\bk2-?horizon", ("reasoning_effort",), can_switch=False, off_effort="low",
        efforts=("low", "medium", "high"),
        note="K2 Horizon cannot stop thinking: the least effort is asked for instead",
    ),
    Family("inkling", ("inkling",), r"\binkling", ("reasoning_effort",), off_effort="none"),
    Family(
        "cohere", ("cohere_command3", "cohere_command4"), r"command-?(a|r|3|4)\b", ("reasoning_type",),
        default="model", off=(("reasoning_type", "disabled"),), on=(("reasoning_type", "enabled"),),
        note="booleans are ignored",
    ),
    _hybrid("hf", ("hf", "beam"), "", ("enable_thinking",), note="the model's own template says what it reads"),
)  # fmt: skip

FAMILY_NAMES: Final[frozenset[str]] = frozenset(
    name for family in (*FAMILIES, UNKNOWN) for name in (family.name, *family.parsers)
)

_PATTERNS: Final = tuple((re.compile(family.models), family) for family in FAMILIES if family.models)


@lru_cache(maxsize=1024)  # model names come from callers; forgetting one costs a few microseconds
def guess_family(model: str) -> Family:
    """The family by the model's name, `UNKNOWN` if the name says nothing."""
    name = model.lower().rstrip("/").rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-")
    return next((family for pattern, family in _PATTERNS if pattern.search(name)), UNKNOWN)


@lru_cache(maxsize=1024)
def find_family(setting: str, model: str) -> Family:
    """The family that `family: setting` means for a model; `auto` guesses.

    A parser's name may stand for several rows (`kimi_k2`); then the model's name decides, else the first row, which is
    the one that sends less. A name that is not in FAMILY_NAMES gives `UNKNOWN`; the settings check says so.
    """
    if setting == "auto":
        return guess_family(model)
    found = [family for family in FAMILIES if setting == family.name or setting in family.parsers]
    guess = guess_family(model)
    return guess if guess in found else found[0] if found else UNKNOWN

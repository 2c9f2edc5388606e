"""How many tokens an answer may have: default, floor and ceiling over the field names of all APIs (spec.md §4).

The field that the caller used is the one that is edited, and if there are two they never end up different. The floor
is for thinking models: a small budget there is spent before the first visible word, and the answer is an empty
"success". It leaves probes and classifiers alone, which ask for few tokens on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.config import MaxTokens, Upstream
from gateway.wire.families import Family
from gateway.wire.kinds import Kind
from gateway.wire.thinking import may_think

INTENTIONAL: Final = 16  # so few tokens are asked for on purpose, such as Dify's probe with 5 (C094)

_ENDLESS_BELOW_ZERO: Final = frozenset({"llamacpp", "ollama"})  # -1 asks them for tokens without end; vLLM refuses it
_OLLAMA_FIELD: Final = "max_tokens"  # the only one that it knows

# In the order in which servers take them: vLLM and SGLang prefer `max_completion_tokens` when both are there.
_FIELDS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
}


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """`fields` get `value`; no fields: nothing to do. `value` is what the server will go by, None if not known."""

    value: int | None
    fields: tuple[str, ...] = ()
    was: int | None = None  # the value that is replaced; None: there was none
    is_raised: bool = False  # the caller asked for less, or named no number: prompt and budget may now be too much


def has_rules(rules: MaxTokens) -> bool:
    """False for a route that leaves token budgets alone."""
    return rules.default is not None or rules.floor is not None or rules.ceiling is not None


def caller_value(data: dict[str, object], engine: str, kind: Kind) -> int | None:
    """The budget that the request itself sets, by the field that the engine goes by."""
    present = _present(data, engine, kind)
    return whole_number(data[present[0]]) if present else None


def plan_max_tokens(
    rules: MaxTokens,
    data: dict[str, object],
    *,
    upstream: Upstream,
    engine: str,
    kind: Kind,
    family: Family,
    allow_raise: bool,
) -> TokenPlan:
    """What the rules make of the request. Values that are no whole numbers are left for the upstream to judge."""
    present = _present(data, engine, kind)
    own = whole_number(data[present[0]]) if present else None
    if present and own is None:
        return TokenPlan(None)
    value = own if present else _value_when_absent(rules, kind) if allow_raise else None
    if value is None:
        return TokenPlan(None)
    if allow_raise and rules.floor is not None and INTENTIONAL < value < rules.floor and not _wants_few(data):
        value = rules.floor if may_think(family, data, engine, kind) else value
    if rules.ceiling is not None:
        value = rules.ceiling if value < 0 and engine in _ENDLESS_BELOW_ZERO else min(value, rules.ceiling)
    if own is None:
        return TokenPlan(value, (_field_to_add(upstream, engine, kind),), is_raised=True)
    fields = present if engine != "ollama" or kind != "chat" else tuple(dict.fromkeys((_OLLAMA_FIELD, *present)))
    wrong = tuple(name for name in fields if _is_editable(data.get(name)) and whole_number(data.get(name)) != value)
    was = next((number for name in wrong if (number := whole_number(data.get(name))) is not None), None)
    return TokenPlan(value, wrong, was, is_raised=value > own)


def whole_number(value: object) -> int | None:
    """The value as an int if it is a whole number in some spelling (5, 5.0, 1e5), else None. A boolean is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _present(data: dict[str, object], engine: str, kind: Kind) -> tuple[str, ...]:
    """The fields that are set, the one that counts first; null counts as absent."""
    present = [name for name in _FIELDS.get(kind, ()) if data.get(name) is not None]
    if len(present) > 1 and engine == "ollama":
        present.reverse()
    return tuple(present)


def _value_when_absent(rules: MaxTokens, kind: Kind) -> int | None:
    """Without a field a chat may fill the whole context, above any ceiling; a legacy completion ends at 16 tokens."""
    if rules.default is not None:
        return rules.default
    return None if kind == "completions" else rules.ceiling


def _field_to_add(upstream: Upstream, engine: str, kind: Kind) -> str:
    if kind != "chat":
        return _FIELDS[kind][0]
    return _OLLAMA_FIELD if engine == "ollama" else upstream.max_tokens_field


def _wants_few(data: dict[str, object]) -> bool:
    """Signs of a classifier, for which a short answer is the point (C094)."""
    count = whole_number(data.get("n"))
    return bool(data.get("logprobs")) or bool(data.get("top_logprobs")) or (count is not None and count > 1)


def _is_editable(value: object) -> bool:
    return value is None or whole_number(value) is not None

"""What to send so that a model thinks, or does not: `plan` turns a wish into edits on a request.

The families' keys are data in `families.py`; here is what the API and the engine make of them:

- vLLM, SGLang, llama.cpp: keys in `chat_template_kwargs`, merged with the caller's own; an effort that says the
  opposite is taken out, since vLLM and SGLang derive the switch from it.
- Ollama: `reasoning_effort: none`; it ignores template arguments.
- Anthropic's API: `thinking: {type: disabled}` beside the keys. Responses: the effort is in `reasoning.effort`.
- Legacy completions have no chat template, so there is nothing to switch.

Whether it worked is measured on every answer; this module only asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from gateway.wire.families import FAMILIES, FAMILY_NAMES, UNKNOWN, Default, Family, find_family, guess_family
from gateway.wire.kinds import Kind

__all__ = [
    "FAMILIES", "FAMILY_NAMES", "SUFFIX", "SWITCHABLE", "UNKNOWN", "Edit", "Family", "Remove", "SetIn", "ThinkingPlan",
    "find_family", "guess_family", "may_think", "plan", "strip_nothinking",
]  # fmt: skip

Want = Literal["off", "on"]
Path: TypeAlias = tuple[str, ...]
Data: TypeAlias = dict[str, object]

SUFFIX: Final = "-nothinking"  # on a model's name it asks for "off"; spec.md §4

_KWARGS: Final = "chat_template_kwargs"
_NOT_THINKING: Final = frozenset({"none", "no_think"})  # efforts that mean off; every other one means on
_DISABLED: Final[Mapping[str, str]] = {"type": "disabled"}
_READ: Final = frozenset({_KWARGS, "reasoning_effort", "reasoning", "thinking", "output_config"})
_BY_NAME: Final = {family.name: family for family in (*FAMILIES, UNKNOWN)}
_EFFORT_PATHS: Final[Mapping[Kind, Path]] = {
    "chat": ("reasoning_effort",),
    "responses": ("reasoning", "effort"),
    "messages": ("output_config", "effort"),
}
SWITCHABLE: Final[frozenset[Kind]] = frozenset(_EFFORT_PATHS)
"""Requests whose thinking can be switched: those with a chat template."""


@dataclass(frozen=True, slots=True)
class SetIn:
    """Give the key at `path` this value; objects on the way are made if absent."""

    path: Path
    value: str | int | bool | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Remove:
    """Take the key at `path` out."""

    path: Path


Edit: TypeAlias = SetIn | Remove


@dataclass(frozen=True, slots=True)
class ThinkingPlan:
    """The edits that ask for it. Not possible: `reason` says why, and `edits` are the next best or none."""

    edits: tuple[Edit, ...]
    is_possible: bool = True
    reason: str = ""
    label: str = ""  # what is asked for: off, on, or an effort; for the header that tells


def strip_nothinking(model: str) -> tuple[str, bool]:
    """The model's name without `-nothinking`, and whether it was there."""
    if model.endswith(SUFFIX) and len(model) > len(SUFFIX):
        return model.removesuffix(SUFFIX), True
    return model, False


def plan(family: Family, want: Want, data: Data, engine: str, kind: Kind = "chat") -> ThinkingPlan:
    """Edits on a request of this kind, whose parsed body is `data`. What is as wanted already needs no edit."""
    if data.keys().isdisjoint(_READ):
        return _plan_unswitched(family.name, want, engine, kind)
    return _plan(family, want, data, engine, kind)


@lru_cache(maxsize=1024)  # rows × wishes × engines × kinds: most requests say nothing about thinking
def _plan_unswitched(name: str, want: Want, engine: str, kind: Kind) -> ThinkingPlan:
    return _plan(_BY_NAME[name], want, {}, engine, kind)


def _plan(family: Family, want: Want, data: Data, engine: str, kind: Kind) -> ThinkingPlan:
    effort_at = _EFFORT_PATHS.get(kind)
    if effort_at is None:
        return ThinkingPlan((), False, "only chat requests have a switch for thinking")
    is_ollama = engine == "ollama"
    label: str = want
    if want == "off" and not family.can_switch and not (is_ollama and family.off_effort is None):
        label = family.off_effort or ""
    if want == "on":
        edits = _on_edits(family, data, engine, kind, effort_at)
    elif is_ollama:
        edits = _ollama_off_edits(family, data, kind, effort_at)
    elif family.can_switch:
        edits = _off_edits(family, data, engine, kind, effort_at)
    else:
        edits = _least_edits(family, data, engine, effort_at)
    needed = tuple(edit for edit in edits if _is_needed(edit, data))
    if any(_is_blocked(edit, data) for edit in needed):
        return ThinkingPlan((), False, f"`{needed[0].path[0]}` is not an object in this request")
    return ThinkingPlan(needed, label == want, "" if label == want else family.note, label)


def may_think(family: Family, data: Data, engine: str, kind: Kind = "chat") -> bool:
    """False if the request, as it is, surely runs without thinking: by its own switches, or by the family's default."""
    if kind not in _EFFORT_PATHS:
        return False
    if not family.can_switch and engine != "ollama":
        return True
    said = _says(family, data, engine, kind)
    if said is not None:
        return said
    default: Default = family.default
    if engine == "sglang" and family.sglang_default is not None:
        default = family.sglang_default
    return default != "off"


# --- Edits per wish ----------------------------------------------------------------------------------------------


def _off_edits(family: Family, data: Data, engine: str, kind: Kind, effort_at: Path) -> Iterator[Edit]:
    for key, value in family.off:
        yield SetIn((_KWARGS, key), value)
    if family.off_effort is not None:
        yield SetIn(effort_at, family.off_effort)
    elif family.is_effort_its_own or _means_thinking(_get(data, effort_at)):
        yield Remove(effort_at)
    in_kwargs = (_KWARGS, "reasoning_effort")
    if _means_thinking(_get(data, in_kwargs)) and "reasoning_effort" not in dict(family.off):
        yield Remove(in_kwargs)
    if engine == "sglang" and kind == "chat" and _object_says(data) is True:
        yield Remove(("reasoning",))
    if kind == "messages":
        # `disabled` becomes the effort `none`, which a family with words of its own does not know.
        yield Remove(("thinking",)) if family.is_effort_its_own else SetIn(("thinking",), _DISABLED)


def _on_edits(family: Family, data: Data, engine: str, kind: Kind, effort_at: Path) -> Iterator[Edit]:
    in_kwargs = (_KWARGS, "reasoning_effort")
    has_effort = _means_thinking(_get(data, effort_at)) or _means_thinking(_get(data, in_kwargs))
    if engine != "ollama":
        for key, value in family.on:
            if key != "reasoning_effort" or not has_effort:  # the caller's own effort is one to keep
                yield SetIn((_KWARGS, key), value)
        for key, value in family.off:
            if key not in dict(family.on) and _get(data, (_KWARGS, key)) == value:
                yield Remove((_KWARGS, key))
        if _means_off(_get(data, in_kwargs)) and "reasoning_effort" not in dict(family.on):
            yield Remove(in_kwargs)
    if _means_off(_get(data, effort_at)):
        yield Remove(effort_at)
    if engine in ("sglang", "ollama") and kind == "chat" and _object_says(data) is False:
        yield Remove(("reasoning",))
    if kind == "messages" and _get(data, ("thinking", "type")) == "disabled":
        yield Remove(("thinking",))


def _ollama_off_edits(family: Family, data: Data, kind: Kind, effort_at: Path) -> Iterator[Edit]:
    """Ollama switches every model the same way; only gpt-oss and its like know no `none`."""
    effort = "none" if family.can_switch or family.off_effort is None else family.off_effort
    if kind == "messages":
        if effort == "none":
            yield SetIn(("thinking",), _DISABLED)
        return
    yield SetIn(effort_at, effort)
    if kind == "chat" and _get(data, ("reasoning", "effort")) is not None:
        yield SetIn(("reasoning", "effort"), effort)


def _least_edits(family: Family, data: Data, engine: str, effort_at: Path) -> Iterator[Edit]:
    """What is left for a model that cannot be switched off: the least effort, or not to ask for more."""
    if family.off_effort is not None:
        yield SetIn(effort_at, family.off_effort)
        if engine == "llamacpp":  # its templates read the argument, not the API's field
            yield SetIn((_KWARGS, "reasoning_effort"), family.off_effort)
    elif family.default == "model" and _means_thinking(_get(data, effort_at)):
        yield Remove(effort_at)


# --- Reading a request -------------------------------------------------------------------------------------------


def _says(family: Family, data: Data, engine: str, kind: Kind) -> bool | None:
    """What the request's own switches say; None if there are none that this family listens to."""
    if kind == "messages" and isinstance(_get(data, ("thinking", "type")), str):
        return _get(data, ("thinking", "type")) != "disabled"
    if engine != "ollama":
        for key in family.listens_to:
            if isinstance(_get(data, (_KWARGS, key)), str | bool | int):
                return any(_is_on(_get(data, (_KWARGS, listened))) for listened in family.listens_to)
    effort = _get(data, _EFFORT_PATHS[kind])
    if isinstance(effort, str):
        return _means_thinking(effort)
    return _object_says(data) if kind == "chat" and engine in ("sglang", "ollama") else None


def _is_on(value: object) -> bool:
    return _means_thinking(value) and value != "disabled" if isinstance(value, str) else bool(value)


def _means_thinking(effort: object) -> bool:
    """True for an effort that asks for thinking."""
    return effort not in _NOT_THINKING if isinstance(effort, str) else bool(effort)


def _means_off(effort: object) -> bool:
    return isinstance(effort, str) and effort in _NOT_THINKING


def _object_says(data: Data) -> bool | None:
    """What `reasoning: {enabled, effort}` of a chat request says, which SGLang and Ollama read."""
    enabled = _get(data, ("reasoning", "enabled"))
    if isinstance(enabled, bool):
        return enabled
    effort = _get(data, ("reasoning", "effort"))
    return _means_thinking(effort) if isinstance(effort, str) else None


def _get(data: Data, path: Path) -> object:
    """The value at `path`, None if there is none or it is null."""
    value: object = data
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _is_needed(edit: Edit, data: Data) -> bool:
    current = _get(data, edit.path)
    if isinstance(edit, Remove):
        return current is not None
    return type(current) is not type(edit.value) or current != edit.value


def _is_blocked(edit: Edit, data: Data) -> bool:
    """True if something else than an object stands on the way to the edit."""
    on_the_way = [_get(data, edit.path[:length]) for length in range(1, len(edit.path))]
    return any(value is not None and not isinstance(value, dict) for value in on_the_way)

"""What the model will say to a request, decided before anything is said: plain functions, no time in them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

from gateway.sim import text
from gateway.sim.profiles import Profile

Channel = Literal["reasoning", "content", "tool_name", "tool_arguments", "hidden"]
Finish = Literal["stop", "length", "tool_calls", "abort"]

EXHAUSTING = 1_000_000  # tokens an answer may reach with ignore_eos and no limit


@dataclass(frozen=True, slots=True)
class Token:
    """One step of one choice: a text for a channel; the last one carries the finish reason."""

    channel: Channel
    text: str
    finish: Finish | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Switches:
    """What a request says about thinking."""

    kwargs: Mapping[str, object]  # chat_template_kwargs
    effort: str | None = None  # reasoning_effort


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks of the model's words. `max_tokens` is final: context and defaults are already in it."""

    thinks: bool
    parses: bool  # whether the reasoning parser looks for thoughts; differs from `thinks` only in broken pairs
    max_tokens: int
    include_reasoning: bool = True
    ignore_eos: bool = False
    tool: Mapping[str, object] | None = None  # the function to call


@dataclass(frozen=True, slots=True)
class Plan:
    """All tokens of one choice, in order; the last has a finish reason. Hidden ones take a step and show nothing."""

    tokens: tuple[Token, ...]
    reasoning_tokens: int

    @property
    def finish(self) -> Finish:
        return self.tokens[-1].finish or "stop"

    def text_of(self, channel: Channel) -> str:
        """Everything said on one channel."""
        return "".join(token.text for token in self.tokens if token.channel == channel)


def switch_state(keys: Sequence[str] | None, switches: Switches, default: bool) -> bool:
    """Whether thinking is on for a reader of `keys`: any present true key switches on, else any present one off.

    As vLLM since 0.22, an effort is also an `enable_thinking` unless the request gave one itself.
    A key with `null` or "auto" counts as absent.
    """
    values: dict[str, object] = {k: v for k, v in switches.kwargs.items() if v is not None and v != "auto"}
    if switches.effort is not None:
        values.setdefault("enable_thinking", switches.effort != "none")
        values["reasoning_effort"] = switches.effort
    present = [_is_on(values[key]) for key in keys or () if key in values]
    return any(present) if present else default


def _is_on(value: object) -> bool:
    if isinstance(value, str):
        return value not in ("none", "no_think", "disabled", "off", "false")
    return bool(value)


def thinking_of(profile: Profile, switches: Switches) -> tuple[bool, bool]:
    """(the model thinks, the parser looks for it)."""
    thinks = switch_state(profile.switch_keys, switches, profile.thinking)
    if profile.parser_keys is None:
        return thinks, thinks
    return thinks, switch_state(profile.parser_keys, switches, profile.thinking)


def make_plan(profile: Profile, wish: Wish, prompt: str, seed: int, choice: int = 0) -> Plan:
    """The words of one choice. The same arguments give the same words."""
    rng = random.Random(f"{seed}/{choice}/{prompt[-2000:]}/{len(prompt)}")
    language = text.language_of(prompt)
    thoughts = text.thoughts(rng.randint(*profile.thinking_tokens), language, rng) if wish.thinks else []
    if wish.tool is not None:
        said = _tool_tokens(wish.tool, language, choice)
    else:
        count = EXHAUSTING if wish.ignore_eos else rng.randint(*profile.answer_tokens)
        count = min(count, max(0, wish.max_tokens - len(thoughts)) + 1)
        said = [Token("content", piece, None, choice) for piece in text.answer(count, language, rng)]
    tokens = _routed(profile, wish, thoughts, said, choice)
    end: Finish = "tool_calls" if wish.tool is not None else "stop"
    tokens = _ended(tokens, wish.max_tokens, end, choice)
    return Plan(tuple(tokens), _reasoning_count(wish, thoughts, wish.max_tokens))


def _routed(profile: Profile, wish: Wish, thoughts: list[str], said: list[Token], choice: int) -> list[Token]:
    """Which channel each text ends in: that depends on the parser, not on the model."""
    inline = profile.reasoning_field in ("inline", "inline_unopened")
    if not thoughts:
        if wish.parses and not wish.thinks and not inline:  # parser on, model off: the answer passes for a thought
            return [Token("reasoning", token.text, None, choice) for token in said]
        return said
    lead = [Token("content", profile.lead, None, choice)] if profile.lead else []
    if inline or not wish.parses:  # nobody separates: the thoughts are content
        opening = ["<think>\n"] if profile.reasoning_field == "inline" else []
        return [Token("content", t, None, choice) for t in (*opening, *thoughts, "</think>")] + lead + said
    channel: Channel = "reasoning" if wish.include_reasoning else "hidden"
    return [*(Token(channel, t, None, choice) for t in thoughts), Token("hidden", "", None, choice), *lead, *said]


def _ended(tokens: list[Token], max_tokens: int, end: Finish, choice: int) -> list[Token]:
    """Cut at the budget, where the last word carries "length", or closed by an empty end-of-sequence token."""
    if len(tokens) >= max_tokens:
        last = tokens[max_tokens - 1]
        return [*tokens[: max_tokens - 1], Token(last.channel, last.text, "length", choice)]
    return [*tokens, Token("content", "", end, choice)]


def _reasoning_count(wish: Wish, thoughts: list[str], max_tokens: int) -> int:
    return min(len(thoughts), max_tokens) if wish.parses else 0


def _tool_tokens(function: Mapping[str, object], language: text.Language, choice: int) -> list[Token]:
    name = str(function.get("name", "tool"))
    arguments = orjson.dumps(_example_arguments(function.get("parameters"), language)).decode()
    pieces = [arguments[i : i + 6] for i in range(0, len(arguments), 6)]
    return [Token("tool_name", name, None, choice), *(Token("tool_arguments", p, None, choice) for p in pieces)]


def _example_arguments(schema: object, language: text.Language) -> dict[str, object]:
    """Something for every required property, or for every property where none is required."""
    if not isinstance(schema, Mapping):
        return {}
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    wanted = schema.get("required") or list(properties)
    return {name: _example(properties.get(name), language) for name in wanted if isinstance(name, str)}


def _example(schema: object, language: text.Language) -> object:
    if not isinstance(schema, Mapping):
        return "x"
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return choices[0]
    examples: dict[object, object] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    return examples.get(schema.get("type"), "北京" if language == "zh" else "Paris")

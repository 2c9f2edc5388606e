"""What a route and its upstream make of a request's body: fields, model, thinking, token budget, usage.

Every change is a splice, every change is named in `Shaped.changes`, and a body that nothing changes is the caller's
own bytes object. The order is fixed, and each step sees what the steps before it made of the body:

    drop → defaults → override → model → thinking → max_tokens → usage

So `thinking` merges into an overridden `chat_template_kwargs`, and the ceiling holds for a default too. A request is
shaped anew for every attempt, as another upstream may want other keys; `allow_*` leave out what a 400 was about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import orjson

from gateway.config import Route, Upstream
from gateway.policy.maxtokens import caller_value, has_rules, plan_max_tokens
from gateway.policy.refusals import is_context_overflow, is_switch_rejected, is_usage_rejected
from gateway.wire.body import RequestBody
from gateway.wire.families import find_family
from gateway.wire.kinds import GENERATING, Kind
from gateway.wire.thinking import SUFFIX, SWITCHABLE, Remove, plan, strip_nothinking

__all__ = ["Shaped", "is_context_overflow", "is_switch_rejected", "is_usage_rejected", "needs_shaping", "shape"]

_MAX_WORD: Final = 80  # characters of a name or value in `changes`, which end up in a header and in the log
_USAGE_PATH: Final = ("stream_options", "include_usage")


@dataclass(frozen=True, slots=True)
class Shaped:
    """The body to send and what was done to it."""

    body: bytes
    changes: tuple[str, ...] = ()
    thinking_asked: Literal["client", "off", "on"] = "client"  # what the route wants; `client`: nothing was asked
    is_thinking_edited: bool = False
    is_floor_raised: bool = False  # we set the token budget higher than the caller, who may have left it open
    is_usage_added: bool = False  # the usage chunk was not asked for by the caller, who must not see it
    max_tokens: int | None = None  # the budget that goes upstream, if known
    warning: str = ""  # why a wish about thinking cannot be met by this model

    @staticmethod
    def untouched(body: bytes) -> Shaped:
        """The caller's own bytes."""
        return Shaped(body)


def needs_shaping(
    route: Route, body: RequestBody, kind: Kind, *, add_usage: bool = False, rescue: bool = False
) -> bool:
    """False if nothing that is configured can change this body, which is the usual case and costs next to nothing."""
    if route.drop or route.defaults or route.override or rescue or route.model is not None:
        return True
    if kind in GENERATING and (route.thinking != "client" or has_rules(route.max_tokens)):
        return True
    model = body.data.get("model")
    if isinstance(model, str) and model.endswith(SUFFIX):
        return True
    return add_usage and _may_add_usage(body.data, kind)


def shape(
    body: RequestBody,
    *,
    route: Route,
    upstream: Upstream,
    engine: str,
    kind: Kind,
    add_usage: bool = False,
    allow_thinking: bool = True,
    allow_floor: bool = True,
    rescue: bool = False,
    stream: Mapping[str, object] | None = None,
) -> Shaped:
    """The body as this route wants it for this upstream. Pure; the same arguments give the same bytes.

    `add_usage`: streams shall report token counts. `allow_thinking`, `allow_floor`: False after a 400 that our switch
    or our larger budget caused. `rescue`: thinking off whatever the route says, after an answer burnt by it. `stream`:
    fields that make the server stream a plain request's answer.
    """
    if not stream and not needs_shaping(route, body, kind, add_usage=add_usage, rescue=rescue):
        return Shaped(body.raw, max_tokens=caller_value(body.data, engine, kind))
    draft = _Draft(body)
    draft.apply_fields(route)
    is_suffixed = draft.apply_model(route)
    want = "off" if is_suffixed or rescue else route.thinking
    if allow_thinking and kind in SWITCHABLE and want != "client":
        draft.apply_thinking(want, upstream, engine, kind)
    if kind in GENERATING:
        draft.apply_max_tokens(route, upstream, engine, kind, allow_raise=allow_floor)
    if add_usage:
        draft.apply_usage(kind)
    if stream:
        draft.apply_stream(stream)
    return draft.shaped()


class _Draft:
    """A body in the making: the splices, and beside them what they make of the parsed body."""

    __slots__ = (
        "_asked", "_changes", "_data", "_document", "_has_floor", "_has_usage", "_is_switched", "_max_tokens",
        "_warning",
    )  # fmt: skip

    def __init__(self, body: RequestBody) -> None:
        self._document = body.document()
        self._data = dict(body.data)  # only its own level is changed; deeper ones are replaced, see `_set_in`
        self._changes: list[str] = []
        self._asked: Literal["client", "off", "on"] = "client"
        self._is_switched = False
        self._has_floor = False
        self._has_usage = False
        self._max_tokens: int | None = None
        self._warning = ""

    def apply_fields(self, route: Route) -> None:
        """Drop, fill in, force: plain fields of the top level, of which only the names are told."""
        for key in route.drop:
            if key in self._data:
                self._document.remove(key)
                del self._data[key]
                self._changes.append(f"drop={_word(key)}")
        for key, value in route.defaults.items():
            if self._data.get(key) is None:
                self._set(key, value)
                self._changes.append(f"default={_word(key)}")
        for key, value in route.override.items():
            if not _is_same(self._data.get(key), value):
                self._set(key, value)
                self._changes.append(f"override={_word(key)}")

    def apply_stream(self, fields: Mapping[str, object]) -> None:
        for key, value in fields.items():
            self._set(key, value)
        self._changes.append("stream=upstream")

    def apply_model(self, route: Route) -> bool:
        """The name that the upstream knows; True if the caller's name asks for no thinking."""
        asked = self._data.get("model")
        plain, is_suffixed = strip_nothinking(asked) if isinstance(asked, str) else ("", False)
        name = route.model if route.model is not None else plain
        if name and name != asked:
            self._set("model", name)
            self._changes.append(f"model={_word(name)}")
        return is_suffixed

    def apply_thinking(self, want: Literal["off", "on"], upstream: Upstream, engine: str, kind: Kind) -> None:
        self._asked = want
        wanted = plan(find_family(upstream.family, self._model()), want, self._data, engine, kind)
        if not wanted.is_possible:
            self._warning = wanted.reason
        for edit in wanted.edits:
            if isinstance(edit, Remove):
                self._remove_in(edit.path)
            else:
                self._set_in(edit.path, edit.value)
        if wanted.edits:
            self._is_switched = True
            self._changes.append(f"thinking={wanted.label or want}")

    def apply_max_tokens(self, route: Route, upstream: Upstream, engine: str, kind: Kind, *, allow_raise: bool) -> None:
        if not has_rules(route.max_tokens):
            self._max_tokens = caller_value(self._data, engine, kind)
            return
        tokens = plan_max_tokens(
            route.max_tokens,
            self._data,
            upstream=upstream,
            engine=engine,
            kind=kind,
            family=find_family(upstream.family, self._model()),
            allow_raise=allow_raise,
        )
        self._max_tokens = tokens.value
        for field in tokens.fields:
            self._set(field, tokens.value)
        if tokens.fields:
            self._has_floor = tokens.is_raised
            was = "" if tokens.was is None else f"{_word(str(tokens.was))}>"
            self._changes.append(f"max_tokens={was}{tokens.value}")

    def apply_usage(self, kind: Kind) -> None:
        """Token counts at the end of a stream; the rest of the caller's `stream_options` stays (C096)."""
        if _may_add_usage(self._data, kind):
            self._set_in(_USAGE_PATH, True)
            self._has_usage = True
            self._changes.append("usage=added")

    def shaped(self) -> Shaped:
        return Shaped(
            self._document.apply(),
            tuple(self._changes),
            self._asked,
            self._is_switched,
            self._has_floor,
            self._has_usage,
            self._max_tokens,
            self._warning,
        )

    def _model(self) -> str:
        model = self._data.get("model")
        return model if isinstance(model, str) else ""

    def _set(self, key: str, value: object) -> None:
        self._document.set(key, _json(value))
        self._data[key] = value

    def _set_in(self, path: tuple[str, ...], value: object) -> None:
        self._document.set_in(path, _json(value))
        self._copied(path)[path[-1]] = value

    def _remove_in(self, path: tuple[str, ...]) -> None:
        self._document.remove_in(path)
        self._copied(path).pop(path[-1], None)

    def _copied(self, path: tuple[str, ...]) -> dict[str, object]:
        """The object that holds the path's last key, copied on the way: the parsed body is not ours to change."""
        target = self._data
        for key in path[:-1]:
            inner = target.get(key)
            target[key] = copy = dict(inner) if isinstance(inner, dict) else {}
            target = copy
        return target


def _may_add_usage(data: dict[str, object], kind: Kind) -> bool:
    """Only streams have the field, and a caller who asked for usage gets it without us."""
    if kind not in ("chat", "completions") or data.get("stream") is not True:
        return False
    options = data.get("stream_options")
    return options is None or (isinstance(options, dict) and options.get("include_usage") is not True)


def _is_same(current: object, wanted: object) -> bool:
    """True if a forced plain value is there already. Objects and lists are always written: they may differ inside."""
    return isinstance(wanted, str | int | float) and type(current) is type(wanted) and current == wanted


def _json(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits from the settings
        return json.dumps(value, ensure_ascii=True).encode()


def _word(text: str) -> str:
    """The text as it may stand in a header: visible ASCII, without the comma between changes, and not long."""
    if text.isidentifier() and text.isascii() and len(text) <= _MAX_WORD:
        return text
    return "".join(c if "!" <= c <= "~" and c != "," else "?" for c in text[:_MAX_WORD])

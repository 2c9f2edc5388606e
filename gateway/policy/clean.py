"""Prompt cleaning of a request's body (spec.md §5): which strings hold text, and how they are edited.

`may_need_cleaning` (`cleanscreen.py`) lets clean bodies pass for almost nothing; `clean_body` then edits only the
strings that really change, as splices. The rules themselves are `cleantext.py`.

What is text, by the kind of request: `messages[*].content` and `system`, `prompt`, `input` and `instructions`, each
a string or a list of strings or of text parts. Everything else is somebody's data and stays: tool calls and their
arguments, `tools`, names, images, audio and files, token ids, reasoning handed back, blocks of type `tool_result`
(what an agent read from a file must equal the file, or its next edit fails).

Decision: the content of a `tool` or `function` message is text, as it may be a fetched page with the very runs that
slow tokenizers down, unless it is JSON, which is data.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import orjson

from gateway.config import Clean
from gateway.policy.cleanscreen import may_need_cleaning
from gateway.policy.cleantext import clean_text
from gateway.wire.kinds import Kind
from gateway.wire.spans import elements, members, string_literal
from gateway.wire.splice import Document

__all__ = ["CLEANER_VERSION", "clean_body", "may_need_cleaning"]

CLEANER_VERSION: Final = "1"  # rises with every change of rules, so that a lost prefix cache can be explained (C071)

_PLACES: Final[dict[Kind, tuple[str, ...]]] = {
    "chat": ("messages",),
    "completions": ("prompt",),
    "responses": ("instructions", "input"),
    "messages": ("system", "messages"),
    "embeddings": ("input", "messages"),
}
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text"})
_TOOL_ROLES: Final = frozenset({"tool", "function"})
_ROLES: Final = {
    "human": "user", "ai": "assistant", "bot": "assistant",
    "user": "user", "assistant": "assistant", "system": "system", "developer": "developer",
    "tool": "tool", "function": "function",
}  # fmt: skip
_LONGEST_ROLE: Final = max(map(len, _ROLES))

# A new string, or what becomes of some members or elements of a container.
_Change: TypeAlias = "str | dict[str | int, _Change]"


def clean_body(document: Document, data: dict[str, object], rules: Clean, kind: Kind) -> dict[str, int]:
    """Put the edits that `rules` ask for on `document`, whose parsed form is `data`; return how often each step acted.

    `kind` is the kind of endpoint; kinds without prompts are left alone. A body of any shape is taken: what is not
    text where text belongs stays as it is, for the upstream to judge.
    """
    cleaner = _Cleaner(rules)
    for key in _PLACES.get(kind, ()):
        change = cleaner.place(key, data.get(key))
        member = document.member(key) if change is not None else None
        if change is not None and member is not None:
            _splice(document, member.start, member.end, change)
    return cleaner.counts


def _splice(document: Document, start: int, end: int, change: _Change) -> None:
    """Put the change of the value at this span on the document."""
    if isinstance(change, str):
        document.replace(start, end, string_literal(change))
        return
    spans: dict[str | int, tuple[int, int]] = {}
    if document.body[start : start + 1] == b"{":
        # Of duplicates the last stays in the dict, as in every parser.
        spans.update((member.key, (member.start, member.end)) for member in members(document.body, start))
    else:
        spans.update(enumerate(elements(document.body, start)))
    for key, inner in change.items():
        _splice(document, *spans[key], inner)


class _Cleaner:
    """Walks the parsed body and says what changes; None means nothing. Adds up the counts."""

    __slots__ = ("_rules", "counts")

    def __init__(self, rules: Clean) -> None:
        self._rules = rules
        self.counts: dict[str, int] = {}

    def place(self, key: str, value: object) -> _Change | None:
        if isinstance(value, str):
            return self._text(value) if key != "messages" else None
        if not isinstance(value, list):
            return None
        if key == "system":
            return self._content(value)
        if key == "prompt":
            return self._each([self._text(one) if isinstance(one, str) else None for one in value])
        return self._each(
            [self._text(one) if isinstance(one, str) and key == "input" else self._message(one) for one in value]
        )

    def _message(self, message: object) -> _Change | None:
        """Changes of a chat message or of an item of a Responses input."""
        if not isinstance(message, dict):
            return None
        changes: dict[str | int, _Change] = {}
        role = message.get("role")
        if self._rules.roles and isinstance(role, str) and (known := _known_role(role)) not in (None, role):
            changes["role"] = known
            self._count({"roles": 1})
        is_tool = isinstance(role, str) and _known_role(role) in _TOOL_ROLES
        content = self._content(message.get("content"), is_tool=is_tool)
        if content is not None:
            changes["content"] = content
        return changes or None

    def _content(self, content: object, *, is_tool: bool = False) -> _Change | None:
        if isinstance(content, str):
            return self._text(content, is_tool=is_tool)
        if not isinstance(content, list):
            return None
        return self._each([self._part(part, is_tool=is_tool) for part in content])

    def _part(self, part: object, *, is_tool: bool) -> _Change | None:
        if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str) or kind not in _TEXT_PARTS:
            return None
        text = part.get("text")
        cleaned = self._text(text, is_tool=is_tool) if isinstance(text, str) else None
        return None if cleaned is None else {"text": cleaned}

    def _text(self, text: str, *, is_tool: bool = False) -> str | None:
        cleaned, counts = clean_text(text, self._rules)
        if not counts or (is_tool and _is_json(text)):
            return None
        self._count(counts)
        return cleaned

    def _count(self, counts: dict[str, int]) -> None:
        for step, count in counts.items():
            self.counts[step] = self.counts.get(step, 0) + count

    @staticmethod
    def _each(changes: list[_Change | None]) -> _Change | None:
        return {index: change for index, change in enumerate(changes) if change is not None} or None


def _known_role(role: str) -> str | None:
    """The role as upstreams spell it; None for one that we do not know."""
    return _ROLES.get(role.lower()) if len(role) <= _LONGEST_ROLE else None


def _is_json(text: str) -> bool:
    """True for an object or an array. A bare word or number is no data that cleaning could break."""
    if not text.lstrip(" \t\r\n").startswith(("{", "[")):
        return False
    try:
        orjson.loads(text)
    except ValueError:  # also of a text that UTF-8 cannot spell, which no tool's JSON is
        return False
    return True

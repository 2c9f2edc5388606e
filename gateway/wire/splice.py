"""Edits on the caller's JSON text: everything that is not named keeps its bytes.

Decisions a reader would question:

- Nothing is re-serialised. Numbers beyond 64 bits, `1.10`, escapes, key order, duplicates and whitespace survive
  because they are never decoded; an edit replaces one span of the caller's bytes (`spans.py` finds it).
- A key that the parsed body does not have needs no scan to be appended, and a key that the text spells once needs
  none to be found. `Document` uses both when it is given the parsed body's keys: the usual edits of a long
  conversation cost a few searches at memory speed.
- A key that is set leaves no duplicate of itself behind: two parsers must not see two values (C051).
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

from gateway.wire.spans import (
    Member,
    SpliceError,
    after_blank,
    elements,
    has_escaped_letters,
    loads,
    members,
    string_literal,
    value_end,
)

__all__ = ["Document", "Edits", "Member", "SpliceError", "elements", "loads", "members", "string_literal"]

_OPEN_BRACE, _CLOSE_BRACE = b"{}"
_BLANK: Final = b" \t\r\n"
_TAIL: Final = 64  # bytes looked at before the closing brace at first; more blanks than that are unusual

_skip_colon = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+").match
_is_letters = re.compile(r"[A-Za-z_]++").fullmatch  # what `has_escaped_letters` speaks of


class Edits:
    """Replacements on one text, in any order; they may touch but not overlap."""

    __slots__ = ("_pieces", "_text")

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._pieces: list[tuple[int, int, bytes]] = []

    def __len__(self) -> int:
        return len(self._pieces)

    def replace(self, start: int, end: int, new: bytes) -> None:
        self._pieces.append((start, end, new))

    def insert(self, at: int, new: bytes) -> None:
        """Before the byte at `at`; several at one place keep the order of the calls."""
        self._pieces.append((at, at, new))

    def covers(self, start: int, end: int) -> bool:
        """True if a replacement takes the span away, so that an edit inside it has nothing left to edit."""
        if start == end:
            return any(first < start < last for first, last, _ in self._pieces)
        return any(first <= start and end <= last for first, last, _ in self._pieces)

    def apply(self) -> bytes:
        """The edited text; the same object if there is nothing to do. Raises SpliceError for overlaps."""
        if not self._pieces:
            return self._text
        text = memoryview(self._text)  # slices without copies: bodies are large
        position = 0
        parts: list[bytes | memoryview] = []
        for start, end, new in sorted(self._pieces, key=_span):
            if not position <= start <= end <= len(text):
                raise SpliceError(f"the edits overlap at byte {start}")
            parts += (text[position:start], new)
            position = end
        parts.append(text[position:])
        return b"".join(parts)


def _span(piece: tuple[int, int, bytes]) -> tuple[int, int]:
    return piece[:2]


class Document:
    """A top-level object that is read and edited member by member.

    Reading shows the caller's text; edits are collected and show in `apply()`. Any mix of them composes: a later
    edit of a key replaces an earlier one, edits inside a member that is set or removed disappear with it.
    """

    __slots__ = ("_root", "_text_edits", "body")

    def __init__(self, body: bytes, keys: Container[str] | None = None) -> None:
        """`keys`: all keys that the parsed object has, if known (the parsed dict itself will do)."""
        self.body = body
        self._root = _Object(body, 0, keys)
        self._text_edits: list[tuple[int, int, bytes]] = []

    def member(self, key: str) -> Member | None:
        """The member of that name; of duplicates the last, which is the one that parsers take."""
        return self._root.member(key)

    def raw(self, key: str) -> bytes | None:
        """The value's bytes."""
        member = self._root.member(key)
        return None if member is None else self.body[member.start : member.end]

    def value(self, key: str) -> object:
        """The value decoded; None when absent or null."""
        raw = self.raw(key)
        return None if raw is None else loads(raw)

    def set(self, key: str, json_value: bytes) -> None:
        """Give `key` this value: in its place, or as a new last member."""
        self._root.changes[key] = json_value

    def remove(self, key: str) -> None:
        """Take out every member of that name."""
        self._root.changes[key] = None

    def set_in(self, path: tuple[str, ...], json_value: bytes) -> None:
        """As `set` for a key in nested objects, which are made where absent or null.

        Raises SpliceError if something else than an object is in the way; nothing is changed then.
        """
        target = self._root
        walked: list[tuple[_Object, str, _Object]] = []
        for key in path[:-1]:
            child = target.child(key)
            walked.append((target, key, child))
            target = child
        self._attach(walked)
        target.changes[path[-1]] = json_value

    def remove_in(self, path: tuple[str, ...]) -> None:
        """As `remove` for a key in nested objects; does nothing where one of them is absent or no object."""
        target = self._root
        walked: list[tuple[_Object, str, _Object]] = []
        for key in path[:-1]:
            try:
                child = target.child(key)
            except SpliceError:
                return
            walked.append((target, key, child))
            target = child
        if target.holds(path[-1]):
            self._attach(walked)
            target.changes[path[-1]] = None

    def replace(self, start: int, end: int, new: bytes) -> None:
        """Put other text in the place of a span, such as a string inside a member."""
        self._text_edits.append((start, end, new))

    def apply(self) -> bytes:
        """The body with all edits; the caller's own bytes object if there are none."""
        edits = Edits(self.body)
        self._root.emit(edits)
        kept = self._text_edits
        if len(edits):
            kept = [edit for edit in kept if not edits.covers(edit[0], edit[1])]
        for start, end, new in kept:
            edits.replace(start, end, new)
        return edits.apply()

    @staticmethod
    def _attach(walked: list[tuple[_Object, str, _Object]]) -> None:
        for parent, key, child in walked:
            parent.changes[key] = child


class _Object:
    """An object in `text` and what its members shall become: new bytes, edits inside (`_Object`), or nothing (None)."""

    __slots__ = ("_has_escapes", "_keys", "_lone", "_members", "_start", "_text", "changes")

    def __init__(self, text: bytes, start: int, keys: Container[str] | None = None) -> None:
        self._text = text
        self._start = start
        self._keys = keys
        self._members: list[Member] | None = None
        self._lone: dict[str, Member | None] = {}
        self._has_escapes: bool | None = None
        self.changes: dict[str, bytes | _Object | None] = {}

    def member(self, key: str) -> Member | None:
        if self._members is None and self._keys is not None:
            if key not in self._keys:
                return None
            lone = self._lone_member(key)
            if lone is not None:
                return lone
        return next((member for member in reversed(self.members()) if member.key == key), None)

    def members(self) -> list[Member]:
        if self._members is None:
            self._members = members(self._text, self._start)
        return self._members

    def holds(self, key: str) -> bool:
        """True if the key will be there, as far as edits up to now say."""
        return self.changes[key] is not None if key in self.changes else self.member(key) is not None

    def child(self, key: str) -> _Object:
        """The object under `key`, a fresh one where it is absent or null. Does not attach it."""
        change = self.changes.get(key)
        if isinstance(change, _Object):
            return change
        member = None if key in self.changes else self.member(key)
        text, start = (self._text, member.start) if member is not None else (change or b"null", 0)
        start = after_blank(text, start)
        if text[start : start + 1] == b"{":
            return _Object(text, start)
        if text.startswith(b"null", start):
            return _Object(b"{}", 0)
        raise SpliceError(f"`{key}` is not an object")

    def emit(self, edits: Edits) -> None:
        """Add what the changes mean as replacements on the text."""
        if not self.changes or self._emit_without_scan(edits):
            return
        found = self.members()
        last = {member.key: index for index, member in enumerate(found) if member.key in self.changes}
        gone = [self._is_gone(member.key, index, last) for index, member in enumerate(found)]
        for key, index in last.items():
            if not gone[index]:
                self._emit_value(edits, found[index], self.changes[key])
        self._emit_ends(edits, found, gone, self._new_members(last))

    def render(self) -> bytes:
        """The object's own text with its changes, for an object that is not part of the edited text."""
        if self._text == b"{}":  # made here, the usual case
            return b"{%b}" % self._new_members(())
        edits = Edits(self._text)
        self.emit(edits)
        return edits.apply()

    def _lone_member(self, key: str) -> Member | None:
        """The member, if its quoted key is in the text once and so cannot be anything else; None: a scan must tell.

        The parsed object has the key, so the text spells it somewhere: plainly (then this is the place, as text
        inside a string would need its quotes escaped) or with escapes (excluded here).
        """
        if key not in self._lone:
            self._lone[key] = self._find_lone(key)
        return self._lone[key]

    def _find_lone(self, key: str) -> Member | None:
        needle = b'"%b"' % key.encode() if _is_letters(key) else b""
        if not needle or self._text.count(needle) != 1:
            return None
        if self._has_escapes is None:
            self._has_escapes = has_escaped_letters(self._text)
        start = self._text.find(needle)
        colon = _skip_colon(self._text, start + len(needle))
        if colon is None or self._has_escapes:
            return None
        return Member(key, start, start + len(needle), colon.end(), value_end(self._text, colon.end()))

    def _emit_without_scan(self, edits: Edits) -> bool:
        """Do it all with lone and absent keys, the usual case; False, and nothing done, if that cannot be."""
        if self._keys is None or self._members is not None:
            return False
        present: list[Member] = []
        absent: dict[str, int] = {}
        for key, change in self.changes.items():
            if key not in self._keys:
                continue
            member = self._lone_member(key) if change is not None else None
            if member is None:
                return False
            present.append(member)
            absent[key] = 0
        added = self._new_members(absent)
        if added:
            end = _before_closing_brace(self._text)
            edits.insert(end, added if self._text[end - 1] == _OPEN_BRACE else b"," + added)
        for member in present:
            self._emit_value(edits, member, self.changes[member.key])
        return True

    def _emit_value(self, edits: Edits, member: Member, change: bytes | _Object | None) -> None:
        if isinstance(change, _Object):
            if change._text is self._text:
                change.emit(edits)
                return
            change = change.render()
        assert change is not None  # a removed member is gone
        edits.replace(member.start, member.end, change)

    def _is_gone(self, key: str, index: int, last: dict[str, int]) -> bool:
        """Removed, or an earlier duplicate of a key that gets a value: two parsers must not see two values."""
        return key in last and (self.changes[key] is None or last[key] != index)

    def _new_members(self, present: Container[str]) -> bytes:
        return b",".join(
            string_literal(key) + b":" + (change.render() if isinstance(change, _Object) else change)
            for key, change in self.changes.items()
            if change is not None and key not in present
        )

    def _emit_ends(self, edits: Edits, found: list[Member], gone: list[bool], added: bytes) -> None:
        """Cut the members that are gone, each run with one comma, and append the new ones."""
        kept = [member for member, is_gone in zip(found, gone, strict=True) if not is_gone]
        if added and kept:
            edits.insert(kept[-1].end, b"," + added)
        elif added and not found:
            edits.insert(after_blank(self._text, self._start) + 1, added)
        if found and not kept:
            edits.replace(found[0].key_start, found[-1].end, added)
            return
        index = 0
        while index < len(found):
            first = index
            while index < len(found) and gone[index]:
                index += 1
            if index > first and first == 0:
                edits.replace(found[0].key_start, found[index].key_start, b"")
            elif index > first:
                edits.replace(found[first - 1].end, found[index - 1].end, b"")
            index += 1


def _before_closing_brace(text: bytes) -> int:
    """Offset behind the last member, or behind `{`, of a text that is one object and blanks around it."""
    closing = len(text.rstrip(_BLANK)) - 1
    if closing < 1 or text[closing] != _CLOSE_BRACE:
        raise SpliceError("the text does not end in `}`")
    tail = text[max(0, closing - _TAIL) : closing].rstrip(_BLANK)
    return max(0, closing - _TAIL) + len(tail) if tail else len(text[:closing].rstrip(_BLANK))

"""Where the members and elements of a JSON text are, as byte offsets; and what a span of it means.

Decisions a reader would question:

- The text was read by `body.py` before, so this is a scanner, not a validator: on garbage it raises `SpliceError` or
  gives spans that make no sense, but it always ends, in linear time, without recursion.
- Most of a chat body is one long string, and `bytes.find` is 200 times faster than a regex there. Short strings and
  small containers are the other way round: one regex call skips many of them. Hence the two ways below.
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

import orjson

_QUOTE, _BACKSLASH, _OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_LIST, _CLOSE_LIST, _COMMA = b'"\\{}[],'
_SPARSE: Final = 64  # bytes between escaped quotes, above which `find` is faster than the regex
_MAX_DIGITS: Final = 4000  # of an integer; Python refuses more than 4300, as reading them takes quadratic time

# One short string, or a run of bytes without structure; then containers of these, two deep. Each alternative is
# possessive and a failed one is tried again at most once per level, which keeps the whole linear.
_PLAIN: Final = rb'(?:[^"\[\]{}]++|"[^"\\]{0,128}+")*+'
_LEAF: Final = rb'(?:[^"\[\]{}]++|"[^"\\]{0,128}+"|\[' + _PLAIN + rb"\]|\{" + _PLAIN + rb"\})*+"
_skip_simple = re.compile(_LEAF).match
# Escapes one after the other, up to a number after which `find` gets another chance.
_skip_escapes = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+){0,256}+', re.DOTALL).match
_skip_blank = re.compile(rb"[ \t\r\n]*+").match
_skip_scalar = re.compile(rb'[^ \t\r\n,:"\[\]{}]++').match
_skip_key = re.compile(rb'[ \t\r\n]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\r\n]*+:[ \t\r\n]*+', re.DOTALL).match
_escaped_letter = re.compile(rb"\\u00[4-7]").search
_surrogate = re.compile("[\ud800-\udfff]")


class SpliceError(ValueError):
    """The text is not the JSON that was expected here, or two edits overlap."""


class Member(NamedTuple):
    """One `"key": value` of an object, as byte offsets; the key's span holds its quotes."""

    key: str
    key_start: int
    key_end: int
    start: int
    end: int


# --- Spans -------------------------------------------------------------------------------------------------------


def members(text: bytes, start: int = 0) -> list[Member]:
    """Members of the object at `start` (blanks before its `{` are skipped), duplicates included, in their order."""
    found: list[Member] = []
    position = after_blank(text, _opening(text, start, _OPEN_OBJECT) + 1)
    if _byte_at(text, position) == _CLOSE_OBJECT:
        return found
    while True:
        key = _skip_key(text, position)
        if key is None:
            raise SpliceError(f"no key and colon at byte {position}")
        start = key.end()
        end = value_end(text, start)
        found.append(Member(_unescape(key.group(1)), key.start(1), key.end(1), start, end))
        position = after_blank(text, end)
        byte = _byte_at(text, position)
        if byte == _CLOSE_OBJECT:
            return found
        if byte != _COMMA:
            raise SpliceError(f"no comma between the members at byte {position}")
        position += 1


def elements(text: bytes, start: int = 0) -> list[tuple[int, int]]:
    """Spans of the values of the array at `start` (blanks before its `[` are skipped)."""
    found: list[tuple[int, int]] = []
    position = after_blank(text, _opening(text, start, _OPEN_LIST) + 1)
    if _byte_at(text, position) == _CLOSE_LIST:
        return found
    while True:
        end = value_end(text, position)
        found.append((position, end))
        position = after_blank(text, end)
        byte = _byte_at(text, position)
        if byte == _CLOSE_LIST:
            return found
        if byte != _COMMA:
            raise SpliceError(f"no comma between the elements at byte {position}")
        position = after_blank(text, position + 1)


def value_end(text: bytes, start: int) -> int:
    """Offset behind the value that begins at `start`."""
    byte = _byte_at(text, start)
    if byte == _QUOTE:
        return _string_end(text, start)
    if byte in (_OPEN_OBJECT, _OPEN_LIST):
        return _container_end(text, start)
    scalar = _skip_scalar(text, start)
    if scalar is None:
        raise SpliceError(f"no value at byte {start}")
    return scalar.end()


def _string_end(text: bytes, start: int) -> int:
    """Offset behind the string whose opening quote is at `start`."""
    position = start + 1
    while True:
        end = text.find(b'"', position)
        if end < 0:
            raise SpliceError(f"the string at byte {start} has no end")
        if text[end - 1] != _BACKSLASH:
            return end + 1
        if text[end - 2] != _BACKSLASH and end - position > _SPARSE:  # one escaped quote after a long stretch
            position = end + 1
            continue
        escapes = _skip_escapes(text, position)
        if escapes is not None:  # it matches the empty run too, so this holds always
            position = escapes.end()
        if _byte_at(text, position) == _QUOTE:
            return position + 1


def _container_end(text: bytes, start: int) -> int:
    """Offset behind the object or array that opens at `start`. Openers and closers are counted, not matched."""
    position = start + 1
    depth = 1
    while depth:
        simple = _skip_simple(text, position)
        if simple is not None:  # it matches the empty run too, so this holds always
            position = simple.end()
        byte = _byte_at(text, position)
        if byte == _QUOTE:  # a long string, or one with escapes
            position = _string_end(text, position)
            continue
        depth += 1 if byte in (_OPEN_OBJECT, _OPEN_LIST) else -1
        position += 1
    return position


def _opening(text: bytes, start: int, wanted: int) -> int:
    position = after_blank(text, start)
    if _byte_at(text, position) != wanted:
        raise SpliceError(f"no `{chr(wanted)}` at byte {position}")
    return position


def after_blank(text: bytes, start: int) -> int:
    blank = _skip_blank(text, start)
    return blank.end() if blank is not None else start


def _byte_at(text: bytes, position: int) -> int:
    try:
        return text[position]
    except IndexError:
        raise SpliceError("the text ends too early") from None


def _unescape(quoted: bytes) -> str:
    if _BACKSLASH in quoted:
        key = loads(quoted)
        assert isinstance(key, str)  # a quoted text is nothing else
        return key
    try:
        return quoted[1:-1].decode()
    except UnicodeDecodeError:
        raise SpliceError("a key is not UTF-8") from None


# --- Values ------------------------------------------------------------------------------------------------------


def loads(text: bytes) -> object:
    """The value of a JSON text: orjson where it can, else leniently (see `loads_leniently`). Raises SpliceError."""
    try:
        value: object = orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return loads_leniently(text)
        except (ValueError, RecursionError) as error:
            raise SpliceError("the value cannot be read") from error
    return value


def loads_leniently(text: bytes) -> object:
    """As `json` reads it: lone surrogate escapes stay, 1e400 is infinite. But `NaN` and `Infinity` are no JSON.

    Raises json.JSONDecodeError, UnicodeDecodeError, NotJsonError and, beyond several hundred levels, RecursionError.
    """
    value: object = _LENIENT.decode(text.decode())
    return value


class NotJsonError(ValueError):
    """A number that JSON does not have; the argument is its spelling."""


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


def _refuse(word: str) -> object:
    raise NotJsonError(word)


_LENIENT: Final = json.JSONDecoder(parse_int=_integer, parse_constant=_refuse)


def string_literal(text: str) -> bytes:
    """A str as JSON in raw UTF-8; lone surrogates, which UTF-8 cannot spell, as `\\uXXXX` escapes."""
    try:
        return orjson.dumps(text)
    except TypeError:
        quoted = json.dumps(text, ensure_ascii=False)
        return _surrogate.sub(lambda half: f"\\u{ord(half[0]):04x}", quoted).encode()


def has_escaped_letters(text: bytes) -> bool:
    """True if an ASCII letter may be written as an escape, so that a key may be in the text without its spelling."""
    return b"\\u00" in text and _escaped_letter(text) is not None

"""JSON read and written with every number spelled as it was.

orjson turns `1.50` into 1.5 and an integer of 20 digits into a double. Where an answer is put together from parts, a
number must come out as it went in, so numbers that a 64-bit integer does not hold exactly stay text here.
"""

from __future__ import annotations

import json
from typing import Final

import orjson

from gateway.wire.spans import string_literal

_SAFE_DIGITS: Final = 18  # every integer with as many characters fits 64 bits


class Spelled:
    """JSON text of one value, kept as it is: a number, or a list that is joined already."""

    __slots__ = ("text",)

    def __init__(self, text: bytes) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spelled) and other.text == self.text

    def __repr__(self) -> str:
        return f"Spelled({self.text!r})"


def _number(digits: str) -> Spelled:
    return Spelled(digits.encode())


def _integer(digits: str) -> int | Spelled:
    return int(digits) if len(digits) <= _SAFE_DIGITS and digits != "-0" else Spelled(digits.encode())


_DECODER: Final = json.JSONDecoder(parse_float=_number, parse_int=_integer, parse_constant=_number)


def loads_exactly(data: bytes) -> object:
    """The value of a JSON text. `NaN` and the like, which some servers write, stay as they are.

    Raises ValueError for what is no JSON in UTF-8, and RecursionError beyond several hundred levels.
    """
    value: object = _DECODER.decode(data.decode())
    return value


def dumps_exactly(value: object) -> bytes:
    """The text of a value of `loads_exactly`; lone surrogates are written as escapes. Raises RecursionError."""
    try:
        return orjson.dumps(value, default=_fragment)
    except TypeError:  # orjson refuses lone surrogates, and more than 254 levels
        return _write(value)


def _fragment(value: object) -> orjson.Fragment:
    if isinstance(value, Spelled):
        return orjson.Fragment(value.text)
    raise TypeError(type(value).__name__)


def _write(value: object) -> bytes:
    """One frame per level: a comprehension would be a second one."""
    parts: list[bytes] = []
    if isinstance(value, dict):
        for key, item in value.items():
            parts.append(b"%b:%b" % (string_literal(key), _write(item)))
        return b"{%b}" % b",".join(parts)
    if isinstance(value, list):
        for item in value:
            parts.append(_write(item))  # noqa: PERF401 - see above
        return b"[%b]" % b",".join(parts)
    if isinstance(value, str):
        return string_literal(value)
    return value.text if isinstance(value, Spelled) else orjson.dumps(value)

"""What the parts of an assembled answer are collected in, each with the bytes it holds.

A stream says the same few things with every token. Text is kept as UTF-8 and lists as the JSON of their elements, so
that an answer takes about the memory of its own bytes.
"""

from __future__ import annotations

from gateway.wire.exact import Spelled, dumps_exactly

_KEY_BYTES = 100  # what a key of its own costs, roughly


class Text:
    """A string that comes in pieces. Halves of a surrogate pair in two pieces stay halves, and are written so."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, piece: str) -> int:
        """Append; how many bytes more are held."""
        data = piece.encode("utf-8", "surrogatepass")
        self._data += data
        return len(data)

    def __bool__(self) -> bool:
        return bool(self._data)

    def __str__(self) -> str:
        return self._data.decode("utf-8", "surrogatepass")


class Joined:
    """A list that comes in pieces."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, elements: list[object]) -> int:
        """Append; how many bytes more are held."""
        if not elements:
            return 0
        before = len(self._data)
        if self._data:
            self._data += b","
        self._data += dumps_exactly(elements)[1:-1]
        return len(self._data) - before

    def value(self) -> Spelled:
        return Spelled(b"[%b]" % bytes(self._data))


class Kept:
    """Values of which the last that is not null stays."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    def put(self, key: str, value: object) -> int:
        """Keep a value; how many bytes more are held."""
        values = self.values
        if key not in values:
            values[key] = value
            return _KEY_BYTES + _size(value)
        if value is None or value == values[key]:
            return 0
        more = _size(value) - _size(values[key])
        values[key] = value
        return more

    def first(self, key: str, value: object) -> int:
        """Keep the first value that is not null or empty."""
        return self.put(key, value) if not self.values.get(key) else 0


class Logprobs:
    """The `logprobs` of a choice: lists that grow (`content`, or `tokens`, `text_offset` and so on), and the rest."""

    __slots__ = ("_lists", "_others", "is_said")

    def __init__(self) -> None:
        self.is_said = False
        self._lists: dict[str, Joined] = {}
        self._others = Kept()

    def take(self, raw: object) -> int:
        """Those of one chunk; how many bytes more are held."""
        if not isinstance(raw, dict):
            return 0
        self.is_said = True
        held = 0
        for key, value in raw.items():
            held += self._others.put(key, None)  # for the order
            if isinstance(value, list):
                held += self._lists.setdefault(key, Joined()).add([_filled(item) for item in value])
            else:
                held += self._others.put(key, value)
        return held

    def value(self) -> dict[str, object] | None:
        if not self.is_said:
            return None
        return {
            key: self._lists[key].value() if key in self._lists else other
            for key, other in self._others.values.items()
        }  # fmt: skip


def _filled(item: object) -> object:
    """A token's log probability with what vLLM's streams leave out because it is the default."""
    if not isinstance(item, dict) or "logprob" in item or "token" not in item:
        return item
    filled = {"token": item["token"], "logprob": Spelled(b"-9999.0"), "bytes": None, "top_logprobs": []}
    filled.update(item)
    return filled


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict | list):
        return len(dumps_exactly(value))
    return len(value.text) if isinstance(value, Spelled) else 8

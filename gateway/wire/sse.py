"""Event streams: from bytes, as they arrive, to whole events.

The rules are those of the WHATWG standard: a line ends with LF, CRLF or CR and with nothing else (U+2028 and its
like are text), a byte-order mark at the start is skipped, comments and unknown fields are ignored, several `data`
lines are joined with LF, and a blank line ends the event. A block without any `data` line gives no event; one whose
`data` is empty does. A line that ends in CR ends there and then: a LF that follows, in the same read or the next,
belongs to it.

Nearly every read of a model server's stream is one or more whole blocks `data: {...}` with LF. These are cut with
slices and nothing else; everything odd takes the line by line path, which gives the same events for every split.
"""

from __future__ import annotations

# One event may be as large as this; a longer one is no model's output. Value of fault-catalogue C16.
MAX_EVENT_BYTES = 8 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"

Event = tuple[bytes, bytes]


class EventSplitter:
    """Feed bytes, get complete events as (name or b"", data). Memory is bounded and time is linear.

    When one event grows past the bound, `overflowed` is set, what was held is dropped and no event is given again.
    """

    __slots__ = (
        "_after_cr", "_at_start", "_data", "_is_clean", "_line", "_name", "comments", "is_open", "overflowed", "saw_id",
    )  # fmt: skip

    def __init__(self) -> None:
        self.is_open = False
        """Bytes came after the last blank line: an event was relayed in part."""
        self.overflowed = False
        self.saw_id = False
        """An `id` line was seen; some clients then take a blank line for an event (cases C004)."""
        self.comments = 0
        self._line = bytearray()  # the line whose end has not come yet
        self._data: bytes | bytearray | None = None
        self._name = b""
        self._after_cr = False
        self._at_start = True
        self._is_clean = True  # between events, and no LF is owed to an earlier CR

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes, in order."""
        if self._is_clean and data.endswith(b"\n\n") and data.find(b"\r") < 0:
            found = self._whole_blocks(data)
            if found:
                self._at_start = False
                return found
        if self.overflowed or not data:
            return []
        found = self._lines(data)
        self._is_clean = not self.is_open and not self._after_cr
        return found

    def finish(self) -> list[Event]:
        """The last event when the stream ended without its blank line; the standard would drop it.

        A server that leaves the blank line out still meant the event (cases C007), a cut one did not: the caller
        finds out by parsing it.
        """
        if self.overflowed or not self.is_open:
            return []
        found: list[Event] = []
        if self._line:
            line, self._line = bytes(self._line), bytearray()
            self._take(line)
        self._dispatch(found)
        self.is_open = False
        return found

    @staticmethod
    def _whole_blocks(data: bytes) -> list[Event]:
        """Events of a read that is whole blocks of the usual forms; empty when it is anything else."""
        end = len(data) - 2
        if end > MAX_EVENT_BYTES:
            return []
        first = data.find(b"\n")
        if data.startswith(b"data: "):
            if first == end:
                return [(b"", data[6:end])]
            blocks = data[:end].split(b"\n\n")
            found = [(b"", block[6:]) for block in blocks if block.startswith(b"data: ") and block.find(b"\n") < 0]
            if len(found) == len(blocks):
                return found
            return []
        is_named = data.startswith(b"event: ") and data.startswith(b"data: ", first + 1)
        if is_named and data.find(b"\n", first + 1) == end:
            return [(data[7:first], data[first + 7 : end])]
        return []

    def _lines(self, data: bytes) -> list[Event]:
        if self._after_cr:
            self._after_cr = False
            if data.startswith(b"\n"):
                data = data[1:]
        if data.find(b"\r") >= 0:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = data.split(b"\n")
        if lines and self._line:
            lines[0] = bytes(self._line) + lines[0]
            self._line.clear()
        found: list[Event] = []
        for line in lines:
            self._end_line(line, found)
            if self.overflowed:
                return found
        if rest:
            self.is_open = True
            self._line += rest
            self._bound(len(self._line))
        return found

    def _end_line(self, line: bytes, found: list[Event]) -> None:
        if line:
            self.is_open = True
            self._bound(len(line))
            if not self.overflowed:
                self._take(line)
            return
        self._at_start = False
        self._dispatch(found)
        self.is_open = False

    def _take(self, line: bytes) -> None:
        """One line that is not blank, without its end."""
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if line.startswith(b":"):
            self.comments += 1
            return
        name, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if name == b"data":
            if self._data is None:
                self._data = value
            else:
                self._data = bytearray(self._data) if isinstance(self._data, bytes) else self._data
                self._data += b"\n"
                self._data += value
        elif name == b"event":
            self._name = value
        elif name == b"id":
            self.saw_id = True

    def _dispatch(self, found: list[Event]) -> None:
        if self._data is not None:
            found.append((self._name, bytes(self._data)))
            self._data = None
        self._name = b""

    def _bound(self, more: int) -> None:
        """Give up when what is held of this event and `more` bytes of a line pass the bound."""
        held = len(self._data) if self._data is not None else 0
        if held + len(self._name) + more > MAX_EVENT_BYTES:
            self.overflowed = True
            self._line = bytearray()
            self._data = None
            self._name = b""


def until_done(data: bytes) -> bytes:
    """Nothing leaves after the end mark, whatever the upstream still says (fault-catalogue C11, C12)."""
    start = 0 if data.startswith(b"data: [DONE]") else data.find(b"\ndata: [DONE]")
    if start < 0:
        return data  # the words of an answer
    end = data.find(b"\n\n", start)
    return data if end < 0 else data[: end + 2]

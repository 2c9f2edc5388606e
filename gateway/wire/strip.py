"""Taking the usage event out of a stream whose caller did not ask for it (cases C096).

Where the gateway adds `stream_options.include_usage` to a request, the server sends one more event, with empty
`choices`. Callers that did not ask for it fail on it (client-contract §1 rule 9), so it is removed; all other bytes
go on as they came. Only bytes of an event that is not complete yet are held.
"""

from __future__ import annotations

import re

import orjson

from gateway.wire.sse import EventSplitter

# A usage event is under 1 KiB; what is longer is something else, and holding it would delay the caller.
MAX_HELD_BYTES = 1024 * 1024

# A blank line: two line ends in a row. Atomic groups, so that CRLF is never read as CR and LF.
_BLANK = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
# Whole comment lines at the start of a block: keep-alives that must not wait for a blank line.
_COMMENTS = re.compile(rb"(?::[^\r\n]*+(?>\r\n|\r|\n))*+")
# Bytes looked at again with the next read, since a blank line may be cut: CR LF CR, without the last LF.
_OVERLAP = 3
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')


class UsageStripper:
    """Feed a stream's bytes, get those to forward: everything but the event that only holds usage."""

    __slots__ = ("_after_cr", "_held", "_is_off", "_scanned")

    def __init__(self) -> None:
        self._held = bytearray()
        self._scanned = 0
        self._is_off = False
        # The last event ended in CR, so that a LF may still come: what to forward for it.
        self._after_cr: bytes | None = None

    def feed(self, data: bytes) -> bytes:
        """What to forward now; the same object when the read is whole events and none has to go."""
        if self._is_off or not data:
            return data
        if self._held or self._after_cr is not None:
            return self._join(data)
        if data.endswith(b"\n\n") and data.find(b'"usage"') < 0:
            return data
        kept = self._forward(data)
        return data if kept == data else kept

    def finish(self) -> bytes:
        """What is still held at the end of the stream, unless it is the usage event."""
        rest = bytes(self._held)
        self._held.clear()
        return b"" if _is_only_usage(rest) else rest

    def _join(self, data: bytes) -> bytes:
        if self._after_cr is not None:
            before = self._after_cr if data.startswith(b"\n") else b""
            self._after_cr = None
            return before + self._forward(data.removeprefix(b"\n"))
        self._held += data
        if _BLANK.search(self._held, self._scanned) is None:
            self._scanned = max(0, len(self._held) - _OVERLAP)
            return self._given_up()
        whole = bytes(self._held)
        self._held.clear()
        return self._forward(whole)

    def _forward(self, data: bytes) -> bytes:
        """The events of `data` that stay; its incomplete end is held."""
        kept: list[bytes] = []
        start = 0
        for blank in _BLANK.finditer(data):
            event = data[start : blank.end()]
            start = blank.end()
            is_removed = _is_only_usage(event)
            if is_removed:  # line ends before it belong to what was forwarded earlier
                event = event[: len(event) - len(event.lstrip(b"\r\n"))]
            kept.append(event)
            if start == len(data) and data.endswith(b"\r"):
                self._after_cr = b"" if is_removed else b"\n"
        comments = _COMMENTS.match(data, start)
        assert comments is not None  # a starred group also matches nothing
        kept.append(comments.group())
        start = comments.end()
        self._held += data[start:]
        self._scanned = max(0, len(self._held) - _OVERLAP)
        return b"".join(kept) + self._given_up()

    def _given_up(self) -> bytes:
        """Everything that is held, from then on and for good, once it is too long to be a usage event."""
        if len(self._held) <= MAX_HELD_BYTES:
            return b""
        self._is_off = True
        rest = bytes(self._held)
        self._held.clear()
        return rest


def _is_only_usage(event: bytes) -> bool:
    if event.find(b'"usage"') < 0 or _NO_CHOICES.search(event) is None:
        return False
    splitter = EventSplitter()
    events = splitter.feed(event) + splitter.finish()
    try:
        payload = orjson.loads(events[0][1]) if len(events) == 1 else None
    except ValueError:
        return False
    if not isinstance(payload, dict) or payload.get("error"):
        return False
    return payload.get("choices") == [] and isinstance(payload.get("usage"), dict)

"""The log: one line per request, warnings when somebody should act. JSON where nobody reads along, text in a terminal.

Lines are gathered in memory and written by a thread a few times a second: a blocked pipe never blocks a request,
and writing costs nothing on its path. What does not fit is dropped and counted (fault-catalogue F7, F8).
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections import deque
from datetime import UTC, datetime
from typing import Literal, TextIO

import orjson

MAX_LINES = 10_000
FLUSH_EVERY_S = 0.1
MAX_CAUSES = 8
_TEXT_FIELDS = ("ttft_ms", "ttfv_ms", "e2e_ms", "prompt_tokens", "completion_tokens", "reasoning_tokens")


class LogWriter(logging.Handler):
    """Writes request records and logging's own records to one stream, from a thread of its own."""

    def __init__(self, stream: TextIO, form: Literal["auto", "json", "text"] = "auto") -> None:
        super().__init__()
        self._stream = stream
        self._is_json = form == "json" or (form == "auto" and not stream.isatty())
        self._lines: deque[dict[str, object]] = deque(maxlen=MAX_LINES)
        self._dropped = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, record: dict[str, object]) -> None:
        """Takes one finished request. Never blocks, never raises."""
        if len(self._lines) == MAX_LINES:
            self._dropped += 1
        self._lines.append(record)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # the words and the values do not fit: a mistake of ours, not a reason to fail
            message = str(record.msg)
        line: dict[str, object] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": one_line(message),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = where_of(record.exc_info[1])
        self.write(line)

    def close(self) -> None:
        """Writes what is left, waiting a second at most."""
        self._stopping.set()
        self._thread.join(1.0)
        super().close()

    def _run(self) -> None:
        while not self._stopping.wait(FLUSH_EVERY_S):
            self._flush_lines()
        self._flush_lines()

    def _flush_lines(self) -> None:
        pieces: list[str] = []
        if self._dropped:
            self._lines.append(
                {"level": "warning", "logger": __name__, "message": f"{self._dropped} log lines dropped"}
            )
            self._dropped = 0
        while self._lines:
            line = self._lines.popleft()
            pieces.append(as_json(line) if self._is_json else as_text(line))
        if pieces:
            try:
                self._stream.write("\n".join(pieces) + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # ValueError: the stream was closed
                self._dropped += len(pieces)


def as_json(line: dict[str, object]) -> str:
    """One line of JSON; unknown values are absent."""
    known = {key: value for key, value in line.items() if value is not None}
    known["time"] = _stamp(line.get("time"))
    try:
        return orjson.dumps(known, default=str).decode()
    except TypeError:  # half a surrogate pair in a name, or a number beyond 64 bits
        return json.dumps(known, default=str)


def as_text(line: dict[str, object]) -> str:
    """One line for people."""
    when = _stamp(line.get("time"))[11:23]
    if "message" in line:
        tail = f"\n{line['traceback']}" if "traceback" in line else ""
        return f"{when} {str(line.get('level', 'info')).upper():7} {line['message']}{tail}"
    where = f"{line.get('route') or '-'}→{line.get('upstream') or '-'}"
    numbers = " ".join(
        f"{name.removesuffix('_ms')}={line[name]}" for name in _TEXT_FIELDS if line.get(name) is not None
    )
    extras = [str(line[key]) for key in ("reason", "verdict") if line.get(key) and line.get(key) != "ok"]
    changes = line.get("changes")
    if isinstance(changes, list) and changes:
        extras.append(",".join(map(str, changes)))
    words = [when, str(line.get("status") or "---"), str(line.get("outcome")), where, str(line.get("model") or "")]
    return " ".join(word for word in (*words, numbers, *extras) if word)


def one_line(text: str) -> str:
    """Text that cannot begin a line of its own in a log, nor say what UTF-8 cannot."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "\ufffd" for char in text)


def where_of(error: BaseException) -> str:
    """Kinds and places of an exception and its causes. Never their words, which may quote a prompt or a key."""
    pieces: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(pieces) < MAX_CAUSES:
        frames = "".join(traceback.format_tb(cause.__traceback__)).rstrip()
        pieces.append(f"{type(cause).__module__}.{type(cause).__qualname__}\n{frames}".rstrip())
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\ncaused by ".join(pieces)


def _stamp(seconds: object) -> str:
    moment = seconds if isinstance(seconds, float) else time.time()
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def set_up(form: Literal["auto", "json", "text"], stream: TextIO | None = None) -> LogWriter:
    """Routes the log of this process to stderr (or `stream`). Returns the writer for requests."""
    writer = LogWriter(stream or sys.stderr, form)
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.addHandler(writer)
    root.setLevel(logging.INFO)
    for noisy in ("httpx2", "httpcore2", "asyncio", "uvicorn", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return writer

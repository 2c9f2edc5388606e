"""The writer of the log: lines that are always JSON, never somebody's words, and never in the way."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from gateway import logs
from gateway.logs import LogWriter, as_json, as_text, one_line, set_up, where_of


class Stream(io.StringIO):
    """A stream that may be a terminal, and may be broken."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.failures = 0

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        if self.failures:
            self.failures -= 1
            raise OSError(28, "no space left")
        text.encode("utf-8")
        return super().write(text)


def logger_for(writer: LogWriter) -> logging.Logger:
    """A logger that only this writer listens to."""
    logger = logging.Logger("gateway.test")  # noqa: LOG001 - one that outlives no test
    logger.addHandler(writer)
    return logger


def raised(cause: Exception, error: Exception) -> Exception:
    """`error`, as it looks when it was raised because of `cause`."""
    try:
        try:
            raise cause
        except Exception as first:
            raise error from first
    except Exception as second:  # noqa: BLE001 - whatever it was
        return second


def lines(stream: Stream) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_records_and_warnings_become_lines_of_json() -> None:
    stream = Stream()
    writer = LogWriter(stream)
    writer.write({"time": 1764533000.5, "outcome": "complete", "ttft_ms": None})
    logger_for(writer).warning("upstream `%s` is down", "thor")
    writer.close()
    first, second = lines(stream)
    assert first == {"time": "2025-11-30T20:03:20.500Z", "outcome": "complete"}
    assert (second["level"], second["logger"], second["message"]) == (
        "warning",
        "gateway.test",
        "upstream `thor` is down",
    )


@pytest.mark.parametrize("message", ["two\nlines", "\x1b[31mred", "half \ud83d", "tab\t", "\u2028"])
def test_a_message_is_one_line_that_every_stream_can_take(message: str) -> None:
    """C048, and forged lines."""
    for form in ("json", "text"):
        stream = Stream()
        writer = LogWriter(stream, form)
        logger_for(writer).warning(message)
        writer.write(
            {"outcome": "complete", "model": "m\ud83d", "changes": ["a"], "big": 2**80} if form == "json" else {}
        )
        writer.close()
        assert len(stream.getvalue().splitlines()) == 2
        assert "\ufffd" in stream.getvalue() or "\\ufffd" in stream.getvalue()


def test_an_exception_is_told_by_kind_and_place_and_never_by_its_words() -> None:
    """Words of exceptions quote prompts: KeyError, UnicodeError, whatever a library says."""
    found = where_of(raised(KeyError("a prompt"), ValueError("a key")))
    assert found.startswith("builtins.ValueError\n")
    assert "caused by builtins.KeyError" in found
    assert "in raised" in found
    stream = Stream()
    writer = LogWriter(stream)
    try:
        raise RuntimeError("a prompt")
    except RuntimeError:
        logger_for(writer).exception("internal error in request %s", "id-1")
    writer.close()
    (line,) = lines(stream)
    assert line["message"] == "internal error in request id-1"
    assert "RuntimeError" in line["traceback"]
    assert "a prompt" not in json.dumps(line).replace('raise RuntimeError(\\"a prompt\\")', "")


def test_an_exception_without_context_is_not_followed() -> None:
    error = raised(KeyError("x"), ValueError("y"))
    error.__cause__, error.__suppress_context__ = None, True  # as `from None` does
    assert "KeyError" not in where_of(error)


def test_words_that_do_not_fit_their_values_are_no_failure() -> None:
    stream = Stream()
    writer = LogWriter(stream)
    logger_for(writer).warning("%d of %d", "x")
    writer.close()
    assert lines(stream)[0]["message"] == "%d of %d"


def test_a_full_buffer_drops_the_oldest_and_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """F7, F8: a blocked pipe must not block a request, nor fill the memory."""
    monkeypatch.setattr(logs, "MAX_LINES", 3)
    monkeypatch.setattr(logs, "FLUSH_EVERY_S", 60)
    stream = Stream()
    writer = LogWriter(stream)
    for number in range(5):
        writer.write({"time": 1.0, "number": number})
    writer.close()
    assert any("log lines dropped" in str(line.get("message")) for line in lines(stream))
    assert lines(stream)[-2]["number"] == 4


def test_a_disk_that_is_full_is_waited_out() -> None:
    """F7."""
    stream = Stream()
    stream.failures = 1
    writer = LogWriter(stream)
    writer.write({"time": 1.0, "number": 1})
    while stream.failures:
        pass
    writer.write({"time": 1.0, "number": 2})
    writer.close()
    assert [line.get("number") or line["message"] for line in lines(stream)] == [2, "1 log lines dropped"] or [
        line.get("number") or line["message"] for line in lines(stream)
    ] == ["1 log lines dropped", 2]


def test_a_closed_stream_ends_nothing() -> None:
    stream = Stream()
    writer = LogWriter(stream)
    stream.close()
    writer.write({"time": 1.0})
    writer.close()


def test_a_terminal_gets_text_for_people() -> None:
    stream = Stream(is_terminal=True)
    writer = LogWriter(stream)
    writer.write(
        {"time": 1764533000.5, "outcome": "complete", "status": 200, "route": "main", "upstream": "thor", "model": "m"}
    )
    writer.close()
    assert stream.getvalue() == "20:03:20.500 200 complete main→thor m\n"


def test_text_shows_numbers_reasons_and_changes() -> None:
    line: dict[str, object] = {
        "time": 0.0, "status": None, "outcome": "upstream_error", "reason": "dns", "verdict": "ok", "ttft_ms": 1.5,
        "changes": ["thinking=off"],
    }  # fmt: skip
    assert as_text(line) == "00:00:00.000 --- upstream_error -→- ttft=1.5 dns thinking=off"
    warning: dict[str, object] = {"time": 0.0, "level": "error", "message": "no", "traceback": "where"}
    assert as_text(warning) == "00:00:00.000 ERROR   no\nwhere"


def test_json_can_hold_what_orjson_cannot() -> None:
    assert json.loads(as_json({"time": 0.0, "a": 2**80, "b": "\ud83d", "c": {1, 2}}))["a"] == 2**80


def test_ordinary_text_is_left_alone() -> None:
    text = "route `日本語` and more"
    assert one_line(text) is text


def test_setting_up_takes_the_root_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    stream = Stream()
    try:
        writer = set_up("json", stream)
        logging.getLogger("gateway.any").info("said")
        logging.getLogger("httpx2").info("not said")
        writer.close()
        assert [line["message"] for line in lines(stream)] == ["said"]
    finally:
        root.handlers[:] = before
        root.setLevel(level)

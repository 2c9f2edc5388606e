"""`firsttoken demo`: the story it tells is true, and can be read in both languages, in any terminal."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from gateway.cli import main, stage
from gateway.cli.comeback import Comeback, Note
from gateway.cli.demo import picture
from gateway.cli.phrases import LANGUAGES, PHRASES, Language, language_of
from gateway.cli.scenes import DOCUMENT_TOKENS, Take, document
from gateway.cli.story import (
    ASCII_GLYPHS,
    GLYPHS,
    SHOWN,
    Bar,
    Paragraph,
    findings,
    milliseconds,
    row_of,
    story,
    told_to,
)
from gateway.configfile import load
from gateway.sim import text

SPEED = "10"  # the whole demo in a second


def demo(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A run of the command, not on a terminal."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    return subprocess.run(
        [sys.executable, "-m", "gateway", "demo", "--speed", SPEED, *arguments],
        check=False,
        env={**inherited, "LANG": "C.UTF-8", **environ},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What the demo tells scripts."""
    run = demo("--json")
    assert (run.returncode, run.stderr) == (0, "")
    told: dict[str, Any] = json.loads(run.stdout)
    return told


@pytest.fixture(scope="module")
def records(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {scene["name"]: scene["record"] for scene in report["scenes"]}


@pytest.fixture(scope="module")
def takes(report: dict[str, Any]) -> list[Take]:
    found = []
    for scene in report["scenes"]:
        told = scene.get("comeback")
        back = None if told is None else Comeback(**told | {"notes": tuple(Note(**note) for note in told["notes"])})
        found.append(Take(scene["name"], scene["record"], scene["heartbeats"], scene["answer"], back))
    return found


def heartbeats(report: dict[str, Any]) -> dict[str, int]:
    return {scene["name"]: scene["heartbeats"] for scene in report["scenes"]}


# -- the story is true -------------------------------------------------------------------------------------------------


def test_the_first_call_is_mostly_thinking(records: dict[str, dict[str, Any]]) -> None:
    """C081: thirty characters, 1,252 thinking tokens."""
    first = records["thinking"]
    assert first["reasoning_tokens"] == 1252
    assert first["reasoning_ms"] > 0.8 * first["e2e_ms"]


def test_with_thinking_off_there_is_none_and_the_answer_comes_at_least_five_times_sooner(
    records: dict[str, dict[str, Any]],
) -> None:
    off = records["off"]
    assert (off["reasoning_tokens"], off["reasoning_ms"]) == (0, 0)
    assert "thinking=off" in off["changes"]
    assert records["thinking"]["e2e_ms"] >= 5 * off["e2e_ms"]


def test_a_small_budget_is_burnt_by_thinking(report: dict[str, Any], records: dict[str, dict[str, Any]]) -> None:
    burnt = records["burnt"]
    assert (burnt["verdict"], burnt["status"], burnt["outcome"]) == ("burnt_by_thinking", 200, "complete")
    assert burnt["completion_tokens"] == burnt["reasoning_tokens"] == 64
    assert [scene["answer"] for scene in report["scenes"] if scene["name"] == "burnt"] == [""]


def test_rescue_brings_an_answer_after_all(report: dict[str, Any], records: dict[str, dict[str, Any]]) -> None:
    assert "sent_again=rescue" in records["rescued"]["changes"]
    (answer,) = (scene["answer"] for scene in report["scenes"] if scene["name"] == "rescued")
    assert answer


def test_the_call_after_a_start_waits_for_prefill_and_the_one_behind_it_for_the_queue(
    records: dict[str, dict[str, Any]],
) -> None:
    cold, queued = records["cold"], records["queued"]
    assert cold["wait_causes"]["prefill_ms"] > 0.8 * cold["wait_ms"]
    assert max(queued["wait_causes"], key=queued["wait_causes"].__getitem__) == "queue_ms"
    assert sum(queued["wait_causes"].values()) == pytest.approx(queued["wait_ms"], abs=0.01)


def test_heartbeats_keep_both_open_and_nobody_else_needs_any(
    report: dict[str, Any], records: dict[str, dict[str, Any]]
) -> None:
    beats = heartbeats(report)
    assert all(beats[name] >= 2 and records[name]["budget"] == "heartbeat" for name in ("cold", "queued"))
    assert not any(beats[name] for name in ("thinking", "off", "burnt", "rescued"))


def test_the_same_prompt_again_is_served_from_the_prefix_cache(records: dict[str, dict[str, Any]]) -> None:
    again, before = records["repeated"], records["queued"]
    assert before["cached_tokens"] in (0, None)
    assert again["cached_tokens"] > 0.95 * again["prompt_tokens"] > 10_000
    assert again["wait_causes"]["prefill_ms"] < before["wait_causes"]["prefill_ms"] / 2


def test_a_caller_that_opted_in_is_told_how_long_it_takes_and_comes_back_for_the_same_bytes(takes: list[Take]) -> None:
    """C124, C126: the request outlives its connection, and its stream is read from the start by another."""
    last, repeated = takes[-1], takes[-2]
    assert last.comeback is not None
    *polls, answer = last.comeback.notes
    assert (last.record["outcome"], last.record["budget"]) == ("pending_done", "pending")
    assert [note.status for note in polls] == [202] * len(polls)
    assert (answer.status, answer.left_ms, answer.phase) == (200, None, None)
    assert polls[0].phase == "queued"
    assert last.comeback.stream_bytes == last.comeback.answer_bytes > 1000
    assert last.answer == repeated.answer != ""


def test_no_heartbeat_gets_into_an_answer_that_is_come_back_for(report: dict[str, Any]) -> None:
    """The bytes are the model server's own."""
    assert heartbeats(report)["pending"] == 0


@pytest.mark.parametrize("name", SHOWN)
def test_the_parts_in_the_table_add_up_to_the_total(takes: list[Take], name: str) -> None:
    row = row_of(next(take for take in takes if take.name == name))
    parts = row.gateway_ms + row.wait_ms + row.reasoning_ms + row.answer_ms
    assert parts == pytest.approx(row.total_ms, abs=0.1)


# -- and can be read ---------------------------------------------------------------------------------------------------


def printed(takes: list[Take], language: Language, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False, force_terminal=False)
    console.print(story(takes, language, 1))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_name_bar_and_note_stands_on_one_line(takes: list[Take], language: Language, width: int) -> None:
    lines = printed(takes, language, width)
    phrases = PHRASES[language]
    assert max(map(cell_len, lines)) <= width
    for number, name in enumerate(SHOWN, 1):
        (row,) = (line for line in lines if line.startswith(f"{number} {phrases.scenes[name]} "))
        assert len(re.findall(r"[\d,.]+(?= |$)", row.removeprefix(f"{number} {phrases.scenes[name]}"))) == 5
    bars = [line for line in lines if set(GLYPHS) & set(line[2:3])]
    assert len(bars) == len(SHOWN) + 1  # and the legend
    for note in (phrases.burnt, phrases.compiling):
        assert sum(note in line for line in lines) == 1
    for name in phrases.columns:
        assert any(name.partition("\n")[0] in line for line in lines)


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_the_caller_was_told_stands_below_the_table_a_line_each(takes: list[Take], language: Language) -> None:
    lines = printed(takes, language, 80)
    told = told_to(takes[-1], language, takes[-2].answer)
    assert takes[-1].comeback is not None
    assert len(told) == len(takes[-1].comeback.notes) + 2
    start = lines.index(f"    {told[0]}")
    assert lines[start : start + len(told)] == [f"    {line}" for line in told]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_lines_to_copy_are_whole_and_a_route_takes_them(
    takes: list[Take], language: Language, tmp_path: Path
) -> None:
    lines = printed(takes, language, 80)
    path = tmp_path / "gateway.yaml"
    route = ["upstreams: {main: {url: 'http://127.0.0.1:8000'}}", "routes:", "  - upstreams: [main]"]
    for finding in findings(takes, language):
        route += [f"    {line}" for line in finding.yaml.splitlines()]
        assert all(f"    {line}" in lines for line in finding.yaml.splitlines())
    path.write_text("\n".join(route), encoding="utf-8")
    loaded = load(path, {})
    assert loaded.warnings == ()
    (only,) = loaded.settings.routes
    assert (only.thinking, only.rescue, only.max_tokens.floor, only.budget.ttft_ms) == ("off", True, 2048, 2000)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_end_says_where_to_go_on(takes: list[Take], language: Language) -> None:
    end = "\n".join(printed(takes, language, 80)[-2:])
    assert all(word in end for word in ("firsttoken serve --upstream http://", "/metrics", "/gateway/status"))


def test_a_terminal_without_unicode_gets_bars_all_the_same() -> None:
    run = demo(PYTHONIOENCODING="ascii", COLUMNS="80")
    assert run.returncode == 0
    assert "\\u" not in run.stdout
    assert run.stdout.isascii()
    assert re.search(f"^  [{re.escape(''.join(ASCII_GLYPHS))}]{{20,}} ", run.stdout, flags=re.MULTILINE)


def test_without_colour_nothing_but_text_is_printed() -> None:
    run = demo(LANG="zh_CN.UTF-8", NO_COLOR="1", FORCE_COLOR="", COLUMNS="80")
    assert (run.returncode, run.stderr) == (0, "")
    assert PHRASES["zh"].title in run.stdout
    assert "\x1b" not in run.stdout
    assert max(map(cell_len, run.stdout.splitlines())) <= 80


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_picture_needs_nothing_from_elsewhere(takes: list[Take], language: Language) -> None:
    drawn = picture(takes, language, 1)
    assert not re.search(r"url\((?!#)|@font-face|<image|href", drawn)
    assert GLYPHS[1] * 20 in drawn


# -- its pieces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ, language",
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_TW"}, "zh"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "en_US.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "en_US.UTF-8", "LANGUAGE": "zh_CN:en"}, "zh"),
        ({"LANG": "C.UTF-8", "LANGUAGE": "zh_CN"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),
        ({"LANGUAGE": "zh"}, "en"),
    ],
)
def test_the_locale_decides_the_language(environ: Mapping[str, str], language: str) -> None:
    assert language_of(environ) == language


@pytest.mark.parametrize(
    "said, width, lines",
    [
        ("one two three", 8, ["one two", "three"]),
        ("incomprehensible", 5, ["incomprehensible"]),
        ("慢在哪里，以及为什么。", 8, ["慢在哪", "里，以及", "为什么。"]),
        ("用 rescue 再问", 10, ["用 rescue", "再问"]),
        ("took 0.47 s.", 10, ["took", "0.47 s."]),
        ("", 8, [""]),
    ],
)
def test_text_is_broken_where_its_language_allows(said: str, width: int, lines: list[str]) -> None:
    assert Paragraph(said).lines(width) == lines


@pytest.mark.parametrize("width", [1, 2, 3, 10, 28, 68])
def test_a_bar_fits_and_shows_every_part(takes: list[Take], width: int) -> None:
    longest = max(row_of(take).total_ms for take in takes)
    for take in takes:
        row = row_of(take)
        cells = Bar(row, longest).cells(width)
        assert sum(cells) <= width
        assert all(cells) or width < 3 or 0 in (row.reasoning_ms, row.answer_ms)


@pytest.mark.parametrize(
    "ms, said", [(0, "0"), (0.04, "0"), (0.7, "0.7"), (9.94, "9.9"), (9.95, "10"), (67.4, "67"), (4518.2, "4,518")]
)
def test_times_have_as_many_digits_as_are_of_use(ms: float, said: str) -> None:
    assert milliseconds(ms) == said


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_document_is_as_long_as_it_says(language: Language) -> None:
    assert len(text.tokenize(document(language))) == pytest.approx(DOCUMENT_TOKENS, rel=0.15)


# -- and how it ends ---------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_it_at_once_and_without_a_word() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "gateway", "demo", "--lang", "en"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
        # A job in the background hands down that Ctrl-C is ignored. No threads yet that could be caught half-way.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    ) as process:
        os.close(theirs)
        seen = b""
        while b"1/7" not in seen:  # progress, since stderr is a terminal
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        last_resort = threading.Timer(20, process.kill)
        last_resort.start()
        while True:  # a terminal that nobody reads would hold the command up in its last words
            try:
                seen += os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
        out, _ = process.communicate(timeout=10)
        last_resort.cancel()
    os.close(ours)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in seen
    assert b"error" not in seen


def test_a_port_that_cannot_be_had_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken(host: str, port: int) -> socket.socket:
        raise OSError(errno.EADDRINUSE, "in use")

    monkeypatch.setattr(stage, "listening_socket", taken)
    assert main(["demo", "--speed", SPEED]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the address is already in use\n")
    assert "Traceback" not in error


@pytest.mark.parametrize("argument", ["--speed=0", "--speed=-1", "--speed=nan", "--speed=1000", "--svg=/nowhere/a.svg"])
def test_what_cannot_be_done_is_told_before_anything_runs(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", argument]) == 1
    assert capsys.readouterr().err.startswith("error: ")

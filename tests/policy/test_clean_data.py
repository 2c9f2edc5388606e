"""Prompt cleaning on the collections of real, noisy and naughty texts, row by row."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from gateway.config import Clean
from gateway.policy.clean import clean_body, may_need_cleaning
from gateway.policy.cleantext import DESCRIBED_CHANGES, clean_text, describe
from gateway.wire.body import read_object

SHARED = (Path(__file__).parents[2] / os.environ.get("FIRSTTOKEN_SHARED", "../shared")).resolve()

DEFAULT = Clean()
COLLAPSE = Clean(whitespace="collapse")
FENCE = "```"

DASH_RUN = re.compile("[—–―⸺⸻﹘]{3,}")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")
LONG_RUN = re.compile(r"([^\w])\1{512}")
# Fenced and inline code, as bluntly as it can be said.
CODE = re.compile(rf"^ *{FENCE}.*?(?:^ *{FENCE}|\Z)|`[^`\n]+`", re.MULTILINE | re.DOTALL)
ROLES = {"human": "user", "ai": "assistant"}


def _rows(name: str) -> list[dict[str, object]]:
    path = SHARED / "data" / name
    if not path.is_file():
        pytest.skip(f"{name} is not here; FIRSTTOKEN_SHARED names the folder that holds data/")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _clean(raw: bytes) -> tuple[bytes, dict[str, int]]:
    request = read_object(raw)
    document = request.document()
    counts = clean_body(document, request.data, DEFAULT, "chat")
    assert may_need_cleaning(raw, DEFAULT) or not counts
    return document.apply(), counts


# --- noisy prompts ---

# Row: what cleaning counts, and why.
NOISY: dict[str, dict[str, int]] = {
    "n00": {},  # the run of 3 stands in a fenced block of Python, where nothing is touched
    "n01": {"dashes": 1},
    "n02": {},  # in fenced code
    "n03": {"dashes": 1},
    "n04": {},  # in fenced code, where even 1,000 are somebody's program
    "n05": {"dashes": 8},  # leaders of a table of contents, in headings
    "n06": {},  # U+FF0D is no dash of the rule
    "n07": {},  # U+2500 draws boxes
    "n08": {},  # U+2015, behind a fence that the text breaks off in
    "n09": {},  # U+2013, the same
    "n10": {"control": 8},
    "n11": {"control": 8},  # the escape characters; what followed them is visible and stays
    "n12": {},  # zero-width space and byte-order mark are of category Cf
    "n13": {},  # so are marks of direction
    "n14": {},  # whitespace is kept by default
    "n15": {},
    "n16": {},  # indentation in a fence
    "n17": {},  # a table, its rule and a cell of dashes
    "n18": {"roles": 3},
    "n19": {"roles": 2},
    "n20": {},  # an empty turn is the upstream's to judge
    "n21": {"dashes": 1},
    "n22": {},
}


def _messages(row: str) -> list[dict[str, object]]:
    found = next(one["messages"] for one in _rows("noisy_prompts.jsonl") if one["id"] == row)
    assert isinstance(found, list)
    return found


def _text(row: str) -> str:
    return str(_messages(row)[0]["content"])


def test_every_noisy_prompt_has_its_expectation() -> None:
    assert [row["id"] for row in _rows("noisy_prompts.jsonl")] == list(NOISY)


@pytest.mark.parametrize("row", NOISY)
def test_a_noisy_prompt_comes_out_as_its_row_says(row: str) -> None:
    """C062, C065, C071"""
    messages = _messages(row)
    expected = json.dumps(messages, ensure_ascii=False)
    if "dashes" in NOISY[row]:  # these rows have no dashes in code, so that a blunt rule says what is right
        expected = DASH_RUN.sub("——", expected)
    wanted = json.loads(expected)
    for message in wanted:
        message["role"] = ROLES.get(message["role"].lower(), message["role"].lower())
        if isinstance(message["content"], str):
            message["content"] = CONTROL.sub("", message["content"])
    for is_ascii in (True, False):
        raw = json.dumps({"messages": messages}, ensure_ascii=is_ascii).encode()
        cleaned, counts = _clean(raw)
        assert counts == NOISY[row]
        assert read_object(cleaned).data == {"messages": wanted}
        assert _clean(cleaned) == (cleaned, {})


@pytest.mark.parametrize("row", ["n08", "n09"])
def test_dashes_behind_a_fence_are_cleaned_once_it_is_closed(row: str) -> None:
    """What keeps rows n08 and n09 as they are is their open fence, not their kind of dash."""
    text = _text(row)
    run = DASH_RUN.search(text)
    assert run is not None
    closed = f"{text[: run.start()]}{FENCE}\n{text[run.start() :]}"
    assert clean_text(closed, DEFAULT) == (closed.replace(run[0], "——"), {"dashes": 1})


@pytest.mark.parametrize("row", ["n14", "n15"])
def test_runs_of_whitespace_go_when_asked_but_code_keeps_its_own(row: str) -> None:
    """C065"""
    text = _text(row)
    result, counts = clean_text(text, COLLAPSE)
    assert counts.keys() == {"whitespace"}
    assert CODE.findall(result) == CODE.findall(text) != []
    prose = CODE.sub("code", result)
    assert re.search(r"\S(?: {3}|\u3000{2})|\n\n\n", prose) is None


# --- other collections ---


def _prompts() -> list[tuple[object, str]]:
    """Id and text of every user turn."""
    found: list[tuple[object, str]] = []
    for row in _rows("prompts.jsonl"):
        turns = row.get("turns", [])
        assert isinstance(turns, list)
        found += [(row["id"], text) for text in (str(row["prompt"]), *map(str, turns))]
    return found


def test_real_prompts_change_exactly_where_they_hold_a_fault() -> None:
    """C071, and as the issue asks: unchanged unless it holds a fault."""
    changed, faulty = set(), set()
    for row, text in _prompts():
        if clean_text(text, DEFAULT)[0] != text:
            changed.add(row)
        outside = CODE.sub("", text)
        if CONTROL.search(text) or DASH_RUN.search(outside) or LONG_RUN.search(outside):
            faulty.add(row)
    assert changed == faulty


def test_a_fault_before_a_real_prompt_is_all_that_changes() -> None:
    for row, text in _prompts():
        if clean_text(text, DEFAULT)[1]:
            continue
        assert clean_text(f"见———\x00\n\n{text}", DEFAULT) == (f"见——\n\n{text}", {"control": 1, "dashes": 1}), row
        collapsed, _ = clean_text(text, COLLAPSE)
        assert clean_text(collapsed, COLLAPSE) == (collapsed, {}), row


def test_real_prompts_pass_the_first_look() -> None:
    """Free when there is nothing to do."""
    for row, text in _prompts():
        if not clean_text(text, DEFAULT)[1]:
            body = {"messages": [{"role": "user", "content": text}]}
            assert not may_need_cleaning(json.dumps(body).encode(), DEFAULT), row
            assert not may_need_cleaning(json.dumps(body, ensure_ascii=False).encode(), DEFAULT), row


def test_naughty_strings_never_raise_and_settle_at_once() -> None:
    for row in _rows("corpora/naughty_strings.jsonl"):
        text = str(row["text"])
        for rules in (DEFAULT, COLLAPSE):
            once, counts = clean_text(text, rules)
            assert clean_text(once, rules) == (once, {}), row["id"]
            assert len(describe(text, rules)) == min(DESCRIBED_CHANGES, sum(counts.values()))

"""Text rules of prompt cleaning: what is cut, and above all what is left alone."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.config import Clean
from gateway.policy.cleantext import DESCRIBED_CHANGES, KEPT_RUN, Change, clean_text, describe

DEFAULT = Clean()
COLLAPSE = Clean(whitespace="collapse")
OFF = Clean(control=False, dashes=False, long_runs=False, roles=False)
FENCE = "```"
LONG = 600  # characters, more than the limit of 512


# --- control ---

CONTROL = {
    "NUL and vertical tab": ("a\x00b\x0bc", "abc", 2),
    "form feed and backspace": ("a\x0cb\x08", "ab", 2),
    "ANSI colours lose their escape": ("\x1b[31mred\x1b[0m", "[31mred[0m", 2),
    "DEL and C1": ("a\x7f\x80b\x9fc", "abc", 3),
    "one half of an emoji": ("cut \ud83d here", "cut \ufffd here", 1),
    "a byte that was no UTF-8": ("x\udcb0", "x\ufffd", 1),
    "two halves in the wrong order": ("\ude00\ud83d", "\ufffd\ufffd", 2),
    "a half before a whole": ("\ud83d\U0001f600", "\ufffd\U0001f600", 1),
    "halves parted by a control character": ("\ud83d\x00\ude00", "\ufffd\ufffd", 3),
}


@pytest.mark.parametrize("text, expected, count", CONTROL.values(), ids=CONTROL)
def test_control_characters_go_and_lone_halves_are_replaced(text: str, expected: str, count: int) -> None:
    """C048"""
    assert clean_text(text, DEFAULT) == (expected, {"control": count})


def test_two_halves_that_fit_are_the_character_they_spell() -> None:
    """C049"""
    assert clean_text("\ud83c\udf78", DEFAULT) == ("\U0001f378", {})
    assert clean_text("\ud83c\udf78\ud83d", DEFAULT) == ("\U0001f378\ufffd", {"control": 1})


def test_tab_line_feed_carriage_return_and_next_line_are_text() -> None:
    assert clean_text("a\tb\r\nc\x85d\u2028e", DEFAULT) == ("a\tb\r\nc\x85d\u2028e", {})


# --- dashes ---

DASHES = {
    "three em dashes": ("等等———我", "等等——我", 1),
    "a thousand": ("a" + "—" * 1000 + "b", "a——b", 1),
    "en dashes": ("–––", "——", 1),
    "horizontal bars": ("―――", "——", 1),
    "two- and three-em dashes": ("⸺⸺⸺ ⸻⸻⸻", "—— ——", 2),
    "small em dashes": ("﹘﹘﹘", "——", 1),
    "a mixed run is one": ("—–―⸺⸻﹘", "——", 1),
    "runs in prose": ("破折号————和――――和–––", "破折号——和——和——", 3),
    "table of contents": ("# 快速开始 —————————— 2\n## 离线 ————— 14", "# 快速开始 —— 2\n## 离线 —— 14", 2),
    "below a heading": ("标题\n———\n正文", "标题\n——\n正文", 1),
    "outside closed code": ("`x` ——— `y`", "`x` —— `y`", 1),
    "after a tick that opens nothing": ("a ` b ———", "a ` b ——", 1),
    "after ticks that nothing of their length closes": ("`` a ` ———", "`` a ` ——", 1),
    "after a closed fence": (f"{FENCE}py\nx\n{FENCE}\n———", f"{FENCE}py\nx\n{FENCE}\n——", 1),
    "after a fence in a quotation": (f"> {FENCE}\n> ———\n> {FENCE}\n———", f"> {FENCE}\n> ———\n> {FENCE}\n——", 1),
    "after inline code in three ticks": (f"{FENCE}a{FENCE}\n———", f"{FENCE}a{FENCE}\n——", 1),
    "on a nested list item": ("- a\n    - b———c\n\t1. d———", "- a\n    - b——c\n\t1. d——", 2),
    "on a line indented by three": ("   a———", "   a——", 1),
    "in the text of a table cell": ("| a ——— b |\n|---|", "| a —— b |\n|---|", 1),
    "before a sum": ("——— + 3", "—— + 3", 1),
    "between words and a bar": ("———x|", "——x|", 1),
    "below a line that only looks like front matter": ("---\n\na———\n---", "---\n\na——\n---", 1),
    "in front matter that never ends": ("---\na: b———\n", "---\na: b——\n", 1),
    "after a diff": ("@@ -1 +1 @@\n-a\n+b———\n尾———", "@@ -1 +1 @@\n-a\n+b———\n尾——", 1),
    "behind twenty ticks, which are no mark": ("`" * 20 + "\n———", "`" * 20 + "\n——", 1),
}  # fmt: skip


@pytest.mark.parametrize("text, expected, count", DASHES.values(), ids=DASHES)
def test_three_dashes_or_more_become_the_chinese_dash(text: str, expected: str, count: int) -> None:
    """C062, where the specification decides: runs of three or more lose their length, whatever they meant."""
    assert clean_text(text, DEFAULT) == (expected, {"dashes": count})


UNTOUCHED = {
    # C058
    "table with a rule": "| 名前 | 値 |\n|------|-----:|\n| a | 1 |",
    "grid table": "+-----+-----+\n| a   | b   |\n+=====+=====+",
    "box drawing": "├───src\n│   └─────main.py\n┏━━━━┓",
    "table with a cell of dashes": "| a | 1 |\n| b | ——— |\n|———|\n|:———:|———:|",
    "grid table of long dashes": "+————+————+\n———|———\n| 一 | ———",
    # C059
    "front matter, rule and setext heading": "---\ntitle: t\n---\n\nTitle\n-----\ntext\n\n---\n\nend",
    "dashes in front matter": "---\ntitle: 甲———乙\n...\ntext",
    # C060
    "diff": "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b",
    "diff that changes long dashes": "@@ -1,2 +1,2 @@ def f():\n # ———\n-a———\n+b————\n\\ No newline at end of file",
    "certificate": "-----BEGIN CERTIFICATE-----\nMIIB…\n-----END CERTIFICATE-----",
    "multipart boundary": "------WebKitFormBoundary7MA4",
    "command with four hyphens": "git log ----oneline",
    "comment of SQL": "--- note",
    "comment of HTML": "<!--- x --->",
    # C061
    "Japanese": "ラーメン、グラントウキョウノースタワー３６階、えーーーっ！、すごーーーーーい、ｺｰﾋｰ",
    # C062
    "short dashes and kaomoji": "「そんな――」と言って……。キタ━━━━(゜∀゜)━━━━!! 破折号——和– 〜〜〜",
    "hyphens, minus signs, other rules": "----- −−−−− －－－－ ───── ＿＿＿＿ =====",
    # C063
    "emoji": "👩‍👩‍👧‍👦 🏴󠁧󠁢󠁳󠁣󠁴󠁿 ❤️ 👨🏽‍💻 🏳️‍🌈 1️⃣",
    # C064
    "joiners and marks of direction": "می‌روم کتاب‌ها क्‍ष श्री‌मान \u06dd\u200e\u200f\u061c\u2066x\u2069\u202b\u202c",
    "joiner between ASCII letters": "ign\u200dore",
    "zero-width space and byte-order mark": "a\u200bb\ufeff",
    "other spaces, soft hyphen": "«\u00a0oui\u202f!\u00a0» 全角\u3000\u3000空白 co\u00adop",
    # C065
    "code, tabs and line breaks": "Fix:\n```python\ndef f():\n    if x:\n        return  'a  b'\n```\nMakefile:\n\tcc -c x.c\n"
    "hard break  \nnext\n    indented code",
    "log in columns": "12:00  INFO   started\n12:01  ERROR  failed\n\n\n\n",
    # code
    "fenced": f"看：\n{FENCE}\n———\n{FENCE}\n",
    "fenced with words after the language": f"{FENCE}js title=———\n———\n{FENCE}",
    "fenced in tildes around ticks": f"~~~ md ` ———\n{FENCE}\n———\n~~~\n",
    "fenced in more ticks": f"{FENCE}`md\n{FENCE}\n———\n{FENCE}\n———\n{FENCE}`\n",
    "fence that never closes": f"{FENCE}python\nx = 1\n\n———\n",
    "fence in a list item": f"- 例：\n\n  {FENCE}\n  ———\n  {FENCE}\n1. {FENCE}\n   ———\n   {FENCE}",
    "fence in a quotation": f"> {FENCE}\n> ———\n> {FENCE}",
    "fence behind words": f"Fix `x`:{FENCE}python\n———\n{FENCE}\n",
    "fence with Windows line ends": f"{FENCE}\r\n———\r\n{FENCE}\r\n",
    "fence around a diff": f"{FENCE}diff\n@@ -1 +1 @@\n———\n{FENCE}",
    "inline": "`———` 和 `` a ` ——— `` 和 ```———```",
    "indented": "text\n\n    x = '———'\n\tprintf(\"———\")\n \t———",
}


@pytest.mark.parametrize("text", UNTOUCHED.values(), ids=UNTOUCHED)
def test_what_only_looks_like_a_fault_comes_through_unchanged(text: str) -> None:
    """C058, C059, C060, C061, C062, C063, C064, C065"""
    result, counts = clean_text(text, DEFAULT)
    assert result is text
    assert counts == {}
    assert describe(text, DEFAULT) == []


# --- long runs ---

RUNS = [
    "-",
    "=",
    "_",
    "^",
    "~",
    "`",
    "*",
    ".",
    "…",
    "ー",
    "ｰ",
    "━",
    " ",
    "\u3000",
    "\t",
    "\n",
    "😀",
    "\u0300",
    "\u200d",
]


@pytest.mark.parametrize("character", RUNS, ids=[f"U+{ord(character):04X}" for character in RUNS])
@pytest.mark.parametrize("length", [513, 767, 1024, 100_000])
def test_a_character_repeated_beyond_the_limit_is_cut(character: str, length: int) -> None:
    """C069, C061"""
    text = f"前{character * length}後"
    assert clean_text(text, DEFAULT) == (f"前{character * KEPT_RUN}後", {"long_runs": 1})
    assert clean_text(character * length, DEFAULT) == (character * KEPT_RUN, {"long_runs": 1})


@pytest.mark.parametrize("character", RUNS, ids=[f"U+{ord(character):04X}" for character in RUNS])
def test_512_of_a_character_are_not_too_many(character: str) -> None:
    for text in (character * 512, f"前{character * 512}後", f"{'x' * 200}{character * 512}後"):
        assert clean_text(text, DEFAULT) == (text, {})


@pytest.mark.parametrize("offset", range(0, 600, 37))
def test_a_long_run_is_found_wherever_it_begins(offset: int) -> None:
    text = "ab" * offset + "=" * 513 + "-" * 513 + "c" + "=" * 512
    expected = "ab" * offset + "=" * KEPT_RUN + "-" * KEPT_RUN + "c" + "=" * 512
    assert clean_text(text, DEFAULT) == (expected, {"long_runs": 2})


def test_letters_and_digits_are_data_however_often_they_repeat() -> None:
    """C069, where the specification decides: a run of `A` is base64 or DNA."""
    for text in ("a" * 100_000, "A" * 513, "0" * 5000, "啊" * 600, "".join(map(chr, range(0x4E00, 0x4E00 + 20_000)))):
        assert clean_text(text, DEFAULT) == (text, {})


def test_long_runs_in_code_stay() -> None:
    for text in (
        f"{FENCE}\n{'=' * LONG}\n{FENCE}",
        f"{FENCE}\n{' ' * LONG}x",
        f"`{'=' * LONG}`",
        f"    {'=' * LONG}",
        f"---\na: b\n{'=' * LONG}\n---\n",
        f"@@ -1 +1 @@\n+{'=' * LONG}",
    ):
        assert clean_text(text, DEFAULT) == (text, {})


def test_an_indentation_beyond_the_limit_is_no_indentation() -> None:
    text = f"{' ' * LONG}x———"
    assert clean_text(text, DEFAULT) == (f"{' ' * KEPT_RUN}x——", {"dashes": 1, "long_runs": 1})


def test_dashes_that_fill_a_cell_are_still_cut_when_there_are_too_many() -> None:
    assert clean_text(f"| {'—' * LONG} |", DEFAULT) == (f"| {'—' * KEPT_RUN} |", {"long_runs": 1})
    padding = " " * LONG
    expected = {"dashes": 1, "long_runs": 1}
    assert clean_text(f"|{padding}——— |", DEFAULT) == (f"|{' ' * KEPT_RUN}—— |", expected)
    assert clean_text(f"| ———{padding}|", DEFAULT) == (f"| ——{' ' * KEPT_RUN}|", expected)


# --- whitespace ---

WHITESPACE = {
    "spaces between words": ("a   b    c", "a b c", 2),
    "ideographic spaces": ("#\u3000\u3000\u3000常见\u3000问题", "#\u3000常见\u3000问题", 1),
    "mixed spaces keep one of each kind": ("a  \u3000\u3000b", "a \u3000b", 2),
    "blank lines": ("a\n\n\n\nb", "a\n\nb", 1),
    "blank lines with spaces and Windows line ends": ("a\r\n \r\n\t\r\n\r\nb", "a\r\n\r\nb", 1),
    "blank lines at the beginning and the end": ("\n\n\na\n\n\n", "\na\n\n", 2),
    "a line break keeps two spaces": ("a     \nb    ", "a  \nb  ", 2),
    "a long run is one run": (f"a{' ' * LONG}b{chr(10) * LONG}c", "a b\n\nc", 2),
    "blank lines after a fence": (f"{FENCE}\n{FENCE}\n\n\n\na", f"{FENCE}\n{FENCE}\n\na", 1),
    "beside inline code": ("`a  b`  c", "`a  b` c", 1),
}  # fmt: skip


@pytest.mark.parametrize("text, expected, count", WHITESPACE.values(), ids=WHITESPACE)
def test_spaces_and_blank_lines_become_one_when_asked(text: str, expected: str, count: int) -> None:
    assert clean_text(text, COLLAPSE) == (expected, {"whitespace": count})


SPACED = {
    "code, tabs and line breaks": UNTOUCHED["code, tabs and line breaks"],
    "unclosed fence": f"{FENCE}\n\n\n\na  b",
    "blank lines between indented code": "    a\n\n\n    b\n\n\n\tc",
    "indentation": "  a\n   b\n\u3000\u3000段落",
    "columns after tabs": "a\t  b",
    "indentation in a quotation": ">     code",
    "diff": "@@ -1 +1 @@\n-a  b\n+a   b",
    "whitespace-only line": "a\n     \nb",
    "one of each": "a b\u3000c\n\nd\r\n\r\ne\u00a0\u00a0f",
}


@pytest.mark.parametrize("text", SPACED.values(), ids=SPACED)
def test_spaces_with_a_meaning_stay_even_when_asked_to_collapse(text: str) -> None:
    """C065"""
    assert clean_text(text, COLLAPSE) == (text, {})


# --- rules ---


def test_a_step_that_is_off_does_nothing() -> None:
    text = "\x00———" + "=" * LONG + "a  b"
    assert clean_text(text, OFF) == (text, {})
    assert clean_text(text, Clean(control=False))[1] == {"dashes": 1, "long_runs": 1}
    assert clean_text(text, Clean(dashes=False))[1] == {"control": 1, "long_runs": 1}
    assert clean_text(text, Clean(long_runs=False))[1] == {"control": 1, "dashes": 1}
    assert clean_text("—" * LONG, Clean(dashes=False)) == ("—" * KEPT_RUN, {"long_runs": 1})


# --- properties ---

# What can move the border of a protected place, and what gets cut.
PIECES = [
    "—", "———", "–", "―", "⸺", "﹘", " ", "  ", "    ", "\t", "\n", "\n", "\n\n\n", "\r\n", "`", "``", FENCE, "````",
    "~~~", "---", "...", "@@ -1 +1 @@", "@@  -1 +1 @@", "|", "+", "-", ":", "> ", "- ", "1. ", "a", "b", "py", "x: y\n",
    "\u3000", "\u3000\u3000", "\x00", "\ud83d", "\ude00", "=", "*", "\x85", "\\",
    *(character * LONG for character in " \n`~-—|\t:#ー"),
]  # fmt: skip
TEXTS = st.one_of(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.text(max_size=40))
RULES = st.builds(
    Clean, control=st.booleans(), dashes=st.booleans(), long_runs=st.booleans(), whitespace=st.sampled_from(["keep", "collapse"])
)  # fmt: skip


@given(TEXTS, RULES)
@settings(max_examples=400)
@example(f"{'`' * LONG} a `` ——— `` {'`' * 64}", DEFAULT)
@example(f"@@  -1 +1 @@\n {FENCE}\n a———b\n {FENCE}\n———", COLLAPSE)
@example(f"- {' ' * LONG}{FENCE}\n———", COLLAPSE)
@example(f"{FENCE} \u3000\n———", COLLAPSE)
def test_cleaning_twice_is_cleaning_once(text: str, rules: Clean) -> None:
    """C071: otherwise earlier turns change from request to request, and the prefix cache is lost."""
    once, _ = clean_text(text, rules)
    assert clean_text(once, rules) == (once, {})


@given(TEXTS, RULES)
def test_cleaning_only_shortens_and_keeps_letters_and_digits(text: str, rules: Clean) -> None:
    result, _ = clean_text(text, rules)
    assert len(result) <= len(text)
    assert [c for c in result if c.isalnum() and c != "ー"] == [c for c in text if c.isalnum() and c != "ー"]


@given(TEXTS, RULES)
def test_description_tells_as_many_changes_as_are_counted(text: str, rules: Clean) -> None:
    changes = describe(text, rules)
    assert len(changes) == sum(clean_text(text, rules)[1].values())
    assert all(first.offset <= second.offset and first.line <= second.line for first, second in pairwise(changes))
    assert all(change.before.isprintable() and change.after.isprintable() for change in changes)


ADVERSARIAL = {
    "spaces then x": ("", " ", "x"),
    "dash pairs": ("", "- ", ""),
    "long vowels": ("", "ー ー", ""),
    "blank lines": ("", "\n ", ""),
    "blank lines before code": ("", "\n", "    x"),
    "dash runs": ("", "——— ", ""),
    "dash lines": ("", "———\n", ""),
    "table cells": ("", "|———", ""),
    "ticks": ("", "`x", "———"),
    "ticks of all lengths that nothing closes": ("".join("`" * size + " " for size in range(15, 0, -1)), "x", "———"),
    "ticks at the end of all lengths": ("", "` ", "".join("`" * size + " " for size in range(15, 1, -1)) + "———"),
    "fences": ("", f"{FENCE}\n", "———"),
    "tildes": ("", "~~~ ", "———"),
    "diff heads": ("", "@@ -1 +1 @@\n———\n", ""),
    "quotation marks": ("", ">  ", "———"),
    "runs just too long": ("", "=" * 513 + "-" * 513, ""),
    "runs just short enough": ("", "=" * 512 + "-" * 512, ""),
    "front matter without end": ("---\na: b\n", "--\n", "———"),
    "control characters": ("", "a\x00", ""),
    "halves": ("", "\ud83da", ""),
}


@pytest.mark.parametrize("head, unit, rest", ADVERSARIAL.values(), ids=ADVERSARIAL)
@pytest.mark.parametrize("rules", [DEFAULT, COLLAPSE], ids=["default", "collapse"])
def test_four_times_the_text_takes_about_four_times_as_long(head: str, unit: str, rest: str, rules: Clean) -> None:
    """C070. A quadratic rule would take sixteen times as long; noise of a busy machine is allowed for."""
    small = _cost(head + unit * (60_000 // len(unit)) + rest, rules)
    large = _cost(head + unit * (240_000 // len(unit)) + rest, rules)
    assert large < 10 * max(small, 0.001)


def _cost(text: str, rules: Clean) -> float:
    """CPU seconds of one cleaning, the best of three."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        clean_text(text, rules)
        best = min(best, time.process_time() - start)
    return best


def test_two_megabytes_of_spaces_are_cut_in_a_moment() -> None:
    """C070"""
    text = " " * 2_000_000 + "x"
    assert clean_text(text, DEFAULT) == (" " * KEPT_RUN + "x", {"long_runs": 1})
    assert _cost(text, DEFAULT) < 1  # 0.02 s where it was measured


# --- describe ---


def test_description_names_line_offset_and_step_in_the_text_given() -> None:
    text = "one\x00\ntwo\x1b[0m ———— three\n" + "=" * LONG
    assert describe(text, DEFAULT) == [
        Change(1, 3, "control", "one\\x00\\ntwo\\x1b[0m ———", "one\\ntwo\\x1b[0m ———", 1),
        Change(2, 8, "control", "one\\x00\\ntwo\\x1b[0m ———— thr", "one\\x00\\ntwo[0m ———— thr", 1),
        Change(
            2, 13, "dashes", "ne\\x00\\ntwo\\x1b[0m ———— three\\n=====", "ne\\x00\\ntwo\\x1b[0m —— three\\n=====", 2
        ),
        Change(
            3, 24, "long_runs", " ———— three\\n========…(600 characters)", " ———— three\\n========…(64 characters)", 536
        ),
    ]


def test_description_of_a_half_shows_what_stands_in_its_place() -> None:
    assert describe("a\ud83d", DEFAULT) == [Change(1, 1, "control", "a\\ud83d", "a\ufffd", 0)]


def test_description_of_blank_lines_at_the_beginning_is_about_the_text_given() -> None:
    assert describe("\n\n\na", COLLAPSE) == [Change(1, 0, "whitespace", "\\n\\n\\na", "\\na", 2)]


def test_description_is_bounded() -> None:
    text = "\x00" * 1000
    assert len(describe(text, DEFAULT)) == DESCRIBED_CHANGES
    assert len(describe(text, DEFAULT, limit=3)) == 3


@pytest.mark.parametrize("whole", ["👩\u200d👩\u200d👧\u200d👦", "e\u0301", "🇩🇪", "1\ufe0f\u20e3", "क्\u200dष"])
def test_what_is_shown_around_a_change_tears_no_character_apart(whole: str) -> None:
    """E17 of the fault catalogue: whatever stands at the edge of the snippet is shown whole or not at all."""
    for padding in range(14):
        text = whole + "x" * padding + "————" + "x" * padding + whole
        (change,) = describe(text, Clean())
        left, _, right = change.before.partition("————")
        for side in (left, right):
            rest = side.replace(_shown(whole), "").replace("x", "")
            assert rest == ""


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)

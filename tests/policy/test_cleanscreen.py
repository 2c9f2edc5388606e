"""The look at raw bytes: clean bodies pass, and no body that cleaning would change ever does."""

from __future__ import annotations

import json
import time

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.config import Clean
from gateway.policy.clean import clean_body, may_need_cleaning
from gateway.policy.cleantext import clean_text
from gateway.wire.body import read_object

DEFAULT = Clean()
COLLAPSE = Clean(whitespace="collapse")
OFF = Clean(control=False, dashes=False, long_runs=False, roles=False)
CODE = r"if (a != b) { return \"x\"; }\n        // see http:\/\/h\/p?q=1\u0026r=2\n\\begin{f}\\frac \u2014\u2014 \ud83d\ude00"


def body(content: bytes, role: bytes = b"user") -> bytes:
    return b'{"model":"m","messages":[{"role":"%b","content":"%b"}]}' % (role, content)


CLEAN = {
    "words": b"Hello, what is the capital of France?\\nThanks",
    "Chinese": "帮我把“请尽快回复”改得更礼貌一些——谢谢……".encode(),
    "Chinese in escapes": json.dumps("帮我把“请尽快回复”改得更礼貌一些——谢谢……")[1:-1].encode(),
    "Korean in escapes": json.dumps("안녕하세요 세계")[1:-1].encode(),
    "emoji in escapes": json.dumps("hi 😀👩‍👧 there")[1:-1].encode(),
    "next line and French spaces": "a\u0085b\u00a0«c»".encode() + rb"\u0085\u0009\u000a",
    "code, LaTeX, paths, escaped slashes": CODE.encode(),
    "backslashes before letters": rb"\\b \\f \\\\f \\u0000 \\/",
    "an indentation and a rule": b" " * 100 + b"-" * 200 + b"=" * 240,
    "base64": b"A" * 5000 + b"QUJD" * 500,
    "rules in escapes": rb"\u3000" * 100,
    "escaped signs beside others": rb"a \u003c b > c \u0026\u0026 d" * 40,
    "slashes in the spelling of PHP": rb"http:\/\/h\/p " * 60,
    "digits in two spellings": rb"1\u0031" * 100,
    "three hyphens": "--- ─── ーーー".encode(),
}


@pytest.mark.parametrize("content", CLEAN.values(), ids=CLEAN)
def test_a_clean_prompt_is_not_looked_at_twice(content: bytes) -> None:
    assert not may_need_cleaning(body(content), DEFAULT)


FOUND = {
    "NUL": rb"a\u0000",
    "backspace and form feed in short": rb"\b\f",
    "form feed behind an escaped backslash": rb"\\\f",
    "escape in capitals": rb"\u001B[0m",
    "DEL": b"\x7f",
    "DEL in an escape": rb"\u007F",
    "C1": b"\xc2\x80",
    "C1 in an escape": rb"\u009f",
    "high half": rb"cut \ud83d here",
    "low half": rb"\uDE00",
    "two high halves": rb"\ud83d\ud83d\ude00",
    "two low halves": rb"\ud83d\ude00\ude00",
    "reversed": rb"\ude00\ud83d",
    "a half after an escaped backslash and a word that looks like one": rb"\\ud83d\ude00",
    "dashes": "———".encode(),
    "dashes in escapes": rb"\u2014\u2013\u2E3a",
    "dashes spelled both ways": "—\\u2014—".encode(),
    "small dashes": "﹘—﹘".encode(),
    "a run of one byte": b"=" * 513,
    "a run of three bytes": "━".encode() * 513,
    "a run of four bytes": "😀".encode() * 513,
    "a run of escapes": rb"\u2501" * 513,
    "a run of pairs of escapes": rb"\ud83d\ude00" * 513,
    "a run of short escapes": rb"\n" * 513,
    "a run of escapes in changing case": rb"\u30fc\u30FC" * 257,
    "a run in two spellings": b"=" + rb"\u003d=" * 256,
    "a run of ideographs in two spellings": "━\\u2501".encode() * 257,
    "a run of emoji in two spellings": "😀\\ud83d\\ude00".encode() * 257,
    "a run of slashes in two spellings": rb"/\/" * 257,
    "a run of slashes that are plain first": rb"//\/\/" + rb"\/" * 509,
    "a run of slashes that are escaped but one": b"/" + rb"\/" * 512,
    "a run of line feeds in two spellings": rb"\n\u000a" * 257,
    "a run in a body of many escapes": b"".join(rb"\u%04x" % code for code in range(0xA0, 0x120)) + "é".encode(),
}


@pytest.mark.parametrize("content", FOUND.values(), ids=FOUND)
def test_every_spelling_of_a_fault_is_found(content: bytes) -> None:
    assert may_need_cleaning(body(b"some text" + content + b"and more"), DEFAULT)
    assert not may_need_cleaning(body(content), OFF)


@pytest.mark.parametrize("offset", range(0, 480, 13))
@pytest.mark.parametrize("character", ["=", "━", "😀", "\\u2501", "\\n"])
def test_a_long_run_is_found_wherever_it_stands(character: str, offset: int) -> None:
    assert may_need_cleaning(b"x" * offset + character.encode() * 513, DEFAULT)


@pytest.mark.parametrize("role", ["human", "AI", "Bot", "User", "SYSTEM", "aSsistant"])
def test_a_role_to_rename_is_found(role: str) -> None:
    assert may_need_cleaning(body(b"hi", role.encode()), DEFAULT)
    assert may_need_cleaning(b'{"messages" : [ {"role"\n:\t"%b"} ] }' % role.encode(), DEFAULT)
    assert not may_need_cleaning(body(b"hi", role.encode()), Clean(roles=False))


def test_a_role_in_escapes_is_found_and_usual_ones_are_not() -> None:
    assert may_need_cleaning(body(b"hi", rb"hum\u0061n"), DEFAULT)
    for role in (b"user", b"assistant", b"system", b"developer", b"tool", b"function", b"narrator", b"humane"):
        assert not may_need_cleaning(body(b"hi", role), DEFAULT)


SPARE = [b"a  b", rb"a \u0020b", "　　".encode(), rb"\u3000\u3000", rb"a\n\n\nb", rb"a\r\n \t\r\n\u0009\u000ab", rb"\n\nb"]  # fmt: skip


@pytest.mark.parametrize("content", SPARE)
def test_spare_whitespace_is_found_only_when_asked(content: bytes) -> None:
    assert may_need_cleaning(body(content), COLLAPSE)
    assert not may_need_cleaning(body(content), DEFAULT)
    assert not may_need_cleaning(body(rb"a b\n\nc\u3000d"), COLLAPSE)


# --- properties ---

SHORT = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", '"': r"\"", "/": r"\/", "\\": r"\\"}
ALPHABET = 'ab /\\"\n\t\r-=—–⸺﹘ー━😀\u3000\x00\x08\x0c\x7f\x85\x80\ud83d\ude00é`|'


def spellings(character: str) -> list[bytes]:
    """Every way to write a character in JSON."""
    units = character.encode("utf-16-be", "surrogatepass")
    lower = "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)).encode()
    found = [lower, lower.upper().replace(b"\\U", b"\\u")]
    if character in SHORT:
        found.append(SHORT[character].encode())
    if character >= " " and character not in '"\\' and not "\ud800" <= character <= "\udfff":
        found.append(character.encode())
    return found


@st.composite
def strings(draw: st.DrawFn) -> bytes:
    """Text of stretches of one character, each in a repeating pattern of spellings."""
    pieces: list[bytes] = []
    for _ in range(draw(st.integers(0, 5))):
        character = draw(st.sampled_from(ALPHABET))
        pattern = draw(st.lists(st.sampled_from(spellings(character)), min_size=1, max_size=5))
        length = draw(st.one_of(st.integers(1, 4), st.integers(505, 620)))
        pieces += [pattern[index % len(pattern)] for index in range(length)]
    return b"".join(pieces)


RULES = st.builds(
    Clean, control=st.booleans(), dashes=st.booleans(), long_runs=st.booleans(), whitespace=st.sampled_from(["keep", "collapse"])
)  # fmt: skip


@given(strings(), RULES)
@settings(max_examples=500)
@example(b"=" * 100 + (rb"\u003d" + b"=" * 90) * 6, Clean(control=False))
@example(rb"\ud83d\u0000\ude00", DEFAULT)
def test_what_cleaning_would_change_is_never_missed(content: bytes, rules: Clean) -> None:
    raw = body(content)
    request = read_object(raw)
    document = request.document()
    counts = clean_body(document, request.data, rules, "chat")
    if counts:
        assert may_need_cleaning(raw, rules)
    else:
        assert document.apply() == raw
    messages = request.data["messages"]
    assert isinstance(messages, list)
    assert read_object(document.apply()).data["messages"][0]["content"] == clean_text(messages[0]["content"], rules)[0]  # type: ignore[index]


# --- cost ---


def _cost(raw: bytes, times: int) -> float:
    """CPU seconds of one look, the best of five."""
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(times):
            may_need_cleaning(raw, DEFAULT)
        best = min(best, (time.process_time() - start) / times)
    return best


def test_a_look_costs_little() -> None:
    """Free when there is nothing to do. Measured: 1.1 µs and 2.5 ms; ten times that is allowed for a busy machine."""
    turn = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}]})
    assert _cost(turn, 5000) < 15e-6
    document = orjson.dumps(
        {"messages": [{"role": "user", "content": "一段中文，a few words——and `code`。\n" * 25_000}]}
    )
    assert len(document) > 1 << 20
    assert _cost(document, 3) < 30e-3


@pytest.mark.parametrize(
    "unit", [b" ", rb"\u2014", rb"\ud83d\ude00", rb"\\", rb"\/", b"/", b"\xe2\x80\x94x", rb"\"role\":"]
)
def test_a_look_is_linear(unit: bytes) -> None:
    """C070"""
    small, large = (_cost(body(unit * (size // len(unit))), 1) for size in (250_000, 1_000_000))
    assert large < 10 * max(small, 0.001)


@pytest.mark.parametrize("letter", ["a", "0", "中", "ー", "é"])
def test_one_letter_repeated_a_million_times_is_screened_in_linear_time(letter: str) -> None:
    """C070: every place of a run was followed to its end, three seconds for 800 kB."""
    raw = ('{"messages":[{"role":"user","content":"' + letter * 1_000_000 + '"}]}').encode()
    began = time.perf_counter()
    may_need_cleaning(raw, Clean())
    assert time.perf_counter() - began < 1

"""What is taken as a request body, and what is refused with which words."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.wire.body import DECISIVE, MAX_DEPTH, RequestBody, read_object

SHARED = Path(os.environ.get("FIRSTTOKEN_SHARED", Path(__file__).parents[2].parent / "shared"))
SUITE = SHARED / "data" / "corpora" / "json_testsuite.jsonl"
FUZZ = SHARED / "data" / "corpora" / "json_fuzz_seeds.jsonl"


def refusal(raw: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_object(raw)
    assert caught.value.status == 400
    return caught.value


def rows(path: Path) -> list[tuple[str, str, bytes]]:
    if not path.exists():
        pytest.skip(f"{path.name} is not here: set FIRSTTOKEN_SHARED to the folder that has it")
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [(record["id"], record["expect"], base64.b64decode(record["bytes_b64"])) for record in records]


def outcome(raw: bytes) -> RequestBody | BadRequest:
    try:
        return read_object(raw)
    except BadRequest as error:
        return error


def test_a_plain_body_is_parsed_and_its_bytes_are_kept() -> None:
    raw = b'{"model": "m", "max_tokens": 5, "temperature": 0.10}'
    body = read_object(raw)
    assert body.raw is raw
    assert body.data == {"model": "m", "max_tokens": 5, "temperature": 0.1}


def test_the_document_of_a_body_edits_its_bytes() -> None:
    document = read_object(b'\xef\xbb\xbf{"model":"m","big":1e400}').document()
    document.set("model", b'"x"')
    assert document.apply() == b'{"model":"x","big":1e400}'


def test_a_byte_order_mark_is_taken_off() -> None:
    """C052 (a)."""
    body = read_object(b'\xef\xbb\xbf{"model":"m"}')
    assert body.raw == b'{"model":"m"}'
    assert body.data == {"model": "m"}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_other_encodings_are_refused_by_name(encoding: str) -> None:
    """C052 (b)."""
    marks = {"utf-16-be": b"\xfe\xff", "utf-32-be": b"\x00\x00\xfe\xff"}
    for mark in (b"", marks.get(encoding, b"")):
        error = refusal(mark + '{"model":"m"}'.encode(encoding))
        assert error.code == "invalid_json"
        assert encoding[:6].upper() in error.message


@pytest.mark.parametrize(
    "raw,said",
    [
        (b"", "empty"),
        (b" \r\n", "empty"),
        (b"[1]", "an array"),
        (b'"a"', "a string"),
        (b"1", "a number"),
        (b"1.5", "a number"),
        (b"true", "a boolean"),
        (b"null", "null"),
        (b'{"a":1', "a comma or a closing bracket is missing at line 1, column 7"),
        (b'{"a" 1}', "a colon is missing after a key at line 1, column 6"),
        (b'{\n"a":}', "a value is missing at line 2, column 5"),
        (b"{a:1}", "a key in double quotes is missing at line 1, column 2"),
        (b'{"a":1} x', "something follows after the end of the object at line 1, column 9"),
        (b'{"a":"b', "a string that begins here has no end at line 1, column 6"),
        (b'{"a":"b\n"}', "a control character in a string is not escaped at line 1, column 8"),
        (b'{"a":"\\x"}', "a backslash in a string begins no valid escape at line 1, column"),
        (b'{"a":"\xff"}', "not UTF-8 at byte 6"),
        (b'{"a":"\x00"}', "a control character"),
        (b'{"\x00', "a control character"),
        (b'{"temperature": NaN}', "`NaN` is no number in JSON"),
        (b'{"temperature": -Infinity}', "`-Infinity` is no number in JSON"),
    ],
)
def test_what_is_wrong_and_where_is_said(raw: bytes, said: str) -> None:
    """C047 (the request): never a 500."""
    error = refusal(raw)
    assert error.code == "invalid_json"
    assert said in error.message


def test_a_trailing_comma_is_refused_in_words_of_every_python() -> None:
    assert "at line 1, column" in refusal(b'{"a":1,}').message


@pytest.mark.parametrize(
    "raw,value",
    [
        (b'{"a":"cut \\ud83d here"}', "cut \ud83d here"),
        (b'{"a":"\\udcb0"}', "\udcb0"),
        (b'{"a":"\\ude00\\ud83d"}', "\ude00\ud83d"),
        (b'{"a":1e400}', float("inf")),
        (
            b'{"a":[1e400,-1e400,1.10,12345678901234567890123]}',
            [float("inf"), float("-inf"), 1.1, 12345678901234567890123],
        ),
        (b'{"a":%b}' % (b"9" * 5000), float("inf")),
        (b'{"a":"\\ud83c\\udf78"}', "\U0001f378"),
    ],
)
def test_half_surrogate_pairs_and_huge_numbers_pass(raw: bytes, value: object) -> None:
    """C045, C048, C049: the upstream decides."""
    body = read_object(raw)
    assert body.data == {"a": value}
    assert body.raw is raw


# --- Depth -------------------------------------------------------------------------------------------------------


def nested(levels: int, more: bytes = b"") -> bytes:
    """A body whose brackets go `levels` deep."""
    return b'{%b"a":%b1%b}' % (more, b"[" * (levels - 1), b"]" * (levels - 1))


@pytest.mark.parametrize("levels", [300, 500, MAX_DEPTH - 1, MAX_DEPTH])
def test_depth_within_the_limit_passes(levels: int) -> None:
    """C053."""
    assert read_object(nested(levels)).raw == nested(levels)


@pytest.mark.parametrize(
    "raw",
    [
        nested(MAX_DEPTH + 1),
        nested(1100),
        nested(1100, b'"s":"\\ud83d",'),
        nested(5000),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"s":"\\ud83d","a":' + b"[" * 100_000,
        b'{"s":1e400,"t":"]]]","a":[[]],"b":' + b"[{}," * 100_000,
    ],
)  # fmt: skip
def test_depth_beyond_the_limit_is_refused_at_once(raw: bytes) -> None:
    """C053: no RecursionError, and the worker is not held up."""
    elapsed = []
    for _ in range(5):
        started = time.perf_counter()
        error = refusal(raw)
        elapsed.append(time.perf_counter() - started)
        assert error.code == "json_too_deep"
    assert min(elapsed) < 0.010


def test_a_lenient_body_is_read_several_hundred_levels_deep() -> None:
    raw = nested(500, b'"s":"\\ud83d",')
    assert read_object(raw).raw is raw
    with contextlib.suppress(BadRequest):  # what `json` of Python 3.11 cannot hold is refused, and no crash
        assert read_object(nested(1000, b'"s":"\\ud83d",')).data


def test_many_brackets_side_by_side_are_not_deep() -> None:
    raw = b'{"a":[%b0]}' % (b"[]," * 5000)
    assert read_object(raw).raw is raw
    lenient = raw.replace(b"0]", b'"\\ud83d"]')
    assert read_object(lenient).raw is lenient


@pytest.mark.parametrize("raw", [b"{},{}", b"{}],[{}", b"],[", b"1]],[[1", b""])
def test_a_text_that_is_only_valid_inside_brackets_is_refused(raw: bytes) -> None:
    """The limit of levels is checked inside arrays of ours; they must not make a text valid."""
    long_enough = raw.replace(b"{}", b'{"a":[%b0]}' % (b"[]," * 2000)).replace(b"1", b"[%b0]" % (b"[]," * 2000))
    assert refusal(long_enough).code == "invalid_json"


# --- Duplicates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(DECISIVE))
def test_a_decisive_key_said_twice_is_refused(key: str) -> None:
    """C051: a policy must not check one value while the backend uses the other."""
    escaped = f"\\u{ord(key[0]):04x}{key[1:]}"
    for second in (key, escaped):
        error = refusal(f'{{"{key}":1,"x":[{{"{key}":3}}],"{second}":2}}'.encode())
        assert error.code == "duplicate_key"
        assert f"`{key}` stands 2 times" in error.message


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","tools":[{"model":1,"stream":2}],"stream":true}',
        b'{"model":"model","messages":[{"content":"model"}]}',
        b'{"mod\\u0065l":"m","stream":true}',
        b'{"x":1,"x":2,"model":"m"}',
        b'{"messages":[{"role":"user","role":"user","content":"a \\u0041"}],"model":"m"}',
    ],
)
def test_keys_elsewhere_and_keys_that_decide_nothing_may_come_twice(raw: bytes) -> None:
    assert read_object(raw).raw is raw


def test_which_keys_decide_is_the_callers_to_say() -> None:
    raw = b'{"model":1,"model":2,"x":1}'
    assert read_object(raw, frozenset()).data == {"model": 2, "x": 1}
    with pytest.raises(BadRequest):
        read_object(b'{"x":1,"x":2}', frozenset({"x"}))


# --- Corpora -----------------------------------------------------------------------------------------------------


def test_the_json_test_suite_as_whole_bodies() -> None:
    for name, expect, raw in rows(SUITE):
        result = outcome(raw)
        if expect == "n":
            assert isinstance(result, BadRequest), name
        if expect == "y" and raw.lstrip()[:1] == b"{":
            assert isinstance(result, RequestBody), name


def test_the_json_test_suite_as_a_value_inside_a_chat_body() -> None:
    for name, expect, value in rows(SUITE):
        raw = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"metadata":%b,"stream":true}' % value
        result = outcome(raw)
        if expect == "y":
            assert isinstance(result, RequestBody), name
            assert result.raw is raw
        elif expect == "n" and not _closes_its_own_value(value):
            assert isinstance(result, BadRequest), name


def _closes_its_own_value(value: bytes) -> bool:
    """True if the row is wrong only as a whole text: what follows it here makes it right."""
    try:
        json.loads(b'{"metadata":%b,"stream":true}' % value, parse_constant=_refuse)
    except ValueError:
        return False
    except RecursionError:
        return False
    return True


def _refuse(word: str) -> object:
    raise ValueError(word)


def test_the_fuzz_seeds_never_crash() -> None:
    for _, _, raw in rows(FUZZ):
        for body in (raw, b'{"model":"m","x":%b}' % raw):
            outcome(body)


@given(st.binary(max_size=80) | st.text('{}[]",:\\u0d8e1 \n', max_size=80).map(str.encode))
def test_anything_is_taken_or_refused_but_never_crashes(raw: bytes) -> None:
    result = outcome(raw)
    if isinstance(result, RequestBody):
        assert json.loads(raw.removeprefix(b"\xef\xbb\xbf")) == result.data
    else:
        assert result.message.endswith((".", "once.", "it."))

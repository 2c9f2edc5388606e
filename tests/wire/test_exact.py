"""JSON whose numbers come out as they were spelled."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.exact import Spelled, dumps_exactly, loads_exactly

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_what_is_read_and_written_is_the_same_text(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    assert json.loads(dumps_exactly(loads_exactly(text))) == json.loads(text)


@pytest.mark.parametrize(
    "text", [b"1.50", b"1e-05", b"-0", b"123456789012345678901234567890", b"1E400", b"NaN", b'[1.0,{"a":-7}]', b"999999999999999999"]
)  # fmt: skip
def test_a_number_keeps_its_spelling(text: bytes) -> None:
    assert dumps_exactly(loads_exactly(text)) == text


def test_lone_surrogates_are_written_as_escapes_wherever_they_are() -> None:
    """C050."""
    text = rb'{"\ud800":["\ude00",1.50,null,{"a":true}]}'
    assert dumps_exactly(loads_exactly(text)) == text


def test_equal_spellings_are_equal() -> None:
    assert Spelled(b"1.5") == Spelled(b"1.5") != Spelled(b"1.50")
    assert Spelled(b"1.5") != 1.5
    assert "1.5" in repr(Spelled(b"1.5"))


@pytest.mark.parametrize("text", [b"", b"{", b'"\xff"', b"nul"])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        loads_exactly(text)


def test_what_json_does_not_have_is_not_written() -> None:
    with pytest.raises(TypeError):
        dumps_exactly({1, 2})

"""Thinking inside the text: where it ends, whatever the cuts (C088)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.wire.answer import split_thinking
from gateway.wire.choice import Choice


def follow(pieces: list[str]) -> tuple[Choice, list[bool]]:
    choice = Choice()
    thinking = [choice.text(piece, now) for now, piece in enumerate(pieces, start=1)]
    choice.close()
    return choice, thinking


@pytest.mark.parametrize(
    "pieces, t_visible, thinking",
    [
        pytest.param(["<thi", "nk>plan</th", "ink>", "\n\nAnswer a < b"], 4, [False, True, True, False], id="cut tags"),
        pytest.param(["<think>", "plan"], 0, [True, True], id="never closed"),
        pytest.param(["use the <think> tag", " and </think>"], 1, [False, False], id="mentioned"),
        pytest.param(["\n", " <think>a", "</think>", "b"], 4, [False, True, True, False], id="blanks before"),
        pytest.param(["<think>a</think>b"], 1, [True], id="all in one"),
        pytest.param(["<think>a</think>", "\n\n", "\t"], 0, [True, False, False], id="only blanks after"),
        pytest.param(["plan", " more</th", "ink>\n", "Answer"], 4, [False, False, True, False], id="only the close"),
        pytest.param(["</think>", "Answer"], 2, [True, False], id="close at the start"),
        pytest.param(["plan</think>Answer"], 1, [True], id="close in the first piece"),
        pytest.param(["<", "b>bold"], 1, [False, False], id="another tag"),
        pytest.param(["<thinker>"], 1, [False], id="a longer tag"),
        pytest.param(["<thi"], 1, [False], id="the beginning of a tag and no more"),
        pytest.param(["\n", "\n"], 0, [False, False], id="blank"),
        pytest.param(["a", " <", "b <", "/", "c"], 1, [False] * 5, id="lone brackets"),
        pytest.param(["a", "</think>", "b", "</think>", "c"], 3, [False, True, False, False, False], id="two closes"),
    ],
)
def test_visible_text_begins_after_the_thinking(pieces: list[str], t_visible: int, thinking: list[bool]) -> None:
    """C088, its four variants and their relatives."""
    choice, found = follow(pieces)
    assert choice.t_visible == t_visible
    assert found == thinking
    assert choice.has_reasoning is any(thinking)


def test_a_late_close_is_noted() -> None:
    assert follow(["plan", "</think>", "x"])[0].is_late_close
    assert not follow(["<think>plan", "</think>", "x"])[0].is_late_close


def test_reasoning_fields_settle_the_text_at_once() -> None:
    """A server that separates thoughts leaves none in the text, so a closing tag there is text."""
    choice = Choice()
    choice.reason()
    choice.text("Answer", 5)
    assert choice.is_settled
    assert not choice.text("</think>", 6)
    assert choice.t_visible == 5


def test_reasoning_after_the_text_began_settles_it() -> None:
    choice = Choice()
    choice.text("Answer", 5)
    assert not choice.is_settled
    choice.reason()
    assert choice.is_settled


def test_a_tool_call_keeps_its_time_when_a_close_comes_late() -> None:
    choice = Choice()
    choice.has_tool = True
    choice.see(3)
    choice.see(4)
    choice.text("plan</think>", 5)
    assert choice.t_visible == 3


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "think>", "<", ">", "a", " ", "\n", "think", "<b>"]),
    max_size=12,
)


@given(PIECES, st.lists(st.integers(0, 200), max_size=10))
@example(["<", "<think>", "a"], [])
def test_any_split_agrees_with_the_whole_text(pieces: list[str], offsets: list[int]) -> None:
    text = "".join(pieces)
    thinking, answer = split_thinking(text)
    edges = [0, *sorted(offset % (len(text) + 1) for offset in offsets), len(text)]
    for split in (pieces, list(text), [text[a:b] for a, b in pairwise(edges)]):
        choice, _ = follow(split)
        assert bool(choice.t_visible) is bool(answer.strip())
        assert len(choice.carry) < len("</think>")
        if thinking:
            assert choice.has_reasoning

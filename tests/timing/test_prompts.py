"""Prompts measured from the bytes of a body, and the index of what an upstream has seen."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.timing.prompts import BLOCK, MAX_BLOCKS, PrefixIndex, Prompt, measure

# Every kind of character that is counted its own way, and no ranges whose kind is a matter of taste.
LETTERS = st.text(st.sampled_from('aZ é{"\n\t/—中文，カ한😀𠀀'), max_size=300)


def is_cjk(character: str) -> bool:
    return character in "中文，カ한😀𠀀"


def body(content: str, **before: object) -> bytes:
    return json.dumps({**before, "messages": [{"role": "user", "content": content}], "n": 1}).encode()


@given(LETTERS, st.booleans())
def test_an_escaped_body_counts_as_the_same_text_in_utf_8(text: str, is_escaped: bool) -> None:
    found = measure(json.dumps(text, ensure_ascii=is_escaped).encode())
    cjk = sum(map(is_cjk, text))
    assert (found.cjk, found.other) == (cjk, len(text) - cjk + 2)


@given(st.binary(max_size=2000))
def test_any_bytes_can_be_measured(raw: bytes) -> None:
    found = measure(raw)
    assert found.cjk >= 0
    assert found.other >= 0
    assert found.tokens >= 1
    assert len(found.blocks) <= len(raw) // BLOCK


@pytest.mark.parametrize("text", ["中文" * 60_000, "a中" * 60_000, "x" * 400_000 + "é" * 30_000])
def test_a_long_escaped_body_is_counted_from_a_sample_within_a_percent(text: str) -> None:
    found = measure(json.dumps(text).encode())
    assert found.cjk == pytest.approx(sum(map(is_cjk, text)), rel=0.01, abs=1)
    assert found.cjk + found.other == pytest.approx(len(text), rel=0.01)


def test_an_image_that_never_ends_is_counted_as_text() -> None:
    raw = b'{"messages": [{"url": "data:image/png;base64,' + b"A" * 5000
    assert measure(raw).other == len(raw)


def test_settings_before_the_messages_do_not_lose_the_prefix() -> None:
    assert measure(body("x" * 3000, max_tokens=5)).blocks == measure(body("x" * 3000, max_tokens=999, seed=1)).blocks


@pytest.mark.parametrize("key", ["messages", "prompt", "input", "something"])
def test_blocks_start_at_the_value_that_holds_the_prompt(key: str) -> None:
    first, second = (b'{"model": "%b", "%b": "' % (model, key.encode()) + b"x" * 2000 for model in (b"a", b"b"))
    assert (measure(first).blocks == measure(second).blocks) is (key != "something")


def test_a_change_in_the_text_changes_all_blocks_from_there_on() -> None:
    first, second = measure(body("a" * 1500 + "b" * 1500)).blocks, measure(body("a" * 1500 + "c" * 1500)).blocks
    same = [one == other for one, other in zip(first, second, strict=True)]
    assert same == sorted(same, reverse=True)
    assert any(same)
    assert not all(same)


def test_a_very_long_prompt_is_hashed_up_to_a_bound() -> None:
    assert len(measure(b"x" * (BLOCK * (MAX_BLOCKS + 10))).blocks) == MAX_BLOCKS


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=40), st.integers(1, 20))
def test_what_an_index_knows_of_a_prompt_is_always_its_beginning(sent: list[tuple[int, int]], bound: int) -> None:
    """Against a look at every block; the index itself halves."""
    index = PrefixIndex(bound)
    for family, length in sent:
        blocks = [family * 1000 + i + 1 for i in range(length)]
        prompt = Prompt.of_tokens(length * 512, blocks)
        alone = [index.cached_share(Prompt.of_tokens(512, [block])) > 0 for block in blocks]
        assert alone == sorted(alone, reverse=True)
        assert index.cached_share(prompt) == pytest.approx(sum(alone) / length)
        index.add(prompt)
        assert len(index) <= bound


def test_models_of_one_upstream_do_not_share_a_prefix() -> None:
    index, prompt = PrefixIndex(), measure(body("x" * 3000))
    index.add(prompt, salt=1)
    assert index.cached_share(prompt, salt=1) > 0.8
    assert index.cached_share(prompt, salt=2) == 0
    index.clear()
    assert index.cached_share(prompt, salt=1) == 0


def test_an_index_takes_the_size_of_the_servers_cache() -> None:
    index = PrefixIndex(1000)
    prompt = Prompt.of_tokens(900 * 512, range(1, 901))
    index.add(prompt)
    for _ in range(60):
        index.learn(expected_tokens=100, cached_tokens=50)
    index.add(prompt)
    small = len(index)
    assert small < 400
    for _ in range(60):
        index.learn(expected_tokens=100, cached_tokens=150)
    index.add(prompt)
    assert small < len(index) <= 1000


def test_a_prompt_shows_its_size_in_a_line() -> None:
    assert repr(measure("中a".encode())) == "Prompt(1 CJK and 1 other characters, about 1 tokens)"

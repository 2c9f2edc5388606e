"""The usage event that only the gateway asked for is taken out; every other byte goes on."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire import strip
from gateway.wire.strip import UsageStripper

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"\\"usage\\" and \\"choices\\":[]"}}]}\n\n'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1},"metrics":{"queue_time_ms":1}}\n\n'
)
DONE = b"data: [DONE]\n\n"
FILTER = b'data: {"choices":[],"prompt_filter_results":[]}\n\n'
PING = b": keep-alive\n\n"


def strip_all(pieces: list[bytes]) -> bytes:
    stripper = UsageStripper()
    return b"".join([stripper.feed(piece) for piece in pieces]) + stripper.finish()


def test_usage_event_is_removed_and_the_rest_is_byte_identical() -> None:
    """C096 (b)."""
    stream = ROLE + TEXT + PING + STOP + USAGE + DONE
    kept = ROLE + TEXT + PING + STOP + DONE
    assert strip_all([stream]) == kept
    assert strip_all([ROLE, TEXT, PING, STOP, USAGE, DONE]) == kept
    for place in range(len(stream) + 1):
        assert strip_all([stream[:place], stream[place:]]) == kept
    assert strip_all([stream[place : place + 1] for place in range(len(stream))]) == kept


@pytest.mark.parametrize("read", [TEXT, ROLE, STOP + DONE, FILTER, PING, TEXT * 3])
def test_whole_events_come_back_as_the_same_object(read: bytes) -> None:
    assert UsageStripper().feed(read) is read


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"])
def test_every_line_end_is_understood(end: bytes) -> None:
    stream = b"".join(event[:-2] + end for event in (TEXT, STOP, USAGE, DONE))
    kept = b"".join(event[:-2] + end for event in (TEXT, STOP, DONE))
    for place in range(len(stream) + 1):
        assert strip_all([stream[:place], stream[place:]]) == kept


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[],"usage":null}\n\n',
        b'data: {"choices":[],"usage":{"a":1},"error":{"message":"x"}}\n\n',
        b'data: {"choices":[{"delta":{"content":"a"}}],"usage":{"completion_tokens":1}}\n\n',
        b'data: {"choices":[],"usage":\n\n',
        b'data: "usage" "choices": []\n\n',
        b'data: ["usage", {"choices": []}]\n\n',
        b': "usage" "choices":[]\n\n',
    ],
)
def test_what_only_looks_like_usage_stays(event: bytes) -> None:
    assert strip_all([event]) == event
    assert strip_all([event[:9], event[9:]]) == event


@pytest.mark.parametrize("spelling", [b'"choices": [ ]', b'"choices" :[]', b'"choices":\t[]'])
def test_spaces_inside_the_event_do_not_hide_it(spelling: bytes) -> None:
    assert strip_all([USAGE.replace(b'"choices":[]', spelling) + DONE]) == DONE


def test_an_event_in_part_is_held_and_a_comment_line_is_not() -> None:
    stripper = UsageStripper()
    assert stripper.feed(TEXT[:20]) == b""
    assert stripper.feed(TEXT[20:] + b": ping\n") == TEXT + b": ping\n"
    assert stripper.feed(b"\n" + USAGE[:30]) == b""
    assert stripper.feed(USAGE[30:] + DONE) == b"\n" + DONE


def test_an_open_last_event_is_given_back_unless_it_is_usage() -> None:
    """C007 (b): the usage frame ends with a single LF, then the stream ends."""
    assert strip_all([STOP, USAGE[:-1]]) == STOP
    assert strip_all([STOP, TEXT[:-1]]) == STOP + TEXT[:-1]


def test_it_gives_up_on_an_event_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """C010: bounded, and the bytes still reach the caller."""
    monkeypatch.setattr(strip, "MAX_HELD_BYTES", 100)
    stripper = UsageStripper()
    assert stripper.feed(b"data: " + b"x" * 90) == b""
    assert stripper.feed(b"x" * 20) == b"data: " + b"x" * 110
    assert stripper.feed(USAGE) is USAGE
    first = UsageStripper()
    assert first.feed(TEXT + b"y" * 200) == TEXT + b"y" * 200


EVENTS = st.sampled_from([ROLE, TEXT, STOP, DONE, FILTER, PING, USAGE, b"\n", b"event: x\ndata: y\n\n", b"id: 1\n\n"])


@given(st.lists(EVENTS, max_size=8), st.lists(st.integers(0, 5000), max_size=6), st.sampled_from([b"\n", b"\r\n"]))
def test_any_split_removes_the_usage_and_nothing_else(events: list[bytes], offsets: list[int], end: bytes) -> None:
    stream = b"".join(events).replace(b"\n", end)
    kept = b"".join(event for event in events if event is not USAGE).replace(b"\n", end)
    edges = [0, *sorted(offset % (len(stream) + 1) for offset in offsets), len(stream)]
    assert strip_all([stream[a:b] for a, b in pairwise(edges)]) == kept

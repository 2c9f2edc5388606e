"""Event streams: the WHATWG rules, every split, and the bound."""

from __future__ import annotations

import base64
import json
import os
import tracemalloc
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire import sse
from gateway.wire.sse import Event, EventSplitter, until_done

SHARED = Path(os.environ.get("FIRSTTOKEN_SHARED", Path(__file__).parents[3] / "shared"))
CORPORA = sorted((SHARED / "data" / "corpora").glob("sse_*.jsonl"))

CHUNK = b'{"choices":[{"index":0,"delta":{"content":"x"}}]}'


def feed_all(pieces: list[bytes]) -> tuple[list[Event], EventSplitter]:
    splitter = EventSplitter()
    return [event for piece in pieces for event in splitter.feed(piece)], splitter


def cut(data: bytes, offsets: list[int]) -> list[bytes]:
    edges = [0, *sorted(offset % (len(data) + 1) for offset in offsets), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def single_bytes(data: bytes) -> list[bytes]:
    return [data[place : place + 1] for place in range(len(data))]


def corpus_rows() -> list[object]:
    rows = [json.loads(line) for path in CORPORA for line in path.read_text("utf-8").split("\n") if line]
    return [pytest.param(row, id=row["id"]) for row in rows]


@pytest.mark.skipif(not CORPORA, reason="the shared corpora are not here; set FIRSTTOKEN_SHARED")
@pytest.mark.parametrize("row", corpus_rows() or [None])
def test_public_corpora_give_the_events_the_standard_gives(row: dict[str, object]) -> None:
    """C005, C006, C19 of the fault catalogue: whole, byte by byte, at the source's cuts, at random."""
    data = base64.b64decode(str(row["bytes_b64"]))
    events = row["events"]
    assert isinstance(events, list)
    expected = [(e["event"].encode(), e["data"].encode()) for e in events]
    seeded = Random(str(row["id"]))
    splits = row.get("splits") or []
    assert isinstance(splits, list)
    at_random = [cut(data, [seeded.randrange(len(data)) for _ in range(4)]) for _ in range(10)]
    for pieces in ([data], single_bytes(data), cut(data, splits), *at_random):
        found, splitter = feed_all(pieces)
        assert [(name or b"message", text) for name, text in found] == expected
        assert splitter.comments == len(row["comments"])  # type: ignore[arg-type]
        assert not splitter.overflowed


STREAMS = [
    pytest.param(b'data:{"a":1}\r\n\r\ndata:{"b":2}\r\n\r\n', id="C006a CRLF, no space"),
    pytest.param(b'data: {"a":1}\r\rdata: {"b":2}\r\r', id="C006b CR"),
    pytest.param(b'data: {"a":1}\r\n\ndata: {"b":2}\n\r\n', id="C006d mixed"),
    pytest.param(b'\xef\xbb\xbfdata: {"a":1}\n\ndata: {"b":2}\n\n', id="BOM"),
    pytest.param(b': x\n\ndata: {"a":1}\n\n: PROCESSING\n\nretry: 5\ndata: {"b":2}\n\n', id="C005 comments"),
    pytest.param(b'\n\n\ndata: {"a":1}\n\n\n\n\ndata: {"b":2}\n\n', id="blank lines"),
    pytest.param(b'data: {"a":\ndata: 1}\n\ndata: {"b":2}\n\n', id="two data lines"),
]


@pytest.mark.parametrize("stream", STREAMS)
def test_the_same_two_events_come_out_of_every_spelling_and_every_single_cut(stream: bytes) -> None:
    """C006: four line-end styles, exactly two events each, no phantom one."""
    for place in range(len(stream) + 1):
        found, splitter = feed_all([stream[:place], stream[place:]])
        assert [json.loads(data) for _, data in found] == [{"a": 1}, {"b": 2}]
        assert not splitter.is_open


def test_a_line_feed_after_a_carriage_return_in_the_next_read_makes_no_event() -> None:
    """C006 (c): CR and LF in separate writes."""
    found, splitter = feed_all([b"data: A\r", b"\n\r", b"\n", b"data: B\r", b"\n\r", b"\n"])
    assert found == [(b"", b"A"), (b"", b"B")]
    assert not splitter.is_open


def test_unicode_line_separators_are_text() -> None:
    """C002: LS, NEL, VT, FF end no line."""
    text = "a\u2028b\x85c\x0bd\x0ce".encode()
    assert feed_all([b"data: " + text + b"\n\n"])[0] == [(b"", text)]
    assert feed_all([b"event: x\ndata: " + text + b"\r\n\r\n"])[0] == [(b"x", text)]


@pytest.mark.parametrize(
    "block, expected",
    [
        (b"data\n\n", [(b"", b"")]),
        (b"data: \n\n", [(b"", b"")]),
        (b"data:\n\n", [(b"", b"")]),
        (b"event: ping\n\n", []),
        (b"id: 7\n\n", []),
        (b"event: done\ndata: x\n\n", [(b"done", b"x")]),
        (b"data: x\nevent: done\n\n", [(b"done", b"x")]),
        (b"event: done\n\ndata: x\n\n", [(b"", b"x")]),
        (b"event: a\ndata: x\n\nevent: b\ndata: y\n\n", [(b"a", b"x"), (b"b", b"y")]),
        (b"event: a\ndata: x\ndata: y\n\n", [(b"a", b"x\ny")]),
        (b"data:  two\n\n", [(b"", b" two")]),
        (b"data: x\n\nnot a field\n\n", [(b"", b"x")]),
        (b"data: 1\ndata: 2\ndata: 3\n\n", [(b"", b"1\n2\n3")]),
        (b"\n\n", []),
    ],
)
def test_block_gives_its_event(block: bytes, expected: list[Event]) -> None:
    assert feed_all([block])[0] == expected
    assert feed_all(single_bytes(block))[0] == expected


def test_comments_are_counted_and_are_no_events() -> None:
    """C003: a bare colon is a keep-alive."""
    found, splitter = feed_all([b":\n\n", b":\n\n", b": ping - now\n\n"])
    assert found == []
    assert splitter.comments == 3
    assert not splitter.saw_id


def test_an_id_line_is_noticed() -> None:
    """C004: after an id some clients take a lone blank line for an event."""
    _, splitter = feed_all([b"id: 7\ndata: x\n\n"])
    assert splitter.saw_id


@pytest.mark.parametrize(
    "data, is_open",
    [
        (b"", False),
        (b"data: x\n\n", False),
        (b"data: x\n", True),
        (b"data: x\n\nd", True),
        (b": ping\n", True),
        (b"data: x\r\n\r", False),
        (b"event: a\n", True),
    ],
)
def test_is_open_tells_a_partly_relayed_event(data: bytes, is_open: bool) -> None:
    assert feed_all([data])[1].is_open is is_open
    assert feed_all(single_bytes(data))[1].is_open is is_open


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"data: x\n", [(b"", b"x")]),
        (b"data: x", [(b"", b"x")]),
        (b"data: x\r", [(b"", b"x")]),
        (b"event: done\ndata: x", [(b"done", b"x")]),
        (b"data: x\n\n", []),
        (b": comment", []),
        (b"", []),
    ],
)
def test_finish_gives_the_event_that_lacks_its_blank_line(data: bytes, expected: list[Event]) -> None:
    """C007 (b): usage in a last frame that ends with a single LF."""
    splitter = EventSplitter()
    splitter.feed(data)
    assert splitter.finish() == expected
    assert splitter.finish() == []


FRAGMENTS = st.sampled_from([
    b"data: ", b"data:", b"data", b"event: e", b"id: 1", b": c", b"\n", b"\n\n", b"\r", b"\r\n", b"\r\n\r\n", b"x",
    b"data: {}\n\n", b"event: e\ndata: {}\n\n", "é\u2028".encode(), b"\xef\xbb\xbf", b"\x00", b":",
])  # fmt: skip


@given(st.lists(FRAGMENTS, max_size=30), st.lists(st.integers(0, 10_000), max_size=8))
def test_any_split_gives_the_same_as_one_read(fragments: list[bytes], offsets: list[int]) -> None:
    data = b"".join(fragments)
    whole, at_once = feed_all([data])
    for pieces in (cut(data, offsets), single_bytes(data)):
        found, splitter = feed_all(pieces)
        assert found == whole
        assert (splitter.is_open, splitter.comments, splitter.saw_id) == (
            at_once.is_open, at_once.comments, at_once.saw_id,
        )  # fmt: skip
        assert splitter.finish() == feed_all([data])[1].finish()


def test_an_event_over_the_bound_ends_the_reading_but_not_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """C010: dropped at the same byte for every split, and nothing comes after it."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    fits = b"data: " + b"y" * 94 + b"\n\n"
    long = b"data: " + b"x" * 95 + b"\n\n"
    for pieces in ([fits + long + fits], single_bytes(fits + long + fits), [fits, long, fits]):
        found, splitter = feed_all(pieces)
        assert found == [(b"", b"y" * 94)]
        assert splitter.overflowed
        assert splitter.feed(fits) == []
        assert splitter.finish() == []


@pytest.mark.parametrize("line", [b"data: xxxxxxx\n", b"event: " + b"e" * 101, b": " + b"c" * 101, b"data\n" * 120])
def test_many_lines_long_names_and_long_comments_are_bounded_too(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    assert feed_all([line] * 20)[1].overflowed


def test_comments_alone_never_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    assert not feed_all([b": ping\n"] * 100)[1].overflowed


def test_an_endless_line_costs_bounded_memory() -> None:
    """C010: 64 MiB without a newline; the buffer is dropped at the bound."""
    splitter = EventSplitter()
    read = b"x" * 65536
    tracemalloc.start()
    splitter.feed(b"data: ")
    for _ in range(1024):
        assert splitter.feed(read) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert splitter.overflowed
    assert peak < 2 * sse.MAX_EVENT_BYTES + 1024 * 1024


def test_a_hundred_thousand_events_in_one_read_all_come_out() -> None:
    """Fault-catalogue C18."""
    found, _ = feed_all([(b"data: " + CHUNK + b"\n\n") * 100_000])
    assert len(found) == 100_000
    assert found[-1] == (b"", CHUNK)


@pytest.mark.parametrize(
    "data, kept",
    [
        (b"data: [DONE]\n\n", b"data: [DONE]\n\n"),
        (b"data: {}\n\ndata: [DONE]\n\ndata: late\n\n", b"data: {}\n\ndata: [DONE]\n\n"),
        (b'data: {"content":"[DONE]"}\n\n', b'data: {"content":"[DONE]"}\n\n'),
        (b"data: {}\n\ndata: [DONE]\n", b"data: {}\n\ndata: [DONE]\n"),
    ],
)
def test_nothing_is_kept_behind_the_end_mark(data: bytes, kept: bytes) -> None:
    """C11 and C12 of the fault catalogue; the words of an answer are no mark."""
    assert until_done(data) == kept

"""The caller of `firsttoken demo` that takes 202: what it asks, what it is told, and what it says of that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
import uvloop

from gateway.cli import CommandError
from gateway.cli.comeback import Comeback, Note, come_back
from gateway.cli.phrases import Language
from gateway.cli.scenes import ACTS, Take, play
from gateway.cli.story import told_to

NOTES = (Note(100.0, 202, 2400, "queued"), Note(1300.0, 202, None, "prefill"), Note(2500.0, 200, None, None))


@pytest.mark.parametrize(
    "language, back, said",
    [
        ("en", None, []),
        ("en", Comeback(0.1, NOTES[-1:], 7148, None), ["200 after 2.50 s: the answer, 7,148 bytes"]),
        (
            "en",
            Comeback(0.1, NOTES, 7148, 7148),
            [
                "202 after 0.10 s: about 2.40 s to go (queued)",
                "202 after 1.30 s: no estimate (prefill)",
                "200 after 2.50 s: the answer, 7,148 bytes",
                "its stream, read from the start: 7,148 bytes, the same as the poll's",
            ],
        ),
        (
            "zh",
            Comeback(0.1, NOTES, 7148, 7148),
            [
                "0.10 秒后收到 202：大约还要 2.40 秒（排队中）",
                "1.30 秒后收到 202：暂时无法估计（预填充中）",
                "2.50 秒后收到 200：完整回答，7,148 字节",
                "从头读它的流：7,148 字节，与轮询得到的完全一致",
            ],
        ),
    ],
)
def test_the_lines_of_a_comeback_say_no_more_than_happened(
    language: Language, back: Comeback | None, said: list[str]
) -> None:
    assert told_to(Take("pending", {}, 0, "words", back), language, "other words") == said


# -- the caller ---------------------------------------------------------------------------------------------------------

PROMISE = b'{"poll_url": "/p", "stream_url": "/p", "estimation_ms": 10, "phase": "prefill"}'


def came_back(answer_to: Callable[[bytes], tuple[int, bytes]]) -> Comeback:
    """One caller at a server that answers request heads, one on each connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status, body = answer_to(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        writer.close()

    async def call() -> Comeback:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return (await come_back(port, "/v1/chat/completions", b"{}", "id", 0.5))[1]

    return uvloop.run(call())


def test_it_opts_in_polls_long_and_follows_the_stream() -> None:
    heads: list[bytes] = []

    def answer_to(head: bytes) -> tuple[int, bytes]:
        heads.append(head.lower())
        is_poll = head.startswith(b"GET") and b"event-stream" not in head
        is_early = head.startswith(b"POST") or (is_poll and sum(b"get /p?wait" in seen for seen in heads) < 3)
        return (202, PROMISE) if is_early else (200, b"data: [DONE]\n\n")

    back = came_back(answer_to)
    assert b"prefer: respond-async, wait=0.500\r\n" in heads[0]
    assert [(note.status, note.left_ms, note.phase) for note in back.notes] == [
        *[(202, 10, "prefill")] * 3,
        (200, None, None),
    ]
    assert back.stream_bytes == back.answer_bytes == 14
    assert sum(head.startswith(b"get /p?wait=0.500 ") for head in heads) == 3
    assert sum(b"accept: text/event-stream" in head for head in heads) == 1


def test_an_answer_within_the_wait_is_taken_as_it_is() -> None:
    back = came_back(lambda head: (200, b"data: [DONE]\n\n"))
    assert ([note.status for note in back.notes], back.stream_bytes) == ([200], None)


def test_a_stream_that_differs_from_the_poll_is_told() -> None:
    def answer_to(head: bytes) -> tuple[int, bytes]:
        return (202, PROMISE) if head.startswith(b"POST") else (200, b"a" if b"event-stream" in head else b"b")

    with pytest.raises(CommandError, match="was not what its poll brought"):
        came_back(answer_to)


# -- and the gateway ----------------------------------------------------------------------------------------------------


def test_what_it_is_told_falls_with_each_poll() -> None:
    """At full speed: in a tenth of the time all estimates are the least one that is told.

    The best of three: a machine that stalls for a second teaches the gateway a server that is slower than it is.
    """
    assert any(falls() for _ in range(3))


def falls() -> bool:
    """Whether each estimate was below the one before, and the first not far off."""
    (last,) = uvloop.run(play(1, "en", lambda number: None, ACTS[-1:]))
    assert last.comeback is not None
    *polls, answer = last.comeback.notes
    left = [note.left_ms or 0 for note in polls if note.phase in ("queued", "prefill")]
    actual = answer.after_ms - polls[0].after_ms
    return (
        len(left) >= 3 and all(later < sooner for sooner, later in pairwise(left)) and actual / 2 < left[0] < 2 * actual
    )

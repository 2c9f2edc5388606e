"""Segments that add up, whatever is missing, and the causes of the wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.timing.timeline import Segments, Timeline, server_timing, wait_causes
from gateway.wire.answer import ServerTimes

MS = 1_000_000
INSTANTS = ("body", "connect_start", "connect_end", "sent", "header", "event", "token", "visible", "last", "end")


def timeline(**ms: float) -> Timeline:
    """Received at 1000 ms; the others in ms after that."""
    made = Timeline(1000 * MS)
    for name, value in ms.items():
        setattr(made, name, int((1000 + value) * MS))
    return made


def in_ms(segments: Segments) -> tuple[float, ...]:
    return tuple(ns / MS for ns in segments)


WHOLE = {
    "body": 2, "connect_start": 3, "connect_end": 5, "sent": 6, "header": 10, "event": 20, "token": 20, "visible": 70,
    "last": 90, "end": 92,
}  # fmt: skip


def test_a_whole_stream_is_split_into_its_segments() -> None:
    found = timeline(**WHOLE).segments()
    assert in_ms(found) == (2, 2, 2, 14, 50, 20, 2)
    assert found.total == 92 * MS


@pytest.mark.parametrize(
    "instants, expected",
    [
        pytest.param({"end": 5}, (5, 0, 0, 0, 0, 0, 0), id="failed while uploading"),
        pytest.param({"body": 2, "end": 5}, (2, 3, 0, 0, 0, 0, 0), id="failed before anything was sent"),
        pytest.param({"body": 2, "connect_start": 3, "end": 9}, (2, 1, 6, 0, 0, 0, 0), id="failed while connecting"),
        pytest.param({"body": 2, "sent": 3, "end": 9}, (2, 1, 0, 6, 0, 0, 0), id="reused connection, no answer"),
        pytest.param({"body": 2, "sent": 3, "header": 4, "event": 5, "end": 9}, (2, 1, 0, 6, 0, 0, 0), id="no token"),
        pytest.param({"body": 2, "sent": 3, "token": 5, "last": 8, "end": 9}, (2, 1, 0, 2, 4, 0, 0), id="C098 nothing visible"),
        pytest.param({"body": 2, "sent": 3, "token": 5, "visible": 5, "last": 5, "end": 5}, (2, 1, 0, 2, 0, 0, 0), id="one token"),
        pytest.param({"body": 2, "token": 5, "visible": 5, "last": 6, "end": 7}, (2, 3, 0, 0, 0, 1, 1), id="never sent"),
        pytest.param({"body": 2, "header": 4, "end": 7}, (2, 2, 0, 3, 0, 0, 0), id="answered before it was all sent"),
        pytest.param({"sent": 3, "end": 7}, (3, 0, 0, 4, 0, 0, 0), id="body unknown"),
        pytest.param({"connect_start": 1, "sent": 3, "end": 7}, (1, 0, 2, 4, 0, 0, 0), id="body and connect end unknown"),
        pytest.param({"body": 2, "sent": 3, "visible": 5, "end": 7}, (2, 1, 0, 2, 0, 0, 2), id="token unknown"),
        pytest.param({"body": 2, "connect_start": 5, "connect_end": 4, "sent": 6, "end": 7}, (2, 4, 0, 1, 0, 0, 0), id="odd connect"),
        pytest.param({}, (0, 0, 0, 0, 0, 0, 0), id="just received"),
        pytest.param({"end": -5}, (0, 0, 0, 0, 0, 0, 0), id="a clock that went back"),
    ],
)  # fmt: skip
def test_what_never_came_lends_its_time_to_what_waited(instants: dict[str, float], expected: tuple[float, ...]) -> None:
    assert in_ms(timeline(**instants).segments()) == expected


def test_a_running_request_is_split_up_to_now() -> None:
    found = timeline(body=2, sent=3).segments(1010 * MS)
    assert in_ms(found) == (2, 1, 0, 7, 0, 0, 0)


@given(st.dictionaries(st.sampled_from(INSTANTS), st.integers(0, 2**62)), st.integers(1, 2**62), st.integers(0, 2**62))
def test_segments_are_a_partition_of_any_instants(instants: dict[str, int], recv: int, now: int) -> None:
    """The spec's promise: they add up exactly, and none is negative, in every partial state."""
    made = Timeline(recv)
    for name, value in instants.items():
        setattr(made, name, value)
    found = made.segments(now)
    assert found.total == max(0, (made.end or now) - recv)
    assert min(found) >= 0
    server_timing(made, now)
    causes = wait_causes(made, ServerTimes(5, 7, 9), 3)
    assert all(cause.seconds >= 0 for cause in causes)


@given(st.lists(st.integers(0, 10**9), min_size=10, max_size=10))
def test_instants_in_order_give_the_differences(steps: list[int]) -> None:
    made, at = Timeline(1), 1
    for name, step in zip(INSTANTS, steps, strict=True):
        at += step
        setattr(made, name, at)
    found = made.segments()
    assert found.total == made.end - made.recv
    assert found.connect == made.connect_end - made.connect_start
    assert found.wait == made.token - made.sent


def test_durations_of_a_stream() -> None:
    """C097, C098: three values that are not the same."""
    made = timeline(**WHOLE)
    assert made.ttft_ns == 20 * MS
    assert made.ttfv_ns == 70 * MS
    assert made.upstream_ttft_ns == 14 * MS
    assert made.e2e_ns == 92 * MS


def test_durations_that_did_not_happen_are_unknown() -> None:
    """C098: absent, not 0."""
    made = timeline(body=2, sent=3)
    assert (made.ttft_ns, made.ttfv_ns, made.upstream_ttft_ns, made.e2e_ns) == (None, None, None, None)
    made.token = 1005 * MS
    assert (made.ttft_ns, made.ttfv_ns) == (5 * MS, None)
    made.sent = 0
    assert made.upstream_ttft_ns is None


def test_a_plain_answer_has_no_first_token() -> None:
    made = timeline(body=2, sent=3, header=50)
    made.answer_whole(1060 * MS)
    made.end = 1061 * MS
    assert (made.ttft_ns, made.ttfv_ns, made.upstream_ttft_ns, made.tpot_ns(100)) == (None, None, None, None)
    assert in_ms(made.segments()) == (2, 1, 0, 57, 0, 0, 1)


@pytest.mark.parametrize(
    "completion, first, expected_ms",
    [
        (200, 1, 3900 / 199),
        (200, 5, 20.0),
        (200, 64, 3900 / 136),
        (200, 0, 3900 / 199),
        (2, 1, 3900.0),
        (1, 1, None),
        (0, 1, None),
        (None, 1, None),
        (64, 64, None),
        (3, 64, None),
    ],
)
def test_time_per_token_counts_tokens_and_not_chunks(
    completion: int | None, first: int, expected_ms: float | None
) -> None:
    """C099: 40 frames of 5 tokens each at 100 ms."""
    found = timeline(token=100, visible=100, last=4000).tpot_ns(completion, first)
    assert found == (None if expected_ms is None else pytest.approx(expected_ms * MS))


def test_time_per_token_of_a_single_read_is_unknown() -> None:
    assert timeline(token=100, visible=100, last=100).tpot_ns(50) is None
    assert timeline().tpot_ns(50) is None


@pytest.mark.parametrize(
    "instants, expected",
    [
        ({}, b""),
        ({"body": 1.25}, b"upload;dur=1.25"),
        ({"body": 1, "sent": 1.3}, b"upload;dur=1, gateway;dur=0.3, connect;dur=0"),
        (
            {"body": 2, "connect_start": 3, "connect_end": 5, "sent": 6, "token": 20},
            b"upload;dur=2, gateway;dur=2, connect;dur=2, wait;dur=14, ttft;dur=20",
        ),
        (
            {"body": 2, "sent": 3, "token": 20, "visible": 25},
            b"upload;dur=2, gateway;dur=1, connect;dur=0, wait;dur=17, ttft;dur=20, reasoning;dur=5",
        ),
    ],
)
def test_server_timing_tells_what_is_known(instants: dict[str, float], expected: bytes) -> None:
    assert server_timing(timeline(**instants), 1030 * MS) == expected


def test_server_timing_of_a_plain_answer_has_no_ttft() -> None:
    made = timeline(body=2, sent=3)
    made.answer_whole(1060 * MS)
    assert server_timing(made, 1060 * MS) == b"upload;dur=2, gateway;dur=1, connect;dur=0, wait;dur=57"


# --- causes of the wait


@pytest.mark.parametrize(
    "server, rtt_ms, expected",
    [
        pytest.param(
            ServerTimes(30, 40, 500), 1,
            [("queue", 30), ("prefill", 40), ("network", 1), ("input", 29)], id="vLLM",
        ),
        pytest.param(
            ServerTimes(30, 40, 500), None, [("queue", 30), ("prefill", 40), ("unexplained", 30)], id="no round trip",
        ),
        pytest.param(ServerTimes(None, 40, 500), 1, [("prefill", 40), ("network", 1), ("unexplained", 59)], id="llama.cpp"),
        pytest.param(ServerTimes(30, None, None), 1, [("queue", 30), ("network", 1), ("unexplained", 69)], id="queue only"),
        pytest.param(
            ServerTimes(80, 40, 500), 1,
            [("queue", 80), ("prefill", 20), ("network", 0), ("input", 0)], id="more than the wait",
        ),
    ],
)  # fmt: skip
def test_the_wait_is_split_by_what_the_server_measured(
    server: ServerTimes, rtt_ms: int | None, expected: list[tuple[str, int]]
) -> None:
    """Latency-methods §3, source 1."""
    made = timeline(body=1, sent=2, token=102, visible=200, last=300)
    found = wait_causes(made, server, None if rtt_ms is None else rtt_ms * MS)
    assert [(cause.cause, round(cause.seconds * 1000)) for cause in found] == expected
    assert {cause.source for cause in found} == {"server"}
    assert sum(cause.seconds for cause in found) == pytest.approx(0.1)


@pytest.mark.parametrize("server", [None, ServerTimes(), ServerTimes(generation_ms=5)])
def test_a_server_that_measured_nothing_gives_no_causes(server: ServerTimes | None) -> None:
    assert wait_causes(timeline(sent=2, token=102, visible=102, last=300), server) == []


def test_a_request_without_a_token_has_no_causes() -> None:
    assert wait_causes(timeline(sent=2, end=50), ServerTimes(1, 2, 3)) == []


def test_a_plain_answer_leaves_its_generation_out_of_the_wait() -> None:
    made = timeline(body=1, sent=2)
    made.answer_whole(1602 * MS)
    found = wait_causes(made, ServerTimes(30, 40, 500), MS)
    assert [(cause.cause, round(cause.seconds * 1000)) for cause in found] == [
        ("queue", 30), ("prefill", 40), ("network", 1), ("input", 29),
    ]  # fmt: skip
    assert wait_causes(made, ServerTimes(30, 40, None), MS) == []


@given(st.integers(0, 10**12), st.floats(0, 10**7), st.floats(0, 10**7), st.none() | st.integers(0, 10**11))
def test_causes_always_add_up_to_the_wait(wait: int, queue: float, prefill: float, rtt_ns: int | None) -> None:
    made = Timeline(1)
    made.sent, made.token, made.visible, made.last = 5, 5 + wait, 5 + wait, 5 + wait
    found = wait_causes(made, ServerTimes(queue, prefill), rtt_ns)
    assert all(cause.seconds >= 0 for cause in found)
    assert sum(cause.seconds for cause in found) == pytest.approx(wait / 1e9)


def test_a_timeline_shows_itself() -> None:
    assert repr(timeline(body=2, token=20)) == "Timeline(body +2.0 ms, token +20.0 ms)"

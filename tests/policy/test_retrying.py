"""When a failed attempt is followed by another: classes, permissions, budgets, and waiting times."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.retrying import (
    BUCKET_NS,
    BUCKETS,
    ELSEWHERE,
    ELSEWHERE_FREE,
    MAX_RETRY_AFTER_S,
    RECONNECT,
    Decision,
    ExtraAttempts,
    Failure,
    RetryClass,
    TokenBucket,
    Where,
    Why,
    class_of,
    default_idempotent,
    full_jitter,
    may_retry,
    parse_retry_after,
    retry_after_of,
)
from gateway.wire.kinds import DATA_PLANE_PATHS

FRACTIONS = st.floats(0, 1, exclude_max=True)
NOW = datetime(2026, 8, 22, 10, 0, 0, tzinfo=UTC).timestamp()
SECOND = 1_000_000_000


# Classes


@pytest.mark.parametrize(
    "failure, expected",
    [
        # A1, A2, A4, A5, A8, A9: nothing left this host
        (Failure(nothing_sent=True, reason="dns"), "R0"),
        (Failure(nothing_sent=True, reason="connect_refused"), "R0"),
        (Failure(nothing_sent=True, reason="connect_timeout"), "R0"),
        (Failure(nothing_sent=True, reason="tls"), "R0"),
        (Failure(nothing_sent=True, reason="queue_timeout"), "R0"),
        # A10: a pooled connection that was closed before it read us
        (Failure(is_reused=True, reason="eof_no_bytes"), "R1"),
        (Failure(is_reused=True, reason="reset_no_bytes"), "R1"),
        # B1, B2: the same on a fresh one
        (Failure(reason="reset_no_bytes"), "R2"),
        (Failure(reason="eof_no_bytes"), "R2"),
        # A7: bytes left, none was read
        (Failure(reason="write_stall"), "R2"),
        (Failure(reason="write_stall", is_reused=True), "R2"),
        # C1, C032 run 2: the answer began, nothing of it went out
        (Failure(response_bytes=90, cut_before_forwarding=True, reason="body_cut"), "R2"),
        (Failure(response_bytes=90, cut_before_forwarding=True, reason="reset_mid", is_reused=True), "R2"),
        (Failure(response_bytes=90, cut_before_forwarding=True, reason="no_finish"), "R2"),
        # B14, B15
        (Failure(response_bytes=90, status=429), "R3"),
        (Failure(response_bytes=90, status=500), "R3"),
        (Failure(response_bytes=90, status=502), "R3"),
        (Failure(response_bytes=90, status=503, retry_after_s=7.0), "R3"),
        (Failure(response_bytes=90, status=504), "R3"),
        (Failure(response_bytes=90, status=503, is_reused=True), "R3"),
        # C032 run 1
        (Failure(response_bytes=90, forwarded=True, reason="reset_mid"), "R4"),
        (Failure(response_bytes=90, forwarded=True, status=503), "R4"),
        (Failure(response_bytes=90, forwarded=True, cut_before_forwarding=True), "R4"),
        # A6, B22
        (Failure(reason="first_byte_timeout"), "R5"),
        (Failure(reason="first_token_timeout", is_reused=True), "R5"),
        (Failure(reason="stall", response_bytes=90, cut_before_forwarding=True), "R2"),
        (Failure(reason="stall", response_bytes=90, forwarded=True), "R4"),
        (Failure(reason="total_timeout"), "R5"),
        # B16
        *((Failure(response_bytes=90, status=status), "R6") for status in (400, 401, 403, 404, 408, 409, 413, 422)),
        (Failure(response_bytes=90, status=501), "R6"),
        (Failure(response_bytes=90, status=505), "R6"),
        # B3 to B12, C6, B18
        (Failure(response_bytes=20, reason="eof_in_head"), "R6"),
        (Failure(response_bytes=20, reason="not_http"), "R6"),
        (Failure(response_bytes=20, reason="bad_framing"), "R6"),
        (Failure(response_bytes=20, reason="bad_framing", cut_before_forwarding=True), "R6"),
        (Failure(response_bytes=20, reason="content_type"), "R6"),
        (Failure(response_bytes=20, reason="redirect"), "R6"),
        (Failure(reason="internal"), "R6"),
        (Failure(response_bytes=20, reason="stream_error"), "R6"),
        (Failure(response_bytes=20, reason="a word of next year"), "R6"),
    ],
)  # fmt: skip
def test_each_failure_has_its_class(failure: Failure, expected: RetryClass) -> None:
    assert class_of(failure) == expected


FAILURES = st.builds(
    Failure,
    nothing_sent=st.booleans(),
    is_reused=st.booleans(),
    response_bytes=st.integers(0, 3),
    forwarded=st.booleans(),
    status=st.sampled_from((0, 200, 400, 429, 500, 503)),
    reason=st.sampled_from(("", "dns", "eof_no_bytes", "body_cut", "bad_framing", "stall", "write_stall")),
    cut_before_forwarding=st.booleans(),
)


@given(
    FAILURES, st.booleans(), st.integers(0, 3), st.booleans(), st.booleans(), st.booleans(), st.booleans(), FRACTIONS
)
def test_no_failure_whatever_is_repeated_against_the_rules(
    failure: Failure,
    is_idempotent: bool,
    attempts: int,
    other: bool,
    token: bool,
    reconnected: bool,
    same: bool,
    fraction: float,
) -> None:
    """Part 3's rule 2: never repeat what may have been executed unless the route says so; never after a byte."""
    decision = may_retry(
        class_of(failure),
        is_idempotent=is_idempotent,
        attempts=attempts,
        other_upstream=other,
        has_token=token,
        reconnected=reconnected,
        same_upstream=same,
        fraction=fraction,
    )
    assert decision.is_allowed == (decision.why == "allowed")
    if not decision.is_allowed:
        return
    assert not failure.forwarded
    assert is_idempotent or failure.nothing_sent
    assert attempts < 2 or decision.where == "reconnect"
    assert token or not decision.needs_token
    assert other or decision.where != "other"
    if decision.where == "reconnect":
        assert failure.is_reused
        assert not failure.response_bytes
        assert not reconnected
    if decision.where == "same":
        assert failure.nothing_sent
        assert same
    assert decision.needs_token == (decision.where == "other" and not failure.nothing_sent)


# Permission

FACTS: dict[str, Any] = {"is_idempotent": True, "attempts": 1, "other_upstream": True, "has_token": True}


@pytest.mark.parametrize(
    "retry_class, facts, where, why",
    [
        ("R0", {}, "other", "allowed"),
        ("R0", {"attempts": 0, "is_idempotent": False, "has_token": False}, "other", "allowed"),
        ("R0", {"attempts": 2}, "nowhere", "attempts"),
        ("R0", {"other_upstream": False}, "nowhere", "alone"),
        ("R0", {"other_upstream": False, "same_upstream": True}, "same", "allowed"),
        ("R0", {"other_upstream": False, "same_upstream": True, "attempts": 2}, "nowhere", "attempts"),
        ("R1", {}, "reconnect", "allowed"),
        ("R1", {"other_upstream": False, "has_token": False}, "reconnect", "allowed"),
        ("R1", {"attempts": 2}, "reconnect", "allowed"),
        ("R1", {"is_idempotent": False}, "nowhere", "not_idempotent"),
        ("R1", {"reconnected": True}, "other", "allowed"),
        ("R1", {"reconnected": True, "has_token": False}, "nowhere", "budget"),
        ("R2", {}, "other", "allowed"),
        ("R2", {"is_idempotent": False}, "nowhere", "not_idempotent"),
        ("R2", {"other_upstream": False, "same_upstream": True}, "nowhere", "alone"),
        ("R2", {"has_token": False}, "nowhere", "budget"),
        ("R2", {"attempts": 2}, "nowhere", "attempts"),
        ("R3", {}, "other", "allowed"),
        ("R3", {"is_idempotent": False}, "nowhere", "not_idempotent"),
        ("R3", {"other_upstream": False}, "nowhere", "alone"),
        ("R3", {"has_token": False}, "nowhere", "budget"),
        ("R3", {"attempts": 2}, "nowhere", "attempts"),
        ("R4", {}, "nowhere", "forwarded"),
        ("R5", {}, "nowhere", "too_slow"),
        ("R6", {}, "nowhere", "not_retryable"),
        # the deadline covers all attempts and waits
        ("R2", {"remaining_ms": 1.0}, "other", "allowed"),
        ("R2", {"remaining_ms": 0.0}, "nowhere", "late"),
        ("R1", {"remaining_ms": -5.0}, "nowhere", "late"),
        (
            "R0",
            {"other_upstream": False, "same_upstream": True, "fraction": 0.9, "remaining_ms": 45.0},
            "nowhere",
            "late",
        ),
        (
            "R0",
            {"other_upstream": False, "same_upstream": True, "fraction": 0.9, "remaining_ms": 46.0},
            "same",
            "allowed",
        ),
        ("R4", {"remaining_ms": 0.0}, "nowhere", "forwarded"),
    ],
)
def test_each_class_has_its_conditions(retry_class: RetryClass, facts: dict[str, Any], where: Where, why: Why) -> None:
    decision = may_retry(retry_class, **(FACTS | facts))
    assert (decision.where, decision.why) == (where, why)


def test_only_what_may_have_been_sent_costs_a_token() -> None:
    assert may_retry("R0", **FACTS) == ELSEWHERE_FREE
    assert may_retry("R1", **FACTS) == RECONNECT
    assert may_retry("R2", **FACTS) == may_retry("R3", **FACTS) == ELSEWHERE
    assert [d.needs_token for d in (ELSEWHERE_FREE, RECONNECT, ELSEWHERE)] == [False, False, True]


def test_another_upstream_is_asked_without_waiting_and_the_same_one_after_a_backoff() -> None:
    assert may_retry("R2", fraction=0.9, **FACTS).wait_ms == 0
    alone = FACTS | {"other_upstream": False}
    assert may_retry("R0", same_upstream=True, fraction=0.5, **alone) == Decision("same", "allowed", wait_ms=25.0)


@pytest.mark.parametrize(
    "endpoint, expected",
    [
        ("chat", True), ("completions", True), ("messages", True), ("embeddings", True),
        ("responses", False), ("opaque", False),
        ("/v1/chat/completions", True), ("/v1/rerank", True), ("/v1/score", True), ("/tokenize", True),
        ("/v1/models", True), ("/v1/messages/count_tokens", True),
        ("/v1/responses", False), ("/v1/files", False), ("/v1/batches", False), ("/v1/fine_tuning/jobs", False),
        ("/v1/threads", False), ("", False),
    ],
)  # fmt: skip
def test_what_computes_may_be_repeated_and_what_stores_may_not(endpoint: str, expected: bool) -> None:
    assert default_idempotent(endpoint) is expected


def test_of_the_data_plane_only_responses_store_and_not_when_told_not_to() -> None:
    assert [path for path in DATA_PLANE_PATHS if not default_idempotent(path)] == ["/v1/responses"]
    assert default_idempotent("/v1/responses", stores=False)
    assert default_idempotent("responses", stores=False)
    assert not default_idempotent("/v1/files", stores=False)


# The token bucket of one upstream


def test_five_failures_of_ten_tokens_end_retries_and_ten_successes_are_worth_one() -> None:
    bucket = TokenBucket()
    allowed = []
    for _ in range(6):
        allowed.append(bucket.is_allowed)
        bucket.note_failure()
    assert allowed == [True] * 5 + [False]
    assert bucket.tokens == 4
    for _ in range(10):
        bucket.note_success()
    assert bucket.tokens == 5
    assert not bucket.is_allowed, "half is not above half"
    bucket.note_success()
    assert bucket.is_allowed
    assert repr(bucket) == "<TokenBucket 5.1 of 10>"


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 20), st.sampled_from((0.05, 0.1, 0.5, 1.0)))
def test_tokens_stay_within_the_bucket(outcomes: list[bool], limit: int, ratio: float) -> None:
    bucket = TokenBucket(limit, ratio)
    expected = float(limit)
    for is_success in outcomes:
        if is_success:
            bucket.note_success()
            expected = min(limit, expected + ratio)
        else:
            bucket.note_failure()
            expected = max(0.0, expected - 1)
        assert bucket.tokens == pytest.approx(expected)
        assert 0 <= bucket.tokens <= limit


# The ceiling over all


def retry_where_allowed(extra: ExtraAttempts, instants: Iterable[int]) -> int:
    """A storm: each request fails and asks for a retry. How many got one."""
    sent = 0
    for now in instants:
        extra.note_request(now)
        if extra.may_retry(now):
            extra.note_extra("retry", now)
            sent += 1
    return sent


@pytest.mark.parametrize("count, most", [(1, 1), (10, 3), (30, 3), (100, 10), (1000, 100)])
def test_a_storm_within_the_window_gets_a_tenth_or_the_minimum(count: int, most: int) -> None:
    """B14: with 100 % of answers 500, extra attempts stay at 10 %."""
    assert retry_where_allowed(ExtraAttempts(), [20 * SECOND] * count) == most


def test_a_storm_of_ten_seconds_gets_a_tenth() -> None:
    """B14, 100 requests a second."""
    assert retry_where_allowed(ExtraAttempts(), (i * SECOND // 100 for i in range(1000))) <= 100


def test_two_bursts_in_ten_seconds_share_one_allowance() -> None:
    """3.5: the first burst late in its second, the other 9.1 s later."""
    extra = ExtraAttempts()
    first = retry_where_allowed(extra, [9 * SECOND // 10] * 100)
    assert first + retry_where_allowed(extra, [10 * SECOND] * 100) <= 20
    assert extra.retries <= 20
    extra = ExtraAttempts()
    assert retry_where_allowed(extra, [9 * SECOND // 10] * 100) == 10
    assert retry_where_allowed(extra, [10 * SECOND] * 10) <= 1, "ten more requests allow one more"


def test_a_quiet_gateway_may_retry_three_times_in_ten_seconds() -> None:
    extra = ExtraAttempts()
    assert extra.may_retry(0), "even before any request was counted: it may have come long ago"
    sent = retry_where_allowed(extra, (i * 2 * SECOND for i in range(30)))
    assert 3 <= sent <= 18
    assert repr(extra) == "<ExtraAttempts 3 retries and 0 hedges on 6 requests>"


def test_what_is_older_than_the_window_does_not_count() -> None:
    extra = ExtraAttempts()
    retry_where_allowed(extra, [0] * 100)
    assert (extra.requests, extra.retries, extra.may_retry(0)) == (100, 10, False)
    assert not extra.may_retry(10 * SECOND), "ten seconds are whole seconds and the one that is begun"
    assert extra.may_retry(11 * SECOND)
    assert (extra.requests, extra.retries) == (0, 0)
    assert extra.may_retry(10_000 * SECOND), "an idle gap of any length"


def test_a_clock_reading_from_before_counts_as_now() -> None:
    """Two parts of one request may hold readings in either order."""
    extra = ExtraAttempts()
    extra.note_request(30 * SECOND)
    extra.note_request(29 * SECOND)
    assert extra.requests == 2


def test_a_hedge_is_earned_by_twenty_requests_and_three_are_saved_at_most() -> None:
    """C035: never more than 5 %, and a gateway that just started has none."""
    extra = ExtraAttempts()
    for i in range(20):
        assert not extra.may_hedge(i)
        extra.note_request(i)
    assert extra.may_hedge(20)
    for i in range(1000):
        extra.note_request(i)
    granted = 0
    while extra.may_hedge(1000):
        extra.note_extra("hedge", 1000)
        granted += 1
    assert granted == 3


def test_a_hedge_must_fit_under_the_ceiling_of_all_extra_attempts() -> None:
    extra = ExtraAttempts()
    for _ in range(100):
        extra.note_request(0)
    for _ in range(10):
        extra.note_extra("retry", 0)
    assert not extra.may_hedge(0)
    assert extra.may_hedge(11 * SECOND), "the credit outlives the window"


def test_hedges_take_room_from_retries_but_not_their_minimum() -> None:
    extra = ExtraAttempts()
    for _ in range(60):
        extra.note_request(0)
    for _ in range(3):
        extra.note_extra("hedge", 0)
    granted = 0
    while extra.may_retry(0):
        extra.note_extra("retry", 0)
        granted += 1
    assert granted == 3


@given(st.lists(st.tuples(st.integers(0, 3 * SECOND), st.sampled_from(("retry", "hedge", ""))), max_size=300))
def test_no_load_whatever_gets_more_extra_attempts_than_allowed(steps: list[tuple[int, str]]) -> None:
    extra = ExtraAttempts(minimum=0)
    model: list[tuple[int, str]] = []  # (bucket, what), all that ever happened
    now = 0
    for gap, wish in steps:
        now += gap
        extra.note_request(now)
        model.append((now // BUCKET_NS, "request"))
        if wish == "retry" and extra.may_retry(now):
            extra.note_extra("retry", now)
            model.append((now // BUCKET_NS, wish))
        elif wish == "hedge" and extra.may_hedge(now):
            extra.note_extra("hedge", now)
            model.append((now // BUCKET_NS, wish))
        window = [what for slot, what in model if slot > now // BUCKET_NS - BUCKETS]
        assert (extra.requests, extra.retries, extra.hedges) == tuple(
            window.count(what) for what in ("request", "retry", "hedge")
        )
        everything = [what for _, what in model]
        assert 20 * everything.count("hedge") <= everything.count("request")
        assert extra.retries + extra.hedges <= max(3, extra.requests // 10)


# Waiting


@given(st.integers(0, 5000), FRACTIONS)
def test_full_jitter_is_between_nothing_and_the_doubled_base_and_never_above_the_cap(
    attempt: int, fraction: float
) -> None:
    wait = full_jitter(attempt, 50, 1000, fraction)
    assert 0 <= wait <= min(1000, 50 * 2 ** min(attempt, 20))
    assert full_jitter(attempt, 50, 1000, 0) == 0


@pytest.mark.parametrize(
    "value, expected",
    [
        (b"0", 0.0), (b"7", 7.0), (b" 7\t", 7.0), (b"1.5", 1.5), (b"300", 300.0), (b"301", 300.0),
        (b"1000000000", 300.0), (b"9" * 32, 300.0),
        # the three forms of a date, RFC 9110
        (b"Sat, 22 Aug 2026 10:00:30 GMT", 30.0),
        (b"Saturday, 22-Aug-26 10:00:30 GMT", 30.0),
        (b"Sat Aug 22 10:00:30 2026", 30.0),
        (b"Sun Aug  2 10:00:30 2026", 0.0),
        (b"Sat, 22 Aug 2026 10:00:00 GMT", 0.0),
        (b"Sat, 22 Aug 2026 09:59:30 GMT", 0.0),
        (b"Sun, 22 Aug 2027 10:00:00 GMT", 300.0),
        (b"Sunday, 06-Nov-94 08:49:37 GMT", 0.0),  # 1994: 2094 would be too far ahead
        # anything else
        (b"", None), (b"soon", None), (b"-1", None), (b"+1", None), (b"1e3", None), (b"NaN", None), (b"inf", None),
        (b"1_0", None), (b"0x10", None), (b"7, 8", None), (b"7 s", None), (b"9" * 33, None), ("٣".encode(), None),
        (b"Sat, 31 Feb 2026 10:00:30 GMT", None), (b"Sat, 22 Xyz 2026 10:00:30 GMT", None),
        (b"Sat, 00 Aug 2026 10:00:30 GMT", None), (b"Sat, 22 Aug 0000 10:00:30 GMT", None),
        (b"Sat, 22 Aug 2026 24:00:00 GMT", None), (b"Sat, 22 Aug 2026 10:60:00 GMT", None),
        (b"Sat, 22 Aug 2026 10:00:61 GMT", None), (b"Sat, 22 Aug 2026 10:00:30 CET", None),
        (b"Sun Aug    10:00:30 2026", None),
    ],
)  # fmt: skip
def test_retry_after_is_read_as_seconds_or_as_a_date(value: bytes, expected: float | None) -> None:
    """B15: seconds, date, garbage, 10⁹."""
    assert parse_retry_after(value, NOW) == expected


@given(st.binary(max_size=40))
def test_no_retry_after_whatever_does_harm(value: bytes) -> None:
    seconds = parse_retry_after(value, NOW)
    assert seconds is None or 0 <= seconds <= MAX_RETRY_AFTER_S


@given(st.integers(0, 2**31), st.sampled_from(("%a, %d %b %Y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y")))
def test_any_date_is_understood_as_the_calendar_has_it(instant: int, form: str) -> None:
    text = datetime.fromtimestamp(instant, UTC).strftime(form).encode()
    assert parse_retry_after(text, instant - 100.0) == 100.0


@pytest.mark.parametrize(
    "headers, expected",
    [
        ([], None),
        ([(b"retry-after", b"7")], 7.0),
        ([(b"retry-after", b"soon")], None),
        ([(b"retry-after", b"1"), (b"retry-after-ms", b"1500")], 1.5),
        ([(b"retry-after-ms", b"many"), (b"retry-after", b"2")], 2.0),
        ([(b"retry-after-ms", b"999999999")], 300.0),
    ],
)
def test_milliseconds_go_before_seconds(headers: list[tuple[bytes, bytes]], expected: float | None) -> None:
    assert retry_after_of(headers, NOW) == expected

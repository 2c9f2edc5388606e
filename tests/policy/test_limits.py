"""What callers say about how long they wait, and that they take an answer later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.limits import (
    NO_LIMITS,
    NO_PREFERENCE,
    CallerLimits,
    Preference,
    caller_limits,
    preference,
)

X = b"x-request-timeout-ms"
GRPC = b"grpc-timeout"
ENVOY = b"x-envoy-expected-rq-timeout-ms"
READ = b"x-stainless-read-timeout"
TOTAL = b"x-stainless-timeout"
PLAIN = [(b"host", b"gateway"), (b"user-agent", b"curl/8"), (b"content-type", b"application/json")]

Fields = list[tuple[bytes, bytes]]


def test_who_says_nothing_costs_no_object() -> None:
    assert caller_limits(PLAIN) is NO_LIMITS
    assert caller_limits([]) is NO_LIMITS
    assert preference(PLAIN) is NO_PREFERENCE
    assert not NO_PREFERENCE.accepts_pending


@pytest.mark.parametrize(
    "name, value, expected",
    [
        (X, b"1500", 1500), (X, b"1", 1), (X, b"99999999", 99_999_999), (X, b"0010", 10),
        (ENVOY, b"250", 250),
        (GRPC, b"2H", 7_200_000), (GRPC, b"3M", 180_000), (GRPC, b"5S", 5000), (GRPC, b"100m", 100),
        (GRPC, b"1500u", 2), (GRPC, b"1n", 1), (GRPC, b"99999999n", 100), (GRPC, b"99999999H", 359_999_996_400_000),
        (READ, b"600", 600_000), (READ, b"60.0", 60_000), (READ, b"0.5", 500), (READ, b"1.1", 1100),
        (READ, b"0.0001", 1),
        # of no use: 0, negative, more than 8 digits, no number, text
        (X, b"0", None), (X, b"-1", None), (X, b"+5", None), (X, b"100000000", None), (X, b"1.5", None), (X, b"", None),
        (X, b"NaN", None), (X, b"soon", None), (X, b"1e3", None), (X, b"5 0", None), (X, "٣".encode(), None),
        (ENVOY, b"00000000", None), (ENVOY, b"\xff", None), (ENVOY, b"1\n", None),
        (GRPC, b"5", None), (GRPC, b"S", None), (GRPC, b"0S", None), (GRPC, b"123456789S", None), (GRPC, b"5s", None),
        (GRPC, b"5.5S", None), (GRPC, b"5SS", None),
        (READ, b"None", None), (READ, b"NaN", None), (READ, b"inf", None), (READ, b"0", None), (READ, b"0.0", None),
        (READ, b"-600", None), (READ, b"6e2", None), (READ, b".5", None), (READ, b"123456789.0", None),
    ],
)  # fmt: skip
def test_each_header_is_read_in_its_own_unit(name: bytes, value: bytes, expected: int | None) -> None:
    limits = caller_limits([*PLAIN, (name, value)])
    assert limits.deadline_ms == expected
    assert limits.unusable == (expected is None)
    assert limits.is_silence == (name is READ and expected is not None)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ([(READ, b"600"), (ENVOY, b"30"), (GRPC, b"20m"), (X, b"10")], CallerLimits(10, False, 600_000, 0)),
        ([(READ, b"600"), (ENVOY, b"30"), (GRPC, b"20m")], CallerLimits(20, False, 600_000, 0)),
        ([(READ, b"600"), (ENVOY, b"30")], CallerLimits(30, False, 600_000, 0)),
        ([(READ, b"600")], CallerLimits(600_000, True, 600_000, 0)),
        # what is of no use does not hide the next one, and is counted
        ([(X, b"soon"), (GRPC, b"0S"), (ENVOY, b"30")], CallerLimits(30, False, None, 2)),
        ([(X, b"soon"), (READ, b"60.0")], CallerLimits(60_000, True, 60_000, 1)),
        ([(X, b"0"), (X, b"7"), (X, b"8")], CallerLimits(7, False, None, 1)),
        # the JavaScript libraries' figure says when to send a sign of life, and is no deadline
        ([(TOTAL, b"600")], CallerLimits(None, False, 600_000, 0)),
        ([(TOTAL, b"600"), (READ, b"20")], CallerLimits(20_000, True, 20_000, 0)),
        ([(TOTAL, b"600"), (READ, b"never")], CallerLimits(None, False, 600_000, 1)),
        ([(TOTAL, b"never")], CallerLimits(None, False, None, 1)),
    ],
)
def test_the_first_usable_one_counts_in_the_order_of_the_catalogue(fields: Fields, expected: CallerLimits) -> None:
    assert caller_limits([*PLAIN, *fields]) == expected
    assert caller_limits([*fields, *PLAIN]) == expected


@given(st.lists(st.tuples(st.sampled_from((X, GRPC, ENVOY, READ, TOTAL, b"host")), st.binary(max_size=12))))
def test_no_header_whatever_does_harm(fields: Fields) -> None:
    limits = caller_limits(fields)
    assert limits.deadline_ms is None or limits.deadline_ms >= 1
    assert limits.read_timeout_ms is None or limits.read_timeout_ms >= 1
    assert 0 <= limits.unusable <= len(fields)


@given(st.integers(1, 99_999_999))
def test_any_number_of_milliseconds_is_taken_as_it_is(milliseconds: int) -> None:
    value = b"%d" % milliseconds
    assert caller_limits([(X, value)]).deadline_ms == milliseconds
    assert caller_limits([(GRPC, value + b"m")]).deadline_ms == milliseconds
    assert caller_limits([(READ, b"%d.%03d" % divmod(milliseconds, 1000))]).deadline_ms == milliseconds


# Prefer


def prefer(*fields: bytes) -> Preference:
    return preference([*PLAIN, *((b"prefer", field) for field in fields)])


@pytest.mark.parametrize(
    "fields, respond_async, wait_s",
    [
        ([b"respond-async"], True, None),
        ([b"respond-async, wait=10"], True, 10.0),
        ([b"wait=10, respond-async"], True, 10.0),
        ([b"wait=10"], False, 10.0),
        ([b"wait=0"], False, 0.0),
        ([b"wait=0.5"], False, 0.5),
        # several fields are as good as one
        ([b"respond-async", b"wait=10"], True, 10.0),
        ([b"return=minimal", b"respond-async"], True, None),
        # names in any case, spaces wherever they may be, empty elements
        ([b"Respond-Async,WAIT = 10"], True, 10.0),
        ([b" respond-async ,\twait\t=\t10 "], True, 10.0),
        ([b", ,respond-async,,"], True, None),
        ([b""], False, None),
        # quoted values, and commas inside them
        ([b'wait="10"'], False, 10.0),
        ([b'wait="1\\0"'], False, 10.0),
        ([b'foo="a, respond-async", wait=3'], False, 3.0),
        ([b'foo="a\\", respond-async", wait=3'], False, 3.0),
        ([b'foo="a;b"; bar="c,d", respond-async'], True, None),
        # an empty value is no value
        ([b"respond-async="], True, None),
        ([b'respond-async=""'], True, None),
        ([b"respond-async=no"], False, None),
        # parameters belong to something else
        ([b"respond-async; foo=bar; baz"], True, None),
        ([b"respond-async;foo=bar, wait=10;x"], True, 10.0),
        ([b"foo; respond-async"], False, None),
        ([b"foo; wait=10"], False, None),
        # the first of two counts
        ([b"wait=10, wait=20"], False, 10.0),
        ([b"wait=soon", b"wait=20"], False, None),
        # no such thing
        ([b"wait"], False, None),
        ([b"wait=-1"], False, None),
        ([b"wait=1e3"], False, None),
        ([b"wait=999999999"], False, None),
        ([b"respond-asynchronously"], False, None),
        ([b"respond async"], False, None),
        ([b"respond-async wait=10"], False, None),
        ([b"=10, respond-async"], True, None),
        ([b"(), respond-async"], True, None),
        ([b'wait="10'], False, None),
        ([b'respond-async, foo="never ends, wait=10'], True, None),
        ([b'foo=bar"baz", respond-async'], True, None),
        ([b"x" * 2000 + b", respond-async"], False, None),
    ],
)
def test_prefer_is_read_as_rfc_7240_says(fields: list[bytes], respond_async: bool, wait_s: float | None) -> None:
    assert prefer(*fields) == Preference(respond_async, wait_s)


@pytest.mark.parametrize(
    "value, expected", [(b"allow", True), (b" Allow ", True), (b"never", False), (b"", False), (b"allow, x", False)]
)
def test_our_own_header_opts_in_too(value: bytes, expected: bool) -> None:
    found = preference([*PLAIN, (b"x-gateway-pending", value)])
    assert found == Preference(allows_pending=expected)
    assert found.accepts_pending is expected


def test_both_ways_of_opting_in_can_be_told_apart() -> None:
    """`Preference-Applied` answers only who preferred."""
    assert prefer(b"respond-async").accepts_pending
    assert not prefer(b"wait=10").accepts_pending
    both = preference([(b"x-gateway-pending", b"allow"), (b"prefer", b"wait=2")])
    assert both == Preference(False, 2.0, True)


@given(st.lists(st.binary(max_size=60) | st.text('",;=\\ ab', max_size=60).map(str.encode), max_size=4))
def test_no_preference_whatever_does_harm(fields: list[bytes]) -> None:
    found = prefer(*fields)
    assert found.wait_s is None or found.wait_s >= 0


@given(st.sampled_from((b'"', b'\\"', b'a="', b"a=b;", b",", b"a ", b'"\\')), st.integers(1, 5000))
def test_a_long_field_is_read_in_linear_time(piece: bytes, count: int) -> None:
    """Hypothesis' own deadline of 200 ms per example is the limit; these take microseconds."""
    prefer(piece * count)


TOKENS = st.from_regex(r"[a-z][a-z-]{0,8}", fullmatch=True).filter(lambda name: name not in ("wait", "respond-async"))


@given(
    st.lists(st.tuples(TOKENS, st.none() | st.text('ab ,;="\\', max_size=6)), max_size=5),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_what_surrounds_a_preference_does_not_change_it(
    others: list[tuple[str, str | None]], at: int, split: int
) -> None:
    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    elements = [name if value is None else f"{name}={quoted(value)}" for name, value in others]
    elements.insert(at, "respond-async")
    elements.insert(at, 'wait="7"; a=","')
    fields = [", ".join(part).encode() for part in (elements[:split], elements[split:])]
    assert prefer(*fields) == Preference(True, 7.0)

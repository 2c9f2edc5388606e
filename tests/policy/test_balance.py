"""In which order the upstreams of a route are tried, and what a prompt's beginning has to do with it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from math import ceil, exp

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Balance
from gateway.policy.balance import AFFINITY_IGNORED, LOAD_BOUND, Candidate, PeakEwma, affinity_key, order

UP, DOWN, UNKNOWN = True, False, None
SECOND = 1_000_000_000
STRATEGIES: tuple[Balance, ...] = ("auto", "round_robin", "least_inflight", "prefix")


def draws(*values: float) -> Callable[[], float]:
    """Draws that come round."""
    return cycle(values or (0.5,)).__next__


def asked(
    strategy: Balance,
    candidates: list[Candidate],
    *,
    turn: int = 0,
    draw: Callable[[], float] | None = None,
    affinity: int | None = None,
    uncached_tokens: float = 1000,
    budget_s: float | None = None,
) -> str:
    """The names in the order to try, joined."""
    names = order(
        strategy,
        candidates,
        turn=turn,
        draw=draw or draws(),
        affinity=affinity,
        uncached_tokens=uncached_tokens,
        budget_s=budget_s,
    )
    return "".join(names)


def up(name: str, inflight: int = 0, predicted_s: float | None = None, ahead: float = 0) -> Candidate:
    return Candidate(name, UP, inflight, predicted_s, ahead)


def first_choices(
    candidates: list[Candidate], *, strategy: Balance = "auto", count: int = 4000, affinity: int | None = None
) -> dict[str, float]:
    """The part of requests for which each is the first choice."""
    source = random.Random(7)
    firsts = Counter(
        asked(strategy, candidates, turn=turn, draw=source.random, affinity=affinity)[0] for turn in range(count)
    )
    return {c.name: firsts[c.name] / count for c in candidates}


# --- Whatever the strategy -----------------------------------------------------------------------------------------

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.just(""),
        st.sampled_from([UP, DOWN, UNKNOWN]),
        st.integers(0, 5),
        st.none() | st.floats(0, 100),
        st.floats(0, 1e6),
        st.floats(0.01, 1),
        st.booleans(),
        st.none() | st.floats(0, 100),
    ),
    min_size=1,
    max_size=6,
).map(lambda found: [replace(candidate, name="abcdef"[i]) for i, candidate in enumerate(found)])


@given(
    st.sampled_from(STRATEGIES),
    CANDIDATES,
    st.integers(0, 10**9),
    st.integers(0, 2**32),
    st.none() | st.integers(0, 2**64 - 1),
    st.floats(0, 1e6),
    st.none() | st.floats(0.001, 100),
)
def test_nobody_is_left_out_and_the_usable_come_first(
    strategy: Balance,
    candidates: list[Candidate],
    turn: int,
    seed: int,
    affinity: int | None,
    uncached_tokens: float,
    budget_s: float | None,
) -> None:
    """When all are down, trying beats refusing."""
    names = asked(
        strategy,
        candidates,
        turn=turn,
        draw=random.Random(seed).random,
        affinity=affinity,
        uncached_tokens=uncached_tokens,
        budget_s=budget_s,
    )
    assert sorted(names) == [c.name for c in candidates]
    by_name = {c.name: c for c in candidates}
    tiers = [2 if by_name[n].is_up is False else int(by_name[n].is_full) for n in names]
    assert tiers == sorted(tiers)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999_999])
def test_a_full_upstream_comes_after_the_free_ones_and_before_those_that_are_down(
    strategy: Balance, draw: float
) -> None:
    full = Candidate("f", UP, 0, 0.1, is_full=True)
    candidates = [Candidate("d", DOWN, 0, 0.1), full, Candidate("u", UNKNOWN, 9, 9.0)]
    assert asked(strategy, candidates, draw=draws(draw), affinity=5) == "ufd"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_upstream_in_slow_start_is_chosen_as_seldom_as_its_share_says(strategy: Balance) -> None:
    """fault-catalogue 3.3. It is the better one in all else, and still there to fail over to."""
    returned = Candidate("r", UP, 0, 0.1, share=0.1)
    others = [up("a", 3, 2.0, 3000), up("b", 3, 2.0, 3000)]
    for affinity in (None, *range(6)):
        part = first_choices([returned, *others], strategy=strategy, affinity=affinity)["r"]
        assert part <= 0.12, affinity
    assert "r" in asked(strategy, [returned, others[0]], draw=draws(0.9))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shares_are_relative_so_that_somebody_is_always_ready(strategy: Balance) -> None:
    """All came back at once: each is served as if there were no slow start."""
    candidates = [Candidate(name, UP, 0, 1.0, share=0.05) for name in "abc"]
    assert all(0.3 < part < 0.37 for part in first_choices(candidates, strategy=strategy).values())
    later = [Candidate("a", UP, 0, 1.0, share=0.1), Candidate("b", UP, 0, 1.0, share=0.05)]
    assert 0.22 < first_choices(later, strategy=strategy)["b"] < 0.28  # half of its half


# --- round_robin and least_inflight --------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 1000), st.booleans())
def test_round_robin_shares_out_evenly_also_beside_one_that_is_down(count: int, start: int, has_down: bool) -> None:
    candidates = [up("abcdef"[i], inflight=i) for i in range(count)]
    candidates[1:1] = [Candidate("x", DOWN, 0)] * has_down
    firsts = Counter(asked("round_robin", candidates, turn=start + i)[0] for i in range(count * 4))
    assert set(firsts.values()) == {4}


def test_round_robin_fails_over_in_the_same_order() -> None:
    assert asked("round_robin", [up("a"), up("b"), up("c")], turn=7) == "bca"


@pytest.mark.parametrize(
    "loads, draw, expected",
    [([3, 1, 2], (0.5,), "bca"), ([1, 1], (0.2, 0.1), "ba"), ([1, 1], (0.1, 0.2), "ab"), ([1, 1], (0.5,), "ab")],
)
def test_least_inflight_leaves_ties_to_chance(loads: list[int], draw: tuple[float, ...], expected: str) -> None:
    candidates = [up("abc"[i], load) for i, load in enumerate(loads)]
    assert asked("least_inflight", candidates, draw=draws(*draw)) == expected


# --- auto: the better of two ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one, other, better",
    [
        (up("a", 9, 0.5), up("b", 0, 1.0), "a"),
        (up("a", 9, 1.0), up("b", 0, 0.95), "b"),  # a tie, within what predictions err by
        (up("a", 0, 1.0), up("b", 9, 0.95), "a"),
        (Candidate("a", UP, 0, None, seconds_per_ktoken=1.0), Candidate("b", UP, 3, None, seconds_per_ktoken=0.2), "b"),
        (Candidate("a", UP, 0, None, seconds_per_ktoken=1.0), Candidate("b", UP, 9, None, seconds_per_ktoken=0.2), "a"),
        (Candidate("a", UP, 5, 0.1, seconds_per_ktoken=1.0), Candidate("b", UP, 0, None, seconds_per_ktoken=1.0), "b"),
        (up("a", 2, 0.1), up("b", 1), "b"),  # nothing that both have but requests in flight
        (up("a", 1), up("b", 2), "a"),
    ],
)
@pytest.mark.parametrize("draw", [0.0, 0.3, 0.7])
def test_the_better_of_two_is_predicted_else_paced_else_less_busy(
    one: Candidate, other: Candidate, better: str, draw: float
) -> None:
    """latency-methods §2.6."""
    names = asked("auto", [one, other], draw=draws(draw))
    assert names[0] == better
    assert sorted(names) == ["a", "b"]


def test_ties_are_left_to_chance() -> None:
    """C117."""
    for candidates in ([up(n) for n in "abc"], [up(n, 2, 1.0) for n in "abc"]):
        assert all(0.3 < part < 0.37 for part in first_choices(candidates).values())


def test_the_worst_of_three_is_hardly_ever_the_first_and_the_rest_follow_best_first() -> None:
    candidates = [up("a", 0, 3.0), up("b", 0, 2.0), up("c", 0, 1.0)]
    parts = first_choices(candidates)
    assert 0 < parts["a"] < 0.02, "one in fifty goes anywhere, or a wrong prediction would never be corrected"
    assert 0.62 < parts["c"] < 0.71
    assert asked("auto", candidates, draw=draws(0.9, 0.9)) == "cba"
    paced = [Candidate(n, UP, 0, None, seconds_per_ktoken=s) for n, s in (("a", 3.0), ("b", 2.0), ("c", 1.0))]
    assert asked("auto", paced, draw=draws(0.9, 0.9)) == "cba"
    assert asked("auto", [up("a", 3), up("b", 2), up("c", 1)], draw=draws(0.9, 0.9)) == "cba"


def test_an_upstream_with_long_answers_running_is_avoided_although_no_prompt_is_ahead() -> None:
    """C118: twenty streams that have their first token are not seen by a prediction; their count is."""
    loads = {"a": 20, "b": 0, "c": 0}
    source = random.Random(1)
    for turn in range(20):
        name = asked("auto", [up(n, load, 0.2) for n, load in loads.items()], turn=turn, draw=source.random)[0]
        loads[name] += 1
    assert loads["a"] == 20
    assert abs(loads["b"] - loads["c"]) <= 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_upstream_that_was_added_again_gets_its_third_and_not_everything(strategy: Balance) -> None:
    """C117: 300 requests after the return, and no upstream's count goes wrong."""
    source = random.Random(117)
    running: list[tuple[int, str]] = [(source.randrange(20), name) for name in "ab" for _ in range(4)]
    served: Counter[str] = Counter()
    for now in range(300):
        running = [(end, name) for end, name in running if end > now]
        loads = Counter(name for _, name in running)
        candidates = [up(name, loads[name], 0.2) for name in "abc"]
        first = asked(strategy, candidates, turn=now, draw=source.random)[0]
        served[first] += 1
        running.append((now + source.randrange(1, 24), first))
    assert 80 <= served["c"] <= 120, served
    assert sum(served.values()) == 300


# --- Affinity ------------------------------------------------------------------------------------------------------


def home_of(key: int, names: str = "abc") -> str:
    return asked("prefix", [up(name) for name in names], affinity=key)[0]


def test_every_key_has_a_home_and_homes_are_spread_evenly() -> None:
    homes = Counter(home_of(key * 2**50) for key in range(3000))
    assert all(900 < count < 1100 for count in homes.values())


def test_homes_move_only_from_an_upstream_that_left() -> None:
    """Rendezvous hashing: the others keep their caches."""
    for key in range(300):
        before = home_of(key)
        assert before == "c" or home_of(key, "ab") == before


def test_affinity_survives_another_order_of_the_upstreams_and_other_draws() -> None:
    """Every worker and replica must agree."""
    assert {home_of(3, names) for names in ("abc", "cab", "bca")} == {home_of(3)}
    for draw in (AFFINITY_IGNORED, 0.4, 0.99):
        assert asked("auto", [up(n) for n in "abc"], affinity=3, draw=draws(draw))[0] == home_of(3)


@pytest.mark.parametrize("strategy", ["auto", "prefix"])
def test_a_crowded_home_is_passed_over_for_the_next_in_hash_order(strategy: Balance) -> None:
    """Bounded load counts tokens ahead, not requests; C152: the spill-over always goes to the same upstream."""
    key = 11
    home = home_of(key)
    second = home_of(key, "abc".replace(home, ""))
    many_requests = [up(n, 50 if n == home else 0, None, 100) for n in "abc"]
    assert asked(strategy, many_requests, affinity=key)[0] == home
    many_tokens = [up(n, 0, None, 9000 if n == home else 0) for n in "abc"]
    assert asked(strategy, many_tokens, affinity=key)[0] == second


@pytest.mark.parametrize("own, is_kept", [(2000, True), (50, False)])
def test_a_short_prompt_ahead_does_not_drive_a_long_one_away(own: float, is_kept: bool) -> None:
    """The request's own tokens are part of the mean."""
    home = home_of(11, "ab")
    candidates = [up(n, 0, None, 1000 if n == home else 0) for n in "ab"]
    assert (asked("auto", candidates, affinity=11, uncached_tokens=own)[0] == home) is is_kept


def test_a_crowded_home_is_kept_where_it_is_the_faster_all_the_same() -> None:
    """C152: 50,000 cached tokens are worth a short prompt ahead; the prediction knows both."""
    key = 11
    home = home_of(key)
    crowd = [up(n, 1, 0.5 if n == home else 4.0, 3000 if n == home else 0) for n in "abc"]
    assert asked("auto", crowd, affinity=key, uncached_tokens=50)[0] == home
    slower = [replace(c, predicted_s=6.1 if c.name == home else 6.0) for c in crowd]
    assert asked("auto", slower, affinity=key, uncached_tokens=50)[0] == home_of(key, "abc".replace(home, ""))


@given(st.lists(st.floats(0, 1e7), min_size=2, max_size=8), st.floats(0, 1e6), st.integers(0, 2**64 - 1))
def test_without_predictions_nobody_above_the_bound_is_chosen(ahead: list[float], own: float, key: int) -> None:
    """latency-methods §2.6: ceil(c × mean), c = 1.25."""
    candidates = [up("abcdefgh"[i], 0, None, tokens) for i, tokens in enumerate(ahead)]
    first = asked("auto", candidates, affinity=key, uncached_tokens=own)[0]
    bound = ceil(LOAD_BOUND * (sum(ahead) + own) / len(ahead))
    assert ahead["abcdefgh".index(first)] <= bound


@pytest.mark.parametrize(
    "home_s, budget_s, is_kept",
    [
        (5.9, None, True),
        (6.1, None, False),
        (5.9, 100.0, True),
        (6.1, 100.0, False),
        (1.9, 2.0, True),
        (2.1, 2.0, False),
    ],
)
def test_affinity_is_kept_while_it_costs_at_most_five_seconds_or_half_the_budget(
    home_s: float, budget_s: float | None, is_kept: bool
) -> None:
    key = 4
    home = home_of(key)
    candidates = [up(n, 0, home_s if n == home else 1.0) for n in "abc"]
    assert (asked("auto", candidates, affinity=key, budget_s=budget_s)[0] == home) is is_kept


@pytest.mark.parametrize("pace, is_kept", [(0.3, True), (0.7, False)])
def test_without_predictions_the_cost_of_affinity_is_paced(pace: float, is_kept: bool) -> None:
    """Ten thousand tokens at 0.1 s per thousand are a second."""
    key = 4
    home = home_of(key)
    candidates = [Candidate(n, UP, 0, None, seconds_per_ktoken=pace if n == home else 0.1) for n in "abc"]
    assert (asked("auto", candidates, affinity=key, uncached_tokens=10_000)[0] == home) is is_kept


def test_one_request_in_a_hundred_ignores_affinity() -> None:
    key = 4
    home = home_of(key)
    candidates = [up(n, 0, 1.5 if n == home else 1.0) for n in "abc"]
    away = 1 - first_choices(candidates, affinity=key, count=20_000)[home]
    assert 0.5 * AFFINITY_IGNORED < away < 1.5 * AFFINITY_IGNORED


def test_prefix_without_a_key_is_least_inflight_and_with_one_fails_over_to_the_least_busy() -> None:
    candidates = [up("a", 3), up("b", 1), up("c", 2)]
    assert asked("prefix", candidates) == "bca"
    key = next(key for key in range(100) if home_of(key) == "a")
    assert asked("prefix", candidates, affinity=key) == "abc"


def test_conversations_stay_where_their_beginning_is_cached() -> None:
    """C152: two upstreams, ten conversations of eight growing turns; then one is saturated, then gone."""
    source = random.Random(152)
    keys = [source.getrandbits(64) for _ in range(10)]
    cached: dict[str, set[int]] = {"a": set(), "b": set()}

    def play(ahead: dict[str, float], names: str = "ab") -> list[tuple[int, str]]:
        """Turns with the upstream that got each; 4,000 tokens take half a second where they are not cached."""
        turns = []
        for _ in range(8):
            for key in keys:
                candidates = [
                    Candidate(n, UP, 0, 0.05 + (4000 * (key not in cached[n]) + ahead[n]) / 8000, ahead[n])
                    for n in names
                ]
                name = asked("auto", candidates, affinity=key, draw=source.random, uncached_tokens=200, budget_s=4)[0]
                cached[name].add(key)
                turns.append((key, name))
        return turns

    calm = play({"a": 0, "b": 0})
    stayed = sum(name == home_of(key, "ab") for key, name in calm)
    assert stayed >= 0.9 * len(calm)
    assert {name for _, name in calm} == {"a", "b"}
    saturated = play({"a": 60_000, "b": 0})
    assert Counter(name for _, name in saturated)["b"] >= 0.9 * len(saturated)
    assert {name for _, name in play({"b": 0}, "b")} == {"b"}
    again = play({"a": 0, "b": 0})
    assert sum(name == home_of(key, "ab") for key, name in again) >= 0.9 * len(again)


# --- The key -------------------------------------------------------------------------------------------------------

LONG = "Explain this to me: " + "abc " * 300


def chat(*messages: object, **fields: object) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages, **fields})


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


SYSTEM = {"role": "system", "content": "Be brief. " * 200}
KEY = affinity_key(chat(user(LONG)))


@pytest.mark.parametrize(
    "raw",
    [
        chat(user(LONG), temperature=0, tools=[{"type": "function"}]),
        orjson.dumps({"stream": True, "messages": [{"content": LONG, "role": "user"}], "model": "other"}),
        orjson.dumps({"messages": [user(LONG)], "model": "m"}, option=orjson.OPT_INDENT_2),
        chat(SYSTEM, user(LONG)),
        chat({"content": "other", "role": "developer"}, SYSTEM, user(LONG)),
        chat(user(LONG), {"role": "assistant", "content": "Yes."}, user("And then?")),
        chat(user([{"type": "text", "text": LONG}])),
        chat(user([{"text": LONG, "type": "text"}])),
        orjson.dumps({"system": "Be brief.", "messages": [user(LONG)], "max_tokens": 9}),
        orjson.dumps({"instructions": "x", "input": [user([{"type": "input_text", "text": LONG}])]}),
        orjson.dumps({"input": LONG}),
        orjson.dumps({"prompt": LONG, "model": "m"}),
        orjson.dumps({"prompt": [LONG, "another"]}),
        chat(user(LONG), note={"prompt": "x" * 900}),
    ],
)
def test_the_same_beginning_has_the_same_key(raw: bytes) -> None:
    """C152: whatever stands around it, before it, after it, and in which order."""
    assert KEY is not None
    assert affinity_key(raw) == KEY


@pytest.mark.parametrize(
    "raw",
    [
        chat(user("x" + LONG)),
        chat({"role": "assistant", "content": "Hello."}, user(LONG)),
        chat(user([{"type": "image_url", "image_url": {"url": "data:x"}}, {"type": "text", "text": LONG}])),
        chat(user([{"type": "text", "text": None, "more": "x" * 600}])),
        orjson.dumps({"prompt": list(range(500))}),
        orjson.dumps({"prompt": [list(range(500)), [1]]}),
        chat(user(["x" * 600])),
    ],
)
def test_another_beginning_has_another_key(raw: bytes) -> None:
    assert affinity_key(raw) not in (KEY, None)


def test_only_the_first_two_thousand_characters_count() -> None:
    for letter in "aé語🙂":
        same = {affinity_key(chat(user(letter * 2000 + rest))) for rest in ("", "x", letter * 5000)}
        assert len(same) == 1
        assert affinity_key(chat(user(letter * 1999 + "x"))) not in same


def test_a_conversation_has_its_key_as_soon_as_it_is_long_enough() -> None:
    """C152: the length is the conversation's, the key its first turn's, so that later turns do not move it."""
    turns: list[object] = [SYSTEM, user("Hello, what can you do?")]
    keys = []
    for _ in range(12):
        keys.append(affinity_key(chat(*turns)))
        turns += [{"role": "assistant", "content": "Quite a lot. " * 5}, user("Tell me more.")]
    assert keys[0] is None
    assert keys[-1] is not None
    assert set(keys) == {None, keys[-1]}
    assert keys == sorted(keys, key=lambda key: key is not None)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"model":"m"}',
        b'{"messages":[]}',
        b'{"messages":{"role":"user"}}',
        b'{"messages":7,"prompt":null}',
        b'{"messages":[{"role":"user"',
        b'{"messages":[{"role":"system","content":"x"}',
        b'{"messages":[{"role":"user","content":"' + b"x" * 900,
        b'{"prompt":[1,2',
        b'{"prompt":"x',
        b'{"messages":[nonsense',
        b'{"messages":[1,2,3]}',
        chat(user("short")),
        chat(SYSTEM),
        chat(SYSTEM, user("short")),
        chat(user(None), {"role": "assistant", "content": LONG}),
        chat({"role": "tool", "more": "x" * 900}),
        chat({"role": "user", "content": {"text": LONG}}),
        orjson.dumps({"prompt": "short", "a_rather_long_key": LONG}),
    ],
)
def test_short_missing_or_broken_prompts_have_no_key(raw: bytes) -> None:
    assert affinity_key(raw) is None


@given(st.binary(max_size=60) | st.text('{}[]":,\\ messagrolcnt').map(str.encode))
def test_no_bytes_make_it_fail(raw: bytes) -> None:
    for text in (raw, b'{"messages":[' + raw, b'{"messages":[{"role":"user","content":[' + raw, b'{"prompt":[' + raw):
        assert affinity_key(text) is None


# --- How fast an upstream was of late ------------------------------------------------------------------------------


def test_the_peak_is_taken_at_once_and_decays_in_ten_seconds() -> None:
    """latency-methods §2.6."""
    pace = PeakEwma()
    assert pace.read(SECOND) is None
    pace.observe(1.0, SECOND)
    pace.observe(4.0, SECOND)
    assert pace.read(SECOND) == 4.0
    pace.observe(1.0, SECOND)  # one quick answer in the same moment does not excuse the slow one
    assert pace.read(SECOND) == 4.0
    pace.observe(1.0, 11 * SECOND)
    assert pace.read(11 * SECOND) == pytest.approx(4 * exp(-1) + 1 * (1 - exp(-1)))
    assert repr(pace) == "<PeakEwma 2.103638323514327>"


def test_an_upstream_that_nobody_asks_is_forgiven() -> None:
    pace = PeakEwma()
    pace.observe(8.0, SECOND)
    assert pace.read(11 * SECOND) == pytest.approx(8 * exp(-1))
    assert pace.read(61 * SECOND) < 0.03  # type: ignore[operator]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 10**11)), min_size=1))
def test_the_pace_stays_between_the_least_and_the_greatest_and_time_may_stand_still(
    samples: list[tuple[float, int]],
) -> None:
    pace = PeakEwma()
    for value, now in samples:
        pace.observe(value, now)
    latest = max(now for _, now in samples)
    current = pace.read(latest)
    values = [value for value, _ in samples]
    assert current is not None
    assert min(values) * (1 - 1e-9) <= current <= max(values) * (1 + 1e-9)

"""Booking finished requests, without a network."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from gateway.account import Account
from gateway.exchange import Exchange, Room, Share
from gateway.metrics import Metrics
from gateway.wire.plain import read_plain
from gateway.wire.reader import reader_for
from tests.support.raw import answer, chunk, usage_chunk

MS = 1_000_000


class StubCall:
    """A call that was received at 1 ms and says nothing."""

    method = "POST"
    path = "/v1/chat/completions"
    query = b""
    received_ns = MS
    body_ns = 2 * MS

    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.headers = list(headers)


def exchange(route: str | None = "main", upstream: str | None = "up", *headers: tuple[bytes, bytes]) -> Exchange:
    x = Exchange(StubCall(*headers))  # type: ignore[arg-type]
    x.kind = "chat"
    x.route, x.upstream = route, upstream
    x.timeline.body = 2 * MS
    x.timeline.sent = 3 * MS
    return x


def account() -> tuple[Account, Metrics, list[dict[str, object]]]:
    metrics = Metrics(CollectorRegistry())
    records: list[dict[str, object]] = []
    booked = Account(metrics, write=records.append)
    booked.add_route("main")
    booked.add_upstream("up")
    booked.add_pair("main", "up")
    return booked, metrics, records


def stream(x: Exchange, *events: bytes, first: int = 10 * MS) -> None:
    x.is_stream = x.is_seen = True
    x.reader = reader_for("chat")
    for number, event in enumerate(events):
        x.reader.feed(event, first + number * MS)
    x.timeline.end = first + len(events) * MS


def test_a_stream_is_booked_with_its_times_and_tokens() -> None:
    booked, metrics, records = account()
    x = exchange()
    stream(x, chunk({"content": "a"}), chunk({"content": "b"}), chunk(finish="stop"), usage_chunk(3, 2))
    x.settle("complete")
    booked.close(x, 99 * MS)
    assert records[0]["ttft_ms"] == 9
    assert records[0]["decode_ms"] == 1
    assert records[0]["e2e_ms"] == 13
    assert metrics.count("tokens_total", "main", "up", "completion").value == 2
    assert sum(metrics.distribution("ttft_seconds", "main", "up").counts) == 1
    assert sum(metrics.distribution("interchunk_seconds", "main", "up").counts) == 1
    assert metrics.distribution("overhead_seconds").total == pytest.approx(0.001)


def test_a_plain_answer_is_booked_without_a_first_token() -> None:
    booked, metrics, records = account()
    x = exchange()
    x.plain = read_plain("chat", answer())
    x.settle("complete")
    booked.close(x, 9 * MS)
    assert (records[0]["ttft_ms"], records[0]["completion_tokens"], records[0]["wait_ms"]) == (None, 2, 6)
    assert sum(metrics.distribution("ttft_seconds", "main", "up").counts) == 0
    assert metrics.count("tokens_total", "main", "up", "prompt").value == 3


def test_a_request_that_nobody_settled_is_a_fault_of_ours() -> None:
    booked, metrics, records = account()
    booked.close(exchange(), 9 * MS)
    assert (records[0]["outcome"], records[0]["reason"]) == ("internal_error", "unsettled")
    assert metrics.count("requests_total", "main", "up", "internal_error").value == 1


@pytest.mark.parametrize("route", [None, "main"])
def test_a_refused_request_has_no_upstream_and_no_times(route: str | None) -> None:
    booked, metrics, _ = account()
    x = exchange(route, None)
    x.settle("refused", "no_route")
    booked.close(x, 9 * MS)
    assert metrics.count("requests_total", route or "none", "none", "refused").value == 1
    assert sum(metrics.distribution("e2e_seconds", "main", "up").counts) == 0


def test_how_a_request_ended_is_decided_once() -> None:
    x = exchange()
    x.settle("client_cancelled")
    x.settle("upstream_error", "reset_mid")
    assert (x.outcome, x.reason) == ("client_cancelled", None)


def test_policies_budgets_and_verdicts_are_counted() -> None:
    booked, metrics, _ = account()
    x = exchange()
    x.changes = ["clean=dashes:2", "thinking=off", "max_tokens=64>256", "sent_again=rescue"]
    x.cleaned = {"dashes": 2}
    x.budget_action = "heartbeat"
    x.verdict = "burnt_by_thinking"
    x.settle("complete")
    booked.close(x, 9 * MS)
    counted = {
        ("policy_changes_total", "thinking"): 1, ("policy_changes_total", "max_tokens"): 1, ("policy_changes_total", "rescue"): 0,
        ("clean_changes_total", "dashes"): 2, ("budget_exceeded_total", "heartbeat"): 1,
        ("empty_answers_total", "burnt_by_thinking"): 1, ("empty_answers_total", "empty"): 0,
    }  # fmt: skip
    assert {key: metrics.count(key[0], "main", key[1]).value for key in counted} == counted


def test_requests_of_a_route_that_is_gone_bring_no_series_back() -> None:
    """C108, F13."""
    booked, metrics, records = account()
    booked.add_route("next")
    booked.keep_only({"next"}, {"other"})
    for upstream in ("up", None):
        x = exchange("main", upstream)
        stream(x, chunk({"content": "a"}), chunk(finish="stop"))
        x.settle("complete")
        x.changes = ["thinking=off"]
        booked.close(x, 9 * MS)
    assert len(records) == 2
    from gateway.web.exposition import page_of

    page = page_of(metrics, "")[0]
    assert b'route="main"' not in page
    assert b'upstream="up"' not in page
    booked.add_route("main")
    booked.add_upstream("up")
    booked.add_pair("main", "up")
    for upstream in ("up", None):
        x = exchange("main", upstream)
        x.settle("complete")
        booked.close(x, 9 * MS)
    page = page_of(metrics, "")[0]
    for upstream in ("up", "none"):
        assert f'gateway_requests_total{{route="main",upstream="{upstream}",outcome="complete"}} 1.0'.encode() in page


def test_only_so_many_records_are_kept_and_the_newest_come_first() -> None:
    metrics = Metrics(CollectorRegistry())
    booked = Account(metrics, recent_limit=2)
    for number in range(3):
        booked.close(exchange(None, None, (b"x-request-id", b"id-%d" % number)), 9 * MS)
    assert [record["request_id"] for record in booked.recent(5)] == ["id-2", "id-1"]
    assert booked.find("id-0") is None
    assert booked.find("id-1") is not None


def test_names_that_no_log_could_hold_are_made_fit() -> None:
    """C109."""
    booked, _, records = account()
    x = exchange()
    x.model = "m\ud83d\n" + "x" * 500
    booked.close(x, 9 * MS)
    model = records[0]["model"]
    assert isinstance(model, str)
    assert model.isprintable()
    assert len(model) <= 128


def test_a_share_of_the_room_is_given_back_once() -> None:
    """C079."""
    room = Room()
    first, second = Share(room, 10), Share(room, 10)
    assert first.take(6)
    assert second.take(4)
    assert not second.take(1)
    first.give_back()
    first.give_back()
    second.give_back()
    assert room.held == 0


def test_every_attempt_has_an_id_of_its_own_and_one_trace() -> None:
    """C034."""
    x = exchange("main", "up", (b"x-request-id", b"x" * 128))
    assert len({x.attempt_id() for _ in range(5)}) == 5
    assert max(len(x.attempt_id()) for _ in range(5)) <= 128
    first, second = x.traceparent().split(b"-"), x.traceparent().split(b"-")
    assert first[1] == second[1]
    assert first[2] != second[2]
    assert "running" in repr(x)

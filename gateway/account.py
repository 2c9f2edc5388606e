"""The account of a request: metrics, the log line, the list of recent requests. Always, once, last."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from gateway.metrics import CLEAN_KINDS, FAILURE_REASONS, POLICY_KINDS, Metrics
from gateway.timing.timeline import wait_causes
from gateway.wire.headers import label_value

if TYPE_CHECKING:
    from gateway.exchange import Exchange
    from gateway.metrics import Count, PairMeters, RouteMeters, UpstreamMeters
    from gateway.timing.timeline import Segments, WaitCause
    from gateway.wire.answer import Usage
    from gateway.wire.stream import StreamReader

NS = 1_000_000_000
NO_ROUTE = "none"
RECENT_LIMIT = 1024  # timelines kept for /gateway/requests/ID; about 1 KiB each


_BLAMELESS = frozenset(("complete", "client_cancelled", "internal_error"))  # outcomes that are no upstream's doing


class Account:
    """Books finished exchanges. One per process."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        write: Callable[[dict[str, object]], None] | None = None,
        recent_limit: int = RECENT_LIMIT,
    ) -> None:
        self._write = write
        self._metrics = metrics
        self._pairs: dict[tuple[str, str], PairMeters] = {}
        self._refused: dict[str, dict[str, Count]] = {}  # by route: requests that got as far as no upstream
        self._routes: dict[str, RouteMeters] = {}
        self._upstreams: dict[str, UpstreamMeters] = {}
        self._detached: Metrics | None = None
        self._recent: OrderedDict[str, dict[str, object]] = OrderedDict()
        self._recent_limit = recent_limit
        self._refused[NO_ROUTE] = metrics.refused(NO_ROUTE)

    # Meters are made when a configuration is loaded; requests find them ready.

    def add_route(self, name: str) -> None:
        if name not in self._routes:
            self._routes[name] = self._metrics.route(name)
            self._refused.pop(name, None)

    def add_pair(self, route: str, upstream: str) -> PairMeters:
        known = self._pairs.get((route, upstream))
        if known is None:
            known = self._pairs[route, upstream] = self._metrics.pair(route, upstream)
        return known

    def add_upstream(self, name: str) -> UpstreamMeters:
        """Meters for a pool that is made now, maybe beside those of an older pool of the same name."""
        made = self._upstreams[name] = self._metrics.upstream(name)
        return made

    def keep_only(self, routes: Collection[str], upstreams: Collection[str]) -> None:
        """After a reload: routes and upstreams that are gone leave the page (C108).

        Requests that still run there are booked on meters that nobody reads, so that they bring no series back.
        """
        for name in self._routes.keys() - set(routes):
            del self._routes[name]
            self._refused.pop(name, None)
            self._metrics.forget("route", name)
        for name in self._upstreams.keys() - set(upstreams):
            del self._upstreams[name]
            self._metrics.forget("upstream", name)
        self._pairs = {
            (route, upstream): meters
            for (route, upstream), meters in self._pairs.items()
            if route in routes and upstream in upstreams
        }

    def route(self, name: str) -> RouteMeters:
        known = self._routes.get(name)
        return known if known is not None else self._nowhere().route(name)

    def upstream(self, name: str) -> UpstreamMeters:
        known = self._upstreams.get(name)
        return known if known is not None else self._nowhere().upstream(name)

    def _pair_of(self, route: str, upstream: str) -> PairMeters:
        known = self._pairs.get((route, upstream))
        return known if known is not None else self._nowhere().pair(route, upstream)

    def _refused_of(self, route: str) -> dict[str, Count]:
        known = self._refused.get(route)
        if known is None:
            known = (self._metrics if route in self._routes else self._nowhere()).refused(route)
            self._refused[route] = known
        return known

    def _nowhere(self) -> Metrics:
        if self._detached is None:
            self._detached = Metrics(CollectorRegistry())
        return self._detached

    def close(self, x: Exchange, now: int) -> None:
        """Books one finished exchange. Called exactly once for each, whatever happened to it."""
        timeline, reader = x.timeline, x.reader
        if not timeline.end:
            timeline.end = now
        usage = server = None
        if reader is not None and x.is_seen:
            timeline.event, timeline.token = reader.t_event, reader.t_token
            timeline.visible, timeline.last = reader.t_visible, reader.t_last
            usage, server = reader.usage, reader.server
        elif x.plain is not None:
            usage, server = x.plain.usage, x.plain.server
        x.settle("internal_error", "unsettled")
        segments = timeline.segments()
        causes = wait_causes(timeline, server, x.rtt_ns) if server is not None else []
        assert x.outcome is not None
        if x.upstream is None:
            self._refused_of(x.route or NO_ROUTE)[x.outcome].inc()
        else:
            pair = self._pair_of(x.route or NO_ROUTE, x.upstream)
            pair.requests[x.outcome].inc()
            self._book_time(x, pair, segments, causes)
            if x.is_seen and reader is not None:
                self._book_stream(x, pair, reader, usage)
            if usage is not None:
                _book_tokens(pair, usage)
        if x.route is not None and (x.changes or x.cleaned or x.budget_action or x.verdict != "ok"):
            self._book_policies(x, self.route(x.route))
        record = record_of(x, segments, usage, causes)
        self._remember(x.request_id, record)
        if self._write is not None:
            self._write(record)

    def _book_time(self, x: Exchange, pair: PairMeters, segments: Segments, causes: list[WaitCause]) -> None:
        pair.e2e.observe(segments.total / NS)
        for meter, value in zip(pair.segments, segments, strict=True):
            meter.observe(value / NS)
        if x.timeline.sent:
            self._metrics.overhead.observe(max(0, segments.gateway - x.timeline.slot_wait_ns) / NS)
        is_failure = x.reason is not None and x.outcome not in _BLAMELESS
        if x.outcome == "refused" and x.reason not in FAILURE_REASONS:  # for a reason of our own
            is_failure = False
        if causes or is_failure:
            meters = self.upstream(x.upstream or NO_ROUTE)
            if is_failure:
                meters.failure(x.reason or "other")
            for cause, source, seconds in causes:
                meters.wait(cause, source).observe(seconds)

    def _book_stream(self, x: Exchange, pair: PairMeters, reader: StreamReader, usage: Usage | None) -> None:
        """What only a stream can show: plain answers never enter these (C103)."""
        timeline = x.timeline
        if timeline.token:
            pair.ttft.observe(max(0, timeline.token - timeline.recv) / NS)
        if timeline.visible:
            pair.ttfv.observe(max(0, timeline.visible - timeline.recv) / NS)
        if reader.gap_count:
            pair.interchunk.add(reader.gaps, reader.gap_sum_ns / NS)
        if usage is not None and usage.completion is not None:
            tpot = timeline.tpot_ns(usage.completion, reader.first_chunk_tokens)
            if tpot is not None:
                pair.tpot.observe(tpot / NS)

    def _book_policies(self, x: Exchange, meters: RouteMeters) -> None:
        for change in x.changes:
            kind = change.split("=", 1)[0]
            if kind in POLICY_KINDS:
                meters.policy_changes[kind].inc()
        for kind, count in x.cleaned.items():
            if kind in CLEAN_KINDS:
                meters.clean_changes[kind].inc(count)
        if x.budget_action is not None:
            meters.budget_exceeded[x.budget_action].inc()
        if x.verdict in ("burnt_by_thinking", "empty", "misrouted"):
            meters.empty_answers[x.verdict].inc()

    def _remember(self, request_id: str, record: dict[str, object]) -> None:
        self._recent.pop(request_id, None)
        self._recent[request_id] = record
        while len(self._recent) > self._recent_limit:
            self._recent.popitem(last=False)

    def find(self, request_id: str) -> dict[str, object] | None:
        """The record of a recent request."""
        return self._recent.get(request_id)

    def recent(self, count: int) -> list[dict[str, object]]:
        """Newest first."""
        return [record for record, _ in zip(reversed(self._recent.values()), range(count), strict=False)]


def _book_tokens(pair: PairMeters, usage: Usage) -> None:
    tokens = pair.tokens
    if usage.prompt:
        tokens["prompt"].inc(usage.prompt)
    if usage.cached:
        tokens["cached"].inc(usage.cached)
    if usage.completion:
        tokens["completion"].inc(usage.completion)
    if usage.reasoning:
        tokens["reasoning"].inc(usage.reasoning)


def record_of(x: Exchange, segments: Segments, usage: Usage | None, causes: list[WaitCause]) -> dict[str, object]:
    """The canonical line of a request: log, `/gateway/requests/ID`, status page. Holds no prompt, answer or key."""
    timeline, is_stream = x.timeline, x.is_seen  # also a plain request that went up as a stream
    record: dict[str, object] = {
        "time": time.time(),
        "request_id": x.request_id,
        "path": label_value(x.path, 200),
        "route": x.route,
        "upstream": x.upstream,
        "model": label_value(x.model) if x.model is not None else None,
        "key": x.key_name,
        "status": x.status or None,
        "outcome": x.outcome,
        "reason": x.reason,
        "stream": x.is_stream,
        "attempts": x.attempts,
        "failures": x.failures,
        "changes": x.changes,
        "budget": x.budget_action,
        "verdict": x.verdict,
        "e2e_ms": segments.total // 1000 / 1000,
        "ttft_ms": _ms(timeline.ttft_ns) if is_stream else None,
        "ttfv_ms": _ms(timeline.ttfv_ns) if is_stream else None,
        "ttft_source": "stream" if is_stream and timeline.token else "none",
        "upload_ms": segments.upload // 1000 / 1000,
        "gateway_ms": segments.gateway // 1000 / 1000,
        "connect_ms": segments.connect // 1000 / 1000,
        "wait_ms": segments.wait // 1000 / 1000,
        "reasoning_ms": segments.reasoning // 1000 / 1000,
        "decode_ms": segments.decode // 1000 / 1000,
        "tail_ms": segments.tail // 1000 / 1000,
        "prompt_tokens": usage.prompt if usage else None,
        "cached_tokens": usage.cached if usage else None,
        "completion_tokens": usage.completion if usage else None,
        "reasoning_tokens": usage.reasoning if usage else None,
    }
    if is_stream and x.reader is not None:
        record["chunks"] = x.reader.token_events
    if is_stream or causes:
        record["wait_causes"] = {f"{cause}_ms": round(seconds * 1000, 3) for cause, _, seconds in causes}
    return record


def _ms(value_ns: int | None) -> float | None:
    return None if value_ns is None else value_ns // 1000 / 1000

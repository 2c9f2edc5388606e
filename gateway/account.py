"""The account of a request: metrics, the log line, the list of recent requests. Always, once, last."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from gateway.metrics import CLEAN_KINDS, POLICY_KINDS, Metrics
from gateway.timing.timeline import wait_causes
from gateway.wire.headers import label_value

if TYPE_CHECKING:
    from gateway.exchange import Exchange
    from gateway.metrics import PairMeters, RouteMeters, UpstreamMeters
    from gateway.timing.timeline import Segments
    from gateway.wire.answer import Usage

NS = 1_000_000_000
NO_ROUTE = "none"
RECENT_LIMIT = 1024  # timelines kept for /gateway/requests/ID; about 1 KiB each


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
        self._routes: dict[str, RouteMeters] = {}
        self._upstreams: dict[str, UpstreamMeters] = {}
        self._detached: Metrics | None = None
        self._recent: OrderedDict[str, dict[str, object]] = OrderedDict()
        self._recent_limit = recent_limit
        self.add_pair(NO_ROUTE, NO_ROUTE)

    # Meters are made when a configuration is loaded; requests find them ready.

    def add_route(self, name: str) -> None:
        if name not in self._routes:
            self._routes[name] = self._metrics.route(name)

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
            self._metrics.forget("route", name)
        for name in self._upstreams.keys() - set(upstreams):
            del self._upstreams[name]
            self._metrics.forget("upstream", name)
        known_routes, known_upstreams = {NO_ROUTE, *routes}, {NO_ROUTE, *upstreams}
        self._pairs = {
            (route, upstream): meters
            for (route, upstream), meters in self._pairs.items()
            if route in known_routes and upstream in known_upstreams
        }

    def route(self, name: str) -> RouteMeters:
        known = self._routes.get(name)
        return known if known is not None else self._nowhere().route(name)

    def upstream(self, name: str) -> UpstreamMeters:
        known = self._upstreams.get(name)
        return known if known is not None else self._nowhere().upstream(name)

    def _pair_of(self, x: Exchange) -> PairMeters:
        route, upstream = x.route or NO_ROUTE, x.upstream or NO_ROUTE
        known = self._pairs.get((route, upstream))
        if known is not None:
            return known
        if (x.route is None or route in self._routes) and (x.upstream is None or upstream in self._upstreams):
            return self.add_pair(route, upstream)
        return self._nowhere().pair(route, upstream)

    def _nowhere(self) -> Metrics:
        if self._detached is None:
            self._detached = Metrics(CollectorRegistry())
        return self._detached

    def close(self, x: Exchange, now: int) -> None:
        """Books one finished exchange. Called exactly once for each, whatever happened to it."""
        timeline = x.timeline
        if not timeline.end:
            timeline.end = now
        reader = x.reader
        if reader is not None and x.is_stream:
            timeline.event, timeline.token = reader.t_event, reader.t_token
            timeline.visible, timeline.last = reader.t_visible, reader.t_last
        x.settle("internal_error", "unsettled")
        segments = timeline.segments()
        usage = reader.usage if reader is not None and reader.usage is not None else x.plain.usage if x.plain else None
        pair = self._pair_of(x)
        assert x.outcome is not None
        pair.requests[x.outcome].inc()
        if x.upstream is not None:
            self._book_time(x, pair, segments)
            self._book_tokens(x, pair, usage)
        if x.route is not None:
            self._book_policies(x, self.route(x.route))
        record = self._record(x, segments, usage)
        self._remember(x.request_id, record)
        if self._write is not None:
            self._write(record)

    def _book_time(self, x: Exchange, pair: PairMeters, segments: Segments) -> None:
        timeline = x.timeline
        pair.e2e.observe(segments.total / NS)
        for meter, value in zip(pair.segments, segments, strict=True):
            meter.observe(value / NS)
        if timeline.sent:
            self._metrics.overhead.observe(max(0, segments.gateway - timeline.slot_wait_ns) / NS)
        meters = self.upstream(x.upstream or NO_ROUTE)
        if x.reason is not None and x.outcome not in ("client_cancelled", "complete"):
            meters.failure(x.reason)
        if not x.is_stream or x.reader is None:
            return
        reader = x.reader
        if timeline.ttft_ns is not None:
            pair.ttft.observe(timeline.ttft_ns / NS)
            for cause, source, seconds in wait_causes(timeline, reader.server, x.rtt_ns):
                meters.wait(cause, source).observe(seconds)
        if timeline.ttfv_ns is not None:
            pair.ttfv.observe(timeline.ttfv_ns / NS)
        if reader.gap_count:
            pair.interchunk.add(reader.gaps, reader.gap_sum_ns / NS)
        if reader.usage is not None and reader.usage.completion is not None:
            tpot = timeline.tpot_ns(reader.usage.completion, reader.first_chunk_tokens)
            if tpot is not None:
                pair.tpot.observe(tpot / NS)

    def _book_tokens(self, x: Exchange, pair: PairMeters, usage: Usage | None) -> None:
        if usage is None:
            return
        for kind, count in (
            ("prompt", usage.prompt),
            ("cached", usage.cached),
            ("reasoning", usage.reasoning),
            ("completion", usage.completion),
        ):
            if count:
                pair.tokens[kind].inc(count)

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

    def _record(self, x: Exchange, segments: Segments, usage: Usage | None) -> dict[str, object]:
        timeline = x.timeline
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
            "changes": list(x.changes),
            "budget": x.budget_action,
            "verdict": x.verdict,
            "e2e_ms": _ms(segments.total),
            "ttft_ms": _ms(timeline.ttft_ns) if x.is_stream else None,
            "ttfv_ms": _ms(timeline.ttfv_ns) if x.is_stream else None,
            "ttft_source": "stream" if x.is_stream and timeline.token else "none",
        }
        record |= {f"{name}_ms": _ms(value) for name, value in segments._asdict().items()}
        record["prompt_tokens"] = usage.prompt if usage else None
        record["cached_tokens"] = usage.cached if usage else None
        record["completion_tokens"] = usage.completion if usage else None
        record["reasoning_tokens"] = usage.reasoning if usage else None
        if x.reader is not None and x.is_stream:
            record["chunks"] = x.reader.token_events
            causes = wait_causes(timeline, x.reader.server, x.rtt_ns) if timeline.token else ()
            record["wait_causes"] = {f"{cause}_ms": _ms(int(s * NS)) for cause, _, s in causes}
        return record

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


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else round(value_ns / 1_000_000, 3)

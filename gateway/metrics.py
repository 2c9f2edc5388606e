"""Every metric of the gateway, on a registry that is passed in.

Label values come from the configuration or from closed sets, never from a request. What each number means is
defined in docs/metrics.md; a test compares the two.

A request touches some thirty numbers. prometheus_client takes a lock for each, and in the multi-process mode writes
to a file; together that was a third of our CPU per request. So requests add to plain numbers here (`Count`, `Level`,
`Distribution`), and `Metrics.flush` carries what has changed to prometheus_client: before every page, and with
several workers ten times a second.

The page of a single process is written from these numbers too (`web/exposition.py`).
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway import __version__

Outcome = Literal[
    "complete", "client_cancelled", "upstream_error", "upstream_truncated", "upstream_timeout", "budget_failed",
    "refused", "pending_done", "internal_error",
]  # fmt: skip
OUTCOMES: Final[tuple[Outcome, ...]] = (
    "complete", "client_cancelled", "upstream_error", "upstream_truncated", "upstream_timeout", "budget_failed",
    "refused", "pending_done", "internal_error",
)  # fmt: skip

# One bucket set for everything that is a part of a request's time, so that differences between them never lie (C102).
TTFT_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 600,
)  # fmt: skip
E2E_BUCKETS: Final = (*TTFT_BUCKETS, 1800)
INTERCHUNK_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5,
)  # fmt: skip
TPOT_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
OWN_BUCKETS: Final = (
    0.00005,
    0.0001,
    0.0002,
    0.0003,
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.5,
    1,
)

SEGMENTS: Final = ("upload", "gateway", "connect", "wait", "reasoning", "decode", "tail")
WAIT_CAUSES: Final = ("network", "input", "queue", "prefill", "unexplained")
TOKEN_KINDS: Final = ("prompt", "cached", "reasoning", "completion")
ATTEMPT_KINDS: Final = ("first", "reconnect", "retry", "hedge", "fallback")
POLICY_KINDS: Final = (
    "thinking",
    "max_tokens",
    "model",
    "default",
    "override",
    "drop",
    "usage",
    "floor_backed_off",
    "rescue",
    "stream",
)
CLEAN_KINDS: Final = ("control", "dashes", "long_runs", "roles", "whitespace")
VIOLATION_KINDS: Final = ("reasoning_seen", "switch_rejected")
EMPTY_KINDS: Final = ("burnt_by_thinking", "empty", "misrouted")
BUDGET_ACTIONS: Final = ("wait", "heartbeat", "pending", "fallback", "hedge", "fail")
PENDING_RESULTS: Final = (
    "created", "done", "failed", "cancelled", "expired", "joined", "refused", "withdrawn",
)  # fmt: skip
BREAKER_STATES: Final = ("closed", "half_open", "open", "disabled", "forced_open", "metrics_only")
_BREAKER_LEVEL: Final = {"half_open": 1, "open": 2, "forced_open": 2}
RATIO_BUCKETS: Final = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric: its name without the prefix, its type, labels and meaning."""

    name: str
    type: type[Counter] | type[Gauge] | type[Histogram]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    mode: Literal["livesum", "livemax", "sum"] = "livesum"


SPECS: Final = (
    Spec("requests_total", Counter, ("route", "upstream", "outcome"), "Requests by how they ended."),
    Spec("ttft_seconds", Histogram, ("route", "upstream"), "Request received to first token of any channel; streams only.", TTFT_BUCKETS),
    Spec("ttfv_seconds", Histogram, ("route", "upstream"), "Request received to first visible token; streams only.", TTFT_BUCKETS),
    Spec("e2e_seconds", Histogram, ("route", "upstream"), "Request received to end of the answer.", E2E_BUCKETS),
    Spec("tpot_seconds", Histogram, ("route", "upstream"), "Time per output token after the first; needs the server's usage.", TPOT_BUCKETS),
    Spec("interchunk_seconds", Histogram, ("route", "upstream"), "Gaps between token events of a stream; a chunk is not a token.", INTERCHUNK_BUCKETS),
    Spec("segment_seconds", Histogram, ("route", "upstream", "segment"), "Parts of a request's time; they add up to e2e_seconds.", E2E_BUCKETS),
    Spec("wait_seconds", Histogram, ("upstream", "cause", "source"), "Causes of the wait for the first token.", TTFT_BUCKETS),
    Spec("overhead_seconds", Histogram, (), "The gateway's own time per request: reading done to upstream write, less connecting and waiting for a slot.", OWN_BUCKETS),
    Spec("tokens_total", Counter, ("route", "upstream", "kind"), "Tokens as the model server reported them."),
    Spec("budget_exceeded_total", Counter, ("route", "action"), "Requests whose first token was over the budget."),
    Spec("pending", Gauge, (), "Requests that go on although their callers' connections were answered 202."),
    Spec("pending_results_total", Counter, ("result",), "Pending requests: created, and what became of them."),
    Spec("breaker_state", Gauge, ("upstream", "model"), "Circuit breaker: 0 closed, 1 half-open, 2 open.", mode="livemax"),
    Spec("breaker_transitions_total", Counter, ("upstream", "model", "to"), "Circuit breaker changes of state."),
    Spec("estimate_ratio", Histogram, ("route",), "Time to first token over what was predicted when the request was sent.", RATIO_BUCKETS),
    Spec("shared_state_degraded", Gauge, (), "1 while the shared store cannot be reached and each replica is on its own.", mode="livemax"),
    Spec("inflight", Gauge, ("upstream",), "Requests at an upstream now."),
    Spec("upstream_connections", Gauge, ("upstream", "state"), "Connections to an upstream now."),
    Spec("upstream_connects_total", Counter, ("upstream", "reused", "failed"), "Connections taken for a request."),
    Spec("upstream_up", Gauge, ("upstream",), "1 when the last health check passed.", mode="livemax"),
    Spec("attempts_total", Counter, ("route", "kind"), "Requests sent to upstreams."),
    Spec("policy_changes_total", Counter, ("route", "kind"), "Changes made to requests by policies."),
    Spec("clean_changes_total", Counter, ("route", "kind"), "Places changed by prompt cleaning."),
    Spec("thinking_violations_total", Counter, ("route", "kind"), "Answers that thought although `thinking: off` was asked, and refused switches."),
    Spec("empty_answers_total", Counter, ("route", "kind"), "Answers with status 200 and nothing visible in them."),
    Spec("upstream_failures_total", Counter, ("upstream", "reason"), "Failed exchanges with an upstream by cause."),
    Spec("loop_lag_seconds", Histogram, (), "How late the event loop runs a timer.", OWN_BUCKETS),
    Spec("build_info", Gauge, ("version",), "1; the version is the label.", mode="livemax"),
    Spec("config_reloads_total", Counter, ("result",), "Reloads of the configuration."),
)  # fmt: skip
METRIC_NAMES: Final = tuple(f"gateway_{spec.name}" for spec in SPECS)
_LABELS: Final = {spec.name: spec.labels for spec in SPECS}

FAILURE_REASONS: Final = (
    "dns", "connect_refused", "connect_timeout", "connect_failed", "tls", "queue_full", "queue_timeout", "reset_no_bytes", "eof_no_bytes",
    "reset_mid", "eof_in_head", "body_cut", "not_http", "bad_framing", "bad_header", "bad_status", "unexpected_101",
    "interim_flood", "head_too_large", "surplus_bytes", "content_type", "mode_mismatch", "redirect", "content_encoding",
    "first_byte_timeout", "first_token_timeout", "stall", "total_timeout", "write_stall", "no_finish", "stream_error",
    "http_4xx", "http_5xx", "stale_reconnect", "response_too_large", "caller_deadline", "silent", "bad_json", "no_choices",
    "other",
)  # fmt: skip


class Count:
    """One counter child."""

    __slots__ = ("_child", "_flushed", "value")

    def __init__(self, child: Counter) -> None:
        self._child = child
        self._flushed = 0.0
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def flush(self) -> None:
        if self.value != self._flushed:
            self._child.inc(self.value - self._flushed)
            self._flushed = self.value


class Level:
    """One gauge child."""

    __slots__ = ("_child", "_flushed", "value")

    def __init__(self, child: Gauge) -> None:
        self._child = child
        self._flushed: float | None = None
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def inc(self) -> None:
        self.value += 1

    def dec(self) -> None:
        self.value -= 1

    def flush(self) -> None:
        if self.value != self._flushed:
            self._child.set(self.value)
            self._flushed = self.value


class Distribution:
    """One histogram child, and a way to add counts that were gathered elsewhere.

    prometheus_client has no bulk add; its children keep `_buckets` and `_sum` in both of its modes alike.
    """

    __slots__ = ("_bounds", "_buckets", "_flushed", "_is_dirty", "_sum", "counts", "total")

    def __init__(self, child: Histogram) -> None:
        self._bounds: list[float] = child._upper_bounds[:-1]
        self._buckets = child._buckets
        self._sum = child._sum
        self._flushed = ([0] * len(self._buckets), 0.0)
        self._is_dirty = False
        self.counts = [0] * len(self._buckets)  # per bucket, +Inf last, not cumulative
        self.total = 0.0  # seconds

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds
        self._is_dirty = True

    def add(self, counts: Iterable[int], total_s: float) -> None:
        """Adds a count per bucket (same bounds, +Inf last) and their sum in seconds."""
        own = self.counts
        for index, count in enumerate(counts):
            if count:
                own[index] += count
        self.total += total_s
        self._is_dirty = True

    def flush(self) -> None:
        if not self._is_dirty:
            return
        self._is_dirty = False
        old_counts, old_total = self._flushed
        for bucket, old, new in zip(self._buckets, old_counts, self.counts, strict=True):
            if new != old:
                bucket.inc(new - old)
        self._sum.inc(self.total - old_total)
        self._flushed = (self.counts.copy(), self.total)


class Metrics:
    """All metrics of one process. Makes the prepared sets below."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._meters: dict[tuple[str, tuple[str, ...]], Count | Level | Distribution] = {}
        self._all: dict[str, Counter | Gauge | Histogram] = {spec.name: _make(spec, registry) for spec in SPECS}
        self.overhead = self.distribution("overhead_seconds")
        self.loop_lag = self.distribution("loop_lag_seconds")
        self.level("build_info", __version__).set(1)
        self.pending = PendingMeters(self)
        self.degraded = self.level("shared_state_degraded")
        self.reloads = self.counts("config_reloads_total", (), ("ok", "failed"))

    def route(self, route: str) -> RouteMeters:
        return RouteMeters(self, route)

    def pair(self, route: str, upstream: str) -> PairMeters:
        """Meters of a route and one of its upstreams."""
        return PairMeters(self, route, upstream)

    def refused(self, route: str) -> dict[str, Count]:
        """Requests of a route that got as far as no upstream, by outcome."""
        return self.counts("requests_total", (route, "none"), OUTCOMES)

    def upstream(self, upstream: str) -> UpstreamMeters:
        return UpstreamMeters(self, upstream)

    def flush(self) -> None:
        """Carries everything that changed to prometheus_client."""
        for meter in self._meters.values():
            meter.flush()

    def forget(self, label: Literal["route", "upstream"], value: str) -> None:
        """Takes every series of a route or upstream that is no more off the page (C108).

        Only in one process: the files that workers share offer no way to take a series back; there it stays until
        the restart.
        """
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            return
        for spec in SPECS:
            if label in spec.labels:
                self._all[spec.name].remove_by_labels({label: value})
        self._meters = {key: meter for key, meter in self._meters.items() if not _is_about(key, label, value)}

    def series(self) -> Iterator[tuple[Spec, list[tuple[tuple[str, ...], Count | Level | Distribution]]]]:
        """Every metric with its series, as label values and the meter that counts."""
        found: dict[str, list[tuple[tuple[str, ...], Count | Level | Distribution]]] = {spec.name: [] for spec in SPECS}
        for (name, labels), meter in self._meters.items():
            found[name].append((labels, meter))
        for spec in SPECS:
            yield spec, found[spec.name]

    def count(self, name: str, *labels: str) -> Count:
        known = self._meters.get((name, labels))
        if known is None:
            metric = self._all[name]
            assert isinstance(metric, Counter)
            known = self._meters[name, labels] = Count(metric.labels(*labels) if labels else metric)
        assert isinstance(known, Count)
        return known

    def counts(self, name: str, fixed: tuple[str, ...], kinds: Iterable[str]) -> dict[str, Count]:
        """One counter per value of the last label."""
        return {kind: self.count(name, *fixed, kind) for kind in kinds}

    def level(self, name: str, *labels: str) -> Level:
        known = self._meters.get((name, labels))
        if known is None:
            metric = self._all[name]
            assert isinstance(metric, Gauge)
            known = self._meters[name, labels] = Level(metric.labels(*labels) if labels else metric)
        assert isinstance(known, Level)
        return known

    def distribution(self, name: str, *labels: str) -> Distribution:
        known = self._meters.get((name, labels))
        if known is None:
            metric = self._all[name]
            assert isinstance(metric, Histogram)
            known = self._meters[name, labels] = Distribution(metric.labels(*labels) if labels else metric)
        assert isinstance(known, Distribution)
        return known


def _is_about(key: tuple[str, tuple[str, ...]], label: str, value: str) -> bool:
    """Whether a meter's series has this label with this value."""
    name, values = key
    return (label, value) in zip(_LABELS[name], values, strict=True)


class RouteMeters:
    """What is counted per route alone."""

    def __init__(self, metrics: Metrics, route: str) -> None:
        self.budget_exceeded = metrics.counts("budget_exceeded_total", (route,), BUDGET_ACTIONS)
        self.attempts = metrics.counts("attempts_total", (route,), ATTEMPT_KINDS)
        self.policy_changes = metrics.counts("policy_changes_total", (route,), POLICY_KINDS)
        self.clean_changes = metrics.counts("clean_changes_total", (route,), CLEAN_KINDS)
        self.violations = metrics.counts("thinking_violations_total", (route,), VIOLATION_KINDS)
        self.empty_answers = metrics.counts("empty_answers_total", (route,), EMPTY_KINDS)
        self.estimate_ratio = metrics.distribution("estimate_ratio", route)


class PendingMeters:
    """What is counted of requests whose callers took 202."""

    def __init__(self, metrics: Metrics) -> None:
        self.running = metrics.level("pending")
        self.results = metrics.counts("pending_results_total", (), PENDING_RESULTS)


class PairMeters:
    """What is counted per route and upstream."""

    def __init__(self, metrics: Metrics, route: str, upstream: str) -> None:
        pair = (route, upstream)
        self.requests = metrics.counts("requests_total", pair, OUTCOMES)
        self.tokens = metrics.counts("tokens_total", pair, TOKEN_KINDS)
        self.ttft = metrics.distribution("ttft_seconds", *pair)
        self.ttfv = metrics.distribution("ttfv_seconds", *pair)
        self.e2e = metrics.distribution("e2e_seconds", *pair)
        self.tpot = metrics.distribution("tpot_seconds", *pair)
        self.interchunk = metrics.distribution("interchunk_seconds", *pair)
        self.segments = tuple(metrics.distribution("segment_seconds", *pair, name) for name in SEGMENTS)


class UpstreamMeters:
    """What is counted per upstream; also what its pool reports to (`pool.PoolMeters`).

    One object per pool: each adds its own changes to gauges that it may share with a pool of the same name which is
    drained after a reload.
    """

    def __init__(self, metrics: Metrics, upstream: str) -> None:
        self._metrics = metrics
        self._name = upstream
        self._causes: dict[tuple[str, str], Distribution] = {}
        self.inflight = metrics.level("inflight", upstream)
        self.up = metrics.level("upstream_up", upstream)
        self._idle, self._busy, self._connecting = (
            metrics.level("upstream_connections", upstream, state) for state in ("idle", "busy", "connecting")
        )
        self._reused = metrics.count("upstream_connects_total", upstream, "true", "false")
        self._fresh = metrics.count("upstream_connects_total", upstream, "false", "false")
        self._failed = metrics.count("upstream_connects_total", upstream, "false", "true")
        self._failures = metrics.counts("upstream_failures_total", (upstream,), FAILURE_REASONS)
        self._seen = (0, 0, 0)

    def wait(self, cause: str, source: str) -> Distribution:
        """The histogram of one cause of the wait, as told by `source`."""
        known = self._causes.get((cause, source))
        if known is None:
            known = self._causes[cause, source] = self._metrics.distribution("wait_seconds", self._name, cause, source)
        return known

    def breaker_made(self, model: str) -> None:
        """Series that begin with 0, so that the first change shows in a rate."""
        self._metrics.level("breaker_state", self._name, model).set(0)
        self._metrics.counts("breaker_transitions_total", (self._name, model), BREAKER_STATES)

    def breaker_moved(self, model: str, old: str, new: str) -> None:  # noqa: ARG002
        """A circuit breaker changed its state; `model` is a name of the configuration, or `other`."""
        self._metrics.level("breaker_state", self._name, model).set(_BREAKER_LEVEL.get(new, 0))
        self._metrics.count("breaker_transitions_total", self._name, model, new).inc()

    def failure(self, reason: str) -> None:
        (self._failures.get(reason) or self._failures["other"]).inc()

    def connected(self, *, reused: bool) -> None:
        (self._reused if reused else self._fresh).inc()

    def connect_failed(self) -> None:
        self._failed.inc()

    def connections(self, idle: int, busy: int, connecting: int) -> None:
        was_idle, was_busy, was_connecting = self._seen
        self._idle.value += idle - was_idle
        self._busy.value += busy - was_busy
        self._connecting.value += connecting - was_connecting
        self._seen = (idle, busy, connecting)


def _make(spec: Spec, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    name = f"gateway_{spec.name}"
    if spec.type is Histogram:
        return Histogram(name, spec.help, spec.labels, buckets=spec.buckets, registry=registry)
    if spec.type is Gauge:
        return Gauge(name, spec.help, spec.labels, registry=registry, multiprocess_mode=spec.mode)
    return Counter(name, spec.help, spec.labels, registry=registry)

"""Meters, the page made of them, and that docs/metrics.md tells the truth about both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.metrics import (
    ATTEMPT_KINDS,
    BUDGET_ACTIONS,
    CLEAN_KINDS,
    EMPTY_KINDS,
    OUTCOMES,
    POLICY_KINDS,
    SEGMENTS,
    SPECS,
    TOKEN_KINDS,
    VIOLATION_KINDS,
    WAIT_CAUSES,
    Metrics,
    Spec,
)  # fmt: skip
from gateway.web.exposition import OPENMETRICS, TEXT, page_of
from tests.support.pages import library_pages, open_page, samples, text_page

TEXT_OF_DOCS = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `gateway_(\w+)` \| (counter|gauge|histogram) \| ([^|]+) \| (.+) \|$", re.MULTILINE)
_TYPES = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}


# -- docs/metrics.md ---------------------------------------------------------------------------------------------------


def test_every_metric_is_documented_and_nothing_else() -> None:
    assert sorted(name for name, *_ in _ROW.findall(TEXT_OF_DOCS)) == sorted(spec.name for spec in SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_metric_has_its_true_type_labels_and_buckets(spec: Spec) -> None:
    rows = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in _ROW.findall(TEXT_OF_DOCS)}
    assert rows[spec.name] == (_TYPES[spec.type], spec.labels)
    if spec.buckets:
        line = next(
            line for line in TEXT_OF_DOCS.splitlines() if f"`gateway_{spec.name}`" in line and re.search(r"\d \d", line)
        )
        assert tuple(float(edge) for edge in line.split("|")[2].split()) == spec.buckets


@pytest.mark.parametrize(
    "words",
    [
        OUTCOMES,
        ATTEMPT_KINDS,
        SEGMENTS,
        WAIT_CAUSES,
        TOKEN_KINDS,
        EMPTY_KINDS,
        VIOLATION_KINDS,
        POLICY_KINDS,
        CLEAN_KINDS,
        BUDGET_ACTIONS,
    ],
    ids=lambda words: words[0],
)
def test_every_value_of_a_closed_label_is_explained(words: tuple[str, ...]) -> None:
    assert [word for word in words if f"`{word}`" not in TEXT_OF_DOCS] == []


def test_the_number_of_series_is_as_told() -> None:
    metrics = Metrics(CollectorRegistry())
    for route in ("a", "b", "c"):
        metrics.route(route)
        for upstream in ("x", "y"):
            metrics.pair(route, upstream)
    for upstream in ("x", "y"):
        metrics.upstream(upstream)
    metrics.refused("none")
    page, _ = page_of(metrics, "")
    told = re.search(r"([\d,]+) series and (\d+) KB", TEXT_OF_DOCS)
    assert told is not None
    count = sum(not line.startswith("#") for line in page.decode().splitlines())
    assert float(told[1].replace(",", "")) == pytest.approx(count, rel=0.05)
    assert float(told[2]) == pytest.approx(len(page) / 1000, rel=0.1)


# -- meters ------------------------------------------------------------------------------------------------------------


def test_first_token_times_from_milliseconds_to_minutes_are_told_apart() -> None:
    """C102: a p99 stuck at the edge of the last bucket."""
    metrics = Metrics(CollectorRegistry())
    for name, values in (
        ("ttft_seconds", (0.02, 0.2, 2, 20, 120.5, 500)),
        ("e2e_seconds", (0.02, 0.2, 2, 20, 500, 900)),
    ):
        meter = metrics.distribution(name, "r", "u")
        for value in values:
            meter.observe(value)
        assert max(meter.counts) == 1
        assert meter.counts[-1] == 0
        assert meter.total == pytest.approx(sum(values))


def test_parts_of_a_requests_time_have_the_same_edges() -> None:
    """C102: differences between two histograms went negative."""
    edges = {spec.name: spec.buckets for spec in SPECS}
    assert edges["ttft_seconds"] == edges["ttfv_seconds"] == edges["wait_seconds"] == edges["e2e_seconds"][:-1]
    assert edges["segment_seconds"] == edges["e2e_seconds"]


@pytest.mark.parametrize("value, bucket", [(0.0, 0), (0.005, 0), (0.0050001, 1), (600, 19), (601, 20)])
def test_an_edge_belongs_to_its_bucket(value: float, bucket: int) -> None:
    """Prometheus' `le`."""
    meter = Metrics(CollectorRegistry()).distribution("ttft_seconds", "r", "u")
    meter.observe(value)
    assert meter.counts[bucket] == 1


def filled() -> Metrics:
    metrics = Metrics(CollectorRegistry())
    metrics.route('odd "route" \\ 日本')
    pair = metrics.pair("r", "u")
    pair.requests["complete"].inc()
    pair.tokens["prompt"].inc(12)
    pair.ttft.observe(0.3)
    pair.ttft.observe(7000)
    pair.interchunk.add([0, 2, *[0] * 13, 1], 7.5)
    upstream = metrics.upstream("u")
    upstream.up.set(1)
    upstream.wait("queue", "server").observe(0.1)
    upstream.failure("dns")
    upstream.failure("a word that nobody knows")
    return metrics


def test_the_page_is_what_the_library_would_write() -> None:
    metrics = filled()
    pages = [page_of(metrics, "")[0], page_of(metrics, "application/openmetrics-text;version=1.0.0")[0]]
    metrics.flush()
    for ours, theirs, parse in zip(pages, library_pages(metrics.registry), (text_page, open_page), strict=True):
        assert samples(parse(ours)) == samples(parse(theirs))


def test_flushing_twice_adds_nothing() -> None:
    metrics = filled()
    metrics.flush()
    once = samples(text_page(library_pages(metrics.registry)[0]))
    metrics.flush()
    assert samples(text_page(library_pages(metrics.registry)[0])) == once
    assert ("gateway_upstream_failures_total", (("reason", "other"), ("upstream", "u")), 1.0) in once


def test_the_scraper_chooses_the_form() -> None:
    metrics = Metrics(CollectorRegistry())
    assert page_of(metrics, "text/plain")[1] == TEXT
    assert page_of(metrics, "")[1] == TEXT
    assert page_of(metrics, "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")[1] == OPENMETRICS


def test_the_same_series_is_one_meter() -> None:
    """A reload makes meters again; two for one series would count each other's samples away."""
    metrics = Metrics(CollectorRegistry())
    assert metrics.pair("r", "u").ttft is metrics.pair("r", "u").ttft
    assert metrics.level("inflight", "u") is metrics.level("inflight", "u")
    assert metrics.counts("tokens_total", ("r", "u"), ("prompt",))["prompt"] is metrics.count(
        "tokens_total", "r", "u", "prompt"
    )


def test_two_pools_of_one_name_add_up() -> None:
    """F13: the old pool drains while the new one serves."""
    metrics = Metrics(CollectorRegistry())
    old, new = metrics.upstream("u"), metrics.upstream("u")
    old.connections(idle=1, busy=2, connecting=0)
    new.connections(idle=0, busy=3, connecting=1)
    old.connections(idle=0, busy=1, connecting=0)
    levels = {
        state: metrics.level("upstream_connections", "u", state).value for state in ("idle", "busy", "connecting")
    }
    assert levels == {"idle": 0, "busy": 4, "connecting": 1}
    old.connections(idle=0, busy=0, connecting=0)
    assert metrics.level("upstream_connections", "u", "busy").value == 3


def test_a_forgotten_upstream_leaves_page_and_registry() -> None:
    """C108."""
    metrics = filled()
    metrics.flush()
    metrics.forget("upstream", "u")
    metrics.flush()
    for page in (page_of(metrics, "")[0], library_pages(metrics.registry)[0]):
        assert b'upstream="u"' not in page
        assert b"route=" in page


def test_several_workers_cannot_forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    metrics = filled()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    metrics.forget("upstream", "u")
    assert b'upstream="u"' in page_of(metrics, "")[0]

"""Metrics pages as sets of samples, whichever form they have."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families

Sample = tuple[str, tuple[tuple[str, str], ...], float]


def text_page(page: bytes) -> list[Metric]:
    """Parses the text form; raises ValueError where it is not valid."""
    return list(families(page.decode()))


def open_page(page: bytes) -> list[Metric]:
    """Parses OpenMetrics, which is stricter."""
    return list(open_families(page.decode()))  # type: ignore[no-untyped-call]


def library_pages(registry: CollectorRegistry) -> tuple[bytes, bytes]:
    """What prometheus_client itself writes: text, OpenMetrics."""
    return generate_latest(registry), generate_open(registry)  # type: ignore[no-untyped-call]


def samples(found: list[Metric], *, without: str = "") -> set[Sample]:
    """All samples but those of one family and of creation times."""
    return {
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in found
        if family.name != without
        for sample in family.samples
        if not sample.name.endswith("_created")
    }

"""What a panel of the dashboard is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from grafana.queries import PAIR, quantile


@dataclass(frozen=True, slots=True)
class Query:
    """One line or bar of a panel; `legend` may use {{label}}."""

    legend: str
    expression: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a row."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: Literal["lines", "areas", "bars", "stat"] = "lines"  # areas and bars are stacked
    width: int = 8  # of 24
    height: int = 8
    most: float | None = None  # upper end of the axis
    warn_above: float | None = None  # a stat is orange from here on
    alarm_above: float | None = None  # … and red from here on
    words: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # a value's text and colour


def quantiles(metric: str, *which: float, labels: str = PAIR, prefix: str = "") -> list[Query]:
    return [Query(f"{prefix}p{round(q * 100)}", quantile(q, metric, labels)) for q in which]

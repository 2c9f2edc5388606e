"""The dashboard "First token" as code: `python -m grafana.build` writes grafana/dashboards/first-token.json.

Change panels.py, late.py, queries.py or this file, run the command, commit all of it; a test compares them.
Here: what Grafana wants to read.
"""

from __future__ import annotations

import json
from pathlib import Path

from grafana.panel import Panel, Query
from grafana.panels import ROWS

TARGET = Path(__file__).parent / "dashboards" / "first-token.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24  # columns of Grafana's grid

OUTCOME_COLORS = {
    "complete": "green",
    "client_cancelled": "super-light-blue",
    "upstream_error": "red",
    "upstream_truncated": "dark-red",
    "upstream_timeout": "orange",
    "budget_failed": "dark-yellow",
    "refused": "light-purple",
    "pending_done": "light-green",
    "internal_error": "dark-purple",
}
# One colour per meaning, the same in every panel.
COLORS = {
    "upload": "super-light-blue", "gateway": "purple", "connect": "light-blue", "wait": "yellow",
    "reasoning": "orange", "decode": "green", "tail": "text",
    "network": "light-blue", "input": "super-light-yellow", "queue": "red", "prefill": "yellow", "unexplained": "text",
    "TTFT p50": "super-light-blue", "TTFT p90": "blue", "TTFT p99": "dark-blue",
    "TTFV p50": "super-light-orange", "TTFV p90": "orange", "TTFV p99": "dark-orange",
    "reused": "green", "new": "blue", "failed": "red",
}  # fmt: skip


def dashboard() -> dict[str, object]:
    """The whole document."""
    return {
        "uid": "first-token",
        "title": "First token",
        "description": "Where the time of requests to self-hosted models goes, as the Firsttoken gateway measures it.",
        "tags": ["firsttoken", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": variables()},
        "panels": laid_out(),
    }


def variables() -> list[dict[str, object]]:
    """Data source, routes, upstreams."""
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {"text": "default", "value": "default"},
            "options": [],
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "refresh": 1,
            "regex": "",
        },
        choice("route", "Route", "label_values(gateway_requests_total, route)"),
        choice("upstream", "Upstream", 'label_values(gateway_requests_total{route=~"$route"}, upstream)'),
    ]


def choice(name: str, label: str, query: str) -> dict[str, object]:
    """A variable with one, several or all of a label's values."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "current": {"text": ["All"], "value": ["$__all"]},
        "allValue": ".*",
        "options": [],
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "refresh": 2,  # when the time range changes
        "regex": "",
        "sort": 1,
    }


def laid_out() -> list[dict[str, object]]:
    """Rows and panels with their places, from left to right and from top to bottom."""
    found: list[dict[str, object]] = []
    top = 0
    for title, panels in ROWS:
        place = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        found.append(
            {"id": len(found) + 1, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}
        )
        top += 1
        left = height = 0
        for panel in panels:
            if left + panel.width > WIDTH:
                left, top = 0, top + height
            height = panel.height
            place = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            found.append({"id": len(found) + 1, **panel_json(panel), "gridPos": place})
            left += panel.width
        top += height
    return found


def panel_json(panel: Panel) -> dict[str, object]:
    """A panel without its place."""
    is_stat = panel.kind == "stat"
    made: dict[str, object] = {
        "type": "stat" if is_stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "targets": [target(index, query) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": defaults(panel), "overrides": [] if is_stat else colors(panel)},
        "options": stat_options(panel) if is_stat else GRAPH_OPTIONS,
    }
    if panel.kind == "bars":
        made["maxDataPoints"] = 60  # wide bars; the interval of the rate grows with them
    return made


def target(index: int, query: Query) -> dict[str, object]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": query.expression,
        "legendFormat": query.legend,
        "range": True,
        "instant": False,
    }


def defaults(panel: Panel) -> dict[str, object]:
    """Unit, axis and drawing; `noValue` stands where there is nothing to show."""
    made: dict[str, object] = {"unit": panel.unit, "noValue": "–", "min": 0, "thresholds": thresholds(panel)}
    if panel.most is not None:
        made["max"] = panel.most
    if panel.kind == "stat":
        words = {
            value: {"text": text, "color": color, "index": index}
            for index, (value, (text, color)) in enumerate(panel.words.items())
        }
        made["color"] = {"mode": "thresholds"}
        made["mappings"] = [{"type": "value", "options": words}] if words else []
        return made
    made["color"] = {"mode": "palette-classic"}
    made["custom"] = {
        "drawStyle": "bars" if panel.kind == "bars" else "line",
        "fillOpacity": {"bars": 80, "areas": 40}.get(panel.kind, 0),
        "lineWidth": 0 if panel.kind == "bars" else 1,
        "lineInterpolation": "linear",
        "showPoints": "auto",
        "spanNulls": False,
        "axisPlacement": "auto",
        "stacking": {"mode": "none" if panel.kind == "lines" else "normal", "group": "A"},
    }
    return made


def thresholds(panel: Panel) -> dict[str, object]:
    steps: list[dict[str, object]] = [{"color": "green", "value": None}]
    for color, value in (("orange", panel.warn_above), ("red", panel.alarm_above)):
        if value is not None:
            steps.append({"color": color, "value": value})
    return {"mode": "absolute", "steps": steps}


def colors(panel: Panel) -> list[dict[str, object]]:
    """The colours of the names that may appear in a graph."""
    legends = {query.legend for query in panel.queries}
    named = {name: color for name, color in COLORS.items() if name in legends}
    if "{{outcome}}" in legends:
        named |= OUTCOME_COLORS
    return [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
        }
        for name, color in named.items()
    ]


def stat_options(panel: Panel) -> dict[str, object]:
    return {
        "colorMode": "background_solid" if panel.words else "value",
        "graphMode": "none" if "{{" in panel.queries[0].legend else "area",
        "justifyMode": "auto",
        "textMode": "value_and_name" if "{{" in panel.queries[0].legend else "value",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }


GRAPH_OPTIONS = {
    "legend": {"displayMode": "table", "placement": "right", "showLegend": True, "calcs": ["lastNotNull", "mean"]},
    "tooltip": {"mode": "multi", "sort": "none"},
}


def text() -> str:
    """The document as it is committed."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")

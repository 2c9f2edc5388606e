"""The dashboard "First token": what it says about itself, and every one of its queries on a real Prometheus (C110)."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from gateway.metrics import METRIC_NAMES, OUTCOMES, SEGMENTS, SPECS, WAIT_CAUSES
from grafana import build
from grafana.panels import CAUSES
from grafana.panels import SEGMENTS as SHOWN_SEGMENTS
from grafana.queries import ROUTE
from tests.grafana.processes import ROOT
from tests.grafana.scenario import ACCEPTS, Observed, observed

DASHBOARD: dict[str, Any] = json.loads(build.TARGET.read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES: dict[str, str] = {
    f"{panel['title']} / {target['legendFormat']}": target["expr"] for panel in PANELS for target in panel["targets"]
}
VARIABLES: dict[str, dict[str, Any]] = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
LABELS = {f"gateway_{spec.name}": {*spec.labels} for spec in SPECS}

_SELECTOR = re.compile(r"\b(gateway_\w+)(?:\{([^}]*)\})?")
_QUANTILE = re.compile(
    r"histogram_quantile\(0\.\d+, sum by \(le\) \(rate\(gateway_\w+_bucket(\{[^}]*\})?\[\$__rate_interval\]\)\)\)"
)

NEVER_IN_THIS_LOAD = {
    "The wait, by cause / unexplained",  # the simulated server tells all its times or none
    "Shared store / store",  # there is none
}


def metric_of(name: str) -> str:
    """The metric that a series belongs to."""
    return name if name in METRIC_NAMES else re.sub(r"_(bucket|sum|count)$", "", name)


# -- without a Prometheus ----------------------------------------------------------------------------------------------


def test_the_committed_dashboard_is_what_the_script_builds() -> None:
    """Otherwise: `python -m grafana.build`."""
    assert build.TARGET.read_text(encoding="utf-8") == build.text()


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_metrics_and_labels_that_exist(query: str) -> None:
    for name, matchers in _SELECTOR.findall(QUERIES[query]):
        assert metric_of(name) in METRIC_NAMES
        asked = re.findall(r'(\w+)=~?"', matchers)
        assert {*asked} <= LABELS[metric_of(name)]
    grouped = {label for labels in re.findall(r"by \(([^)]*)\)", QUERIES[query]) for label in labels.split(", ")}
    known = set[str]().union(*(LABELS[metric_of(name)] for name, _ in _SELECTOR.findall(QUERIES[query])))
    assert grouped <= known | {"le"}
    assert {*re.findall(r"\{\{(\w+)\}\}", query)} <= grouped


def filters_of(*expressions: str) -> set[str]:
    """Which of the choices at the top can filter all metrics in these."""
    names = [metric_of(name) for expression in expressions for name, _ in _SELECTOR.findall(expression)]
    return {"route", "upstream"}.intersection(*(LABELS[name] for name in names))


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_filters_by_route_and_upstream_where_its_metrics_can(query: str) -> None:
    for _, matchers in _SELECTOR.findall(QUERIES[query]):
        asked = {label for label in ("route", "upstream") if f'{label}=~"${label}"' in matchers}
        assert asked == filters_of(QUERIES[query])


@pytest.mark.parametrize("query", [query for query, text in QUERIES.items() if "quantile" in text])
def test_quantiles_add_up_replicas_before_they_are_taken(query: str) -> None:
    assert len(_QUANTILE.findall(QUERIES[query])) == QUERIES[query].count("histogram_quantile")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_in_which_unit_and_what_it_is_not_filtered_by(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    assert defaults["noValue"] == "–"
    filters = filters_of(*(target["expr"] for target in panel["targets"]))
    told = re.findall(r"Filtered by (\w+) only\.$|(Not filtered\.)$", panel["description"])
    assert panel["description"].endswith(".")
    assert told == ([] if len(filters) == 2 else [(*filters, "")] if filters else [("", "Not filtered.")])


def test_the_data_source_is_a_variable_with_a_default() -> None:
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["current"]["value"] == "default"
    sources = [panel["datasource"] for panel in PANELS]
    sources += [target["datasource"] for panel in PANELS for target in panel["targets"]]
    sources += [VARIABLES[name]["datasource"] for name in ("route", "upstream")]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)


def test_route_and_upstream_may_be_one_many_or_all() -> None:
    for name in ("route", "upstream"):
        variable = VARIABLES[name]
        assert variable["multi"]
        assert variable["includeAll"]
        assert variable["current"]["value"] == ["$__all"]


def test_no_two_panels_share_an_id_a_title_or_a_place() -> None:
    everything = DASHBOARD["panels"]
    for key in ("id", "title"):
        values = [panel[key] for panel in everything]
        assert len({*values}) == len(values)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in everything)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len({*cells}) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_segment_cause_and_outcome_has_its_place() -> None:
    assert SHOWN_SEGMENTS == SEGMENTS
    assert {*CAUSES} == {*WAIT_CAUSES}
    assert build.OUTCOME_COLORS.keys() == {*OUTCOMES}


# -- on a Prometheus that watched --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    if shutil.which("prometheus") is None:
        pytest.skip("there is no `prometheus` here (Debian's package has it)")
    with observed(tmp_path_factory.mktemp("prometheus")) as found:
        yield found


def filled_in(expression: str, route: str = ".*", upstream: str = ".*") -> str:
    """As Grafana sends it: its variables replaced. 5 s are five scrapes of this test."""
    values = {"$__rate_interval": "5s", "$__range": "60s", "$route": route, "$upstream": upstream}
    for name, value in values.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.parametrize("query", QUERIES)
def test_a_query_returns_numbers_under_load(watched: Observed, query: str) -> None:
    """C110."""
    found = watched.over_time(filled_in(QUERIES[query]))
    assert found
    values = [value for _, series in found for value in series]
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert (max(values) > 0) is (query not in NEVER_IN_THIS_LOAD)


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.parametrize("query", QUERIES)
def test_a_query_knows_no_nan_without_traffic(watched: Observed, query: str) -> None:
    """C110: a route that nobody uses, a route that is not there, the time before the first request."""
    unused = filled_in(QUERIES[query], route="idle")
    for _, series in (*watched.over_time(unused), *watched.over_time(filled_in(QUERIES[query], route="nobody"))):
        assert all(map(math.isfinite, series))
    assert all(map(math.isfinite, watched.at(watched.began, filled_in(QUERIES[query]))))
    if "route" in filters_of(QUERIES[query]):
        assert not any(value for _, series in watched.over_time(unused) for value in series)


SEEN = {
    "Outcomes / {{outcome}}": ["complete", "client_cancelled", "upstream_error", "upstream_truncated"],
    "Failures of model servers / {{reason}}": ["connect_refused", "http_5xx", "body_cut", "stream_error"],
    "Tokens of all requests / {{kind}}": ["prompt", "cached", "reasoning", "completion"],
    "Empty answers, unasked thinking / empty answer: {{kind}}": ["burnt_by_thinking"],
    "Empty answers, unasked thinking / thinking: {{kind}}": ["reasoning_seen"],
    "What policies changed / {{kind}}": ["thinking", "usage"],
    "What policies changed / clean: {{kind}}": ["dashes"],
    "Upstream connections / {{state}}": ["busy", "idle"],
    "Requests in flight / {{upstream}}": ["quick", "stubborn"],
    "Model servers / {{upstream}}": ["quick", "stubborn"],
    "Reloads of the configuration / {{result}}": ["ok"],
    "Circuit breakers / {{upstream}}: {{model}}": ["gone"],
    "Breakers' changes / {{upstream}}: to {{to}}": ["gone"],
    "What became of pending requests / {{result}}": ["created", "done"],
}


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.parametrize("query", SEEN)
def test_what_the_load_did_is_on_the_panel_under_its_name(watched: Observed, query: str) -> None:
    label, *_ = re.findall(r"\{\{(\w+)\}\}", query)
    found = watched.over_time(filled_in(QUERIES[query]))
    shown = {labels[label] for labels, values in found if max(values) > 0}
    assert {*SEEN[query]} <= shown


@pytest.mark.service
@pytest.mark.slow
def test_the_budgets_of_the_slow_routes_were_exceeded_and_no_other(watched: Observed) -> None:
    found = watched.over_time(filled_in(QUERIES["Budget exceeded / {{route}}: {{action}}"]))
    exceeded = [(labels["route"], labels["action"]) for labels, values in found if max(values) > 0]
    assert sorted(exceeded) == [("deep", "wait"), ("late", "pending")]


@pytest.mark.service
@pytest.mark.slow
def test_the_parts_of_a_bar_add_up(watched: Observed) -> None:
    """Segments to the mean duration, the parts before the first token to the mean TTFT."""
    settled = "broken|deep|default|fast"  # `late` begins so late that rate() may extrapolate sums and counts apart
    parts = {"TTFT": "Time to first token, split", "E2E": "Where a request's time goes"}
    for name, title in parts.items():
        sums, counts = (f"gateway_{name.lower()}_seconds_{part}{{{ROUTE}}}" for part in ("sum", "count"))
        whole = watched.at(watched.ended, filled_in(f"sum(rate({sums}[5s])) / sum(rate({counts}[5s]))", route=settled))
        bars = [expression for query, expression in QUERIES.items() if query.startswith(f"{title} /")]
        added = sum(value for bar in bars for value in watched.at(watched.ended, filled_in(bar, route=settled)))
        assert added == pytest.approx(whole[0], rel=1e-3)


@pytest.mark.service
@pytest.mark.slow
def test_both_replicas_count(watched: Observed) -> None:
    replicas = watched.at(watched.ended, filled_in(QUERIES["Replicas by version / {{version}}"]))
    assert replicas == [2.0]
    per_replica = watched.at(watched.ended, "sum by (instance) (gateway_requests_total)")
    assert len(per_replica) == 2
    assert min(per_replica) > 0


@pytest.mark.service
@pytest.mark.slow
def test_the_choices_at_the_top_are_the_routes_and_upstreams(watched: Observed) -> None:
    expected = {
        "route": ["broken", "deep", "default", "fast", "idle", "late", "none"],
        "upstream": ["gone", "none", "quick", "stubborn"],
    }
    for name, values in expected.items():
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", VARIABLES[name]["query"]["query"])
        assert found is not None
        assert watched.get(f"label/{found[2]}/values", **{"match[]": filled_in(found[1])}) == values


@pytest.mark.service
@pytest.mark.slow
def test_the_log_has_the_documented_fields_and_no_others(watched: Observed) -> None:
    page = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    table = re.split(r"^\| field \| meaning \|$", page, flags=re.MULTILINE)[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`.+?`) \|", table, flags=re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    seen = set[str]().union(*watched.records)
    assert documented - seen == {"key"}  # nobody had one
    assert seen <= documented


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTS)
def test_the_page_parses_whatever_form_was_asked_for(watched: Observed, name: str) -> None:
    """C109: after requests with odd model names."""
    page = watched.pages[name]
    is_openmetrics = page.content_type.startswith("application/openmetrics-text")
    assert is_openmetrics is (name != "text")
    families = list((openmetrics_families if is_openmetrics else text_families)(page.text))
    assert {f"{f.name}_total" if f.type == "counter" else f.name for f in families} >= {*METRIC_NAMES}


@pytest.mark.service
@pytest.mark.slow
def test_promtool_finds_nothing_to_complain_about(watched: Observed) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("there is no `promtool` here")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=watched.pages["text"].text, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")

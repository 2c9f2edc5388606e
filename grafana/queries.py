"""PromQL as the dashboard uses it. Three rules hold everywhere:

- Quantiles are `histogram_quantile(q, sum by (le) (rate(…[$__rate_interval])))`, so that replicas and workers add up.
- Without traffic a rate, a share or a mean is 0, and a quantile is absent: `>= 0` takes out the NaN of 0/0.
- `$route` and `$upstream` filter only metrics that have such a label.
"""

from __future__ import annotations

PAIR = 'route=~"$route", upstream=~"$upstream"'
ROUTE = 'route=~"$route"'
UPSTREAM = 'upstream=~"$upstream"'
TINY = "1e-9"  # a denominator that makes 0/0 a 0; real rates are above 1e-6, one request in ten days


def rate(metric: str, labels: str, by: str = "") -> str:
    """Per second, summed over everything but the labels in `by`."""
    total = f"sum by ({by}) " if by else "sum"
    selector = f"{{{labels}}}" if labels else ""
    return f"{total}(rate(gateway_{metric}{selector}[$__rate_interval]))"


def per_minute(metric: str, labels: str, by: str) -> str:
    """For what is rare: a rate per minute."""
    return f"60 * {rate(metric, labels, by)}"


def level(metric: str, by: str, how: str = "sum") -> str:
    """A gauge of upstreams, per value of the label `by`."""
    return f"{how} by ({by}) (gateway_{metric}{{{UPSTREAM}}})"


def quantile(q: float, metric: str, labels: str = "") -> str:
    """A quantile of a histogram; no value while nothing was observed."""
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', labels, 'le')}) >= 0"


def share(part: str, whole: str) -> str:
    """`part` of `whole`, 0 without traffic."""
    return f"{part} / clamp_min({whole}, {TINY})"


def or_zero(expression: str) -> str:
    """0 also where the metric itself is not there yet."""
    return f"{expression} or vector(0)"


def mean(metric: str, labels: str) -> str:
    """Mean of a histogram's observations, 0 without traffic."""
    return share(rate(f"{metric}_sum", labels), rate(f"{metric}_count", labels))


def segment(name: str) -> str:
    """Mean seconds that requests spent in a segment."""
    return mean("segment_seconds", f'{PAIR}, segment="{name}"')


def first_token_wait() -> str:
    """Mean TTFT less what comes before the wait. Not the segment `wait`, which holds a plain answer's whole time."""
    before = f'{PAIR}, segment=~"upload|gateway|connect"'
    earlier = share(rate("segment_seconds_sum", before), rate("e2e_seconds_count", PAIR))
    return f"clamp_min({mean('ttft_seconds', PAIR)} - {earlier}, 0)"


def wait_cause(name: str) -> str:
    """Mean seconds per request whose causes are known; `max`, since not every request has each cause."""
    told = rate("wait_seconds_count", UPSTREAM, "cause")
    part = rate("wait_seconds_sum", f'{UPSTREAM}, cause="{name}"')
    return or_zero(share(part, f"max({told})"))


def stream_speed(q: float) -> str:
    """Tokens per second of one stream: the inverse of a quantile of the time per token."""
    return f"1 / (histogram_quantile({q}, {rate('tpot_seconds_bucket', PAIR, 'le')}) > 0)"

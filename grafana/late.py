"""The row about late first tokens: budgets, attempts, breakers, estimates, pending answers (docs/resilience.md)."""

from __future__ import annotations

from grafana.panel import Panel, Query, quantiles
from grafana.queries import ROUTE, level, or_zero, per_minute, rate

LATE = [
    Panel(
        "Budget exceeded",
        "Requests per minute whose first token was later than the route's budget, by what the route does about it. "
        "wait, heartbeat: the caller waits. pending: it was answered 202 and comes back. "
        "fallback, hedge: another upstream was asked beside the first. fail: it was refused. "
        "Filtered by route only.",
        "cpm",
        [Query("{{route}}: {{action}}", per_minute("budget_exceeded_total", ROUTE, "route, action"))],
        kind="areas",
    ),
    Panel(
        "Attempts",
        "Requests per second that were sent to model servers, by why. first: the usual case. "
        "reconnect: a connection from the pool had died. retry: sent once more, there or to another upstream. "
        "hedge: to a second one beside the first. fallback: to the route's fallback. "
        "Filtered by route only.",
        "reqps",
        [Query("{{kind}}", rate("attempts_total", ROUTE, "kind"))],
        kind="areas",
    ),
    Panel(
        "Estimates",
        "Time to the first token as it was, divided by what was predicted when the request was sent: "
        "1 is exact, 2 is twice as long. Half of the requests are below the median, one in ten below p10 or above p90. "
        "Filtered by route only.",
        "suffix: ×",
        quantiles("estimate_ratio", 0.1, 0.5, 0.9, labels=ROUTE),
    ),
    Panel(
        "Circuit breakers",
        "Per upstream and model. open: nothing is sent there, or an operator took it out. "
        "half-open: a few requests find out whether it is back. "
        "Of several replicas the worst is shown. Filtered by upstream only.",
        "short",
        [Query("{{upstream}}: {{model}}", level("breaker_state", "upstream, model", "max"))],
        kind="stat", height=6, words={"0": ("closed", "green"), "1": ("half-open", "orange"), "2": ("open", "red")},
    ),
    Panel(
        "Breakers' changes",
        "How often circuit breakers changed their state since the gateways started, by where to: a step is a change. "
        "Not a rate, which would miss the first one. Filtered by upstream only.",
        "short",
        [Query("{{upstream}}: to {{to}}", level("breaker_transitions_total", "upstream, to"))],
        height=6,
    ),
    Panel(
        "Shared store",
        "down: the store that replicas share cannot be reached from at least one of them; each answers for its own "
        "requests, and callers that would get 202 wait. Always up with `store: memory`. Not filtered.",
        "short",
        [Query("store", "max(gateway_shared_state_degraded)")],
        kind="stat", height=6, words={"0": ("up", "green"), "1": ("down", "red")},
    ),
    Panel(
        "Pending now",
        "Requests that run on although their callers were answered 202. Not filtered.",
        "short",
        [Query("pending", or_zero("sum(gateway_pending)"))],
        kind="areas",
    ),
    Panel(
        "What became of pending requests",
        "Per minute. created: answered 202. done: the whole answer is there. failed, cancelled. "
        "expired: the answer was let go. joined: a retry found the running one. "
        "refused, withdrawn: the caller waited on its connection after all. Not filtered.",
        "cpm",
        [Query("{{result}}", per_minute("pending_results_total", "", "result"))],
        kind="areas", width=16,
    ),
]  # fmt: skip

"""The panels of the dashboard "First token", row by row. What the numbers mean: docs/metrics.md.

A panel whose metric has no `route` or no `upstream` label says so: the choice at the top does not filter it.
"""

from __future__ import annotations

from grafana.late import LATE
from grafana.panel import Panel, Query, quantiles
from grafana.queries import (
    PAIR,
    ROUTE,
    UPSTREAM,
    first_token_wait,
    level,
    or_zero,
    per_minute,
    rate,
    segment,
    share,
    stream_speed,
    wait_cause,
)

BEFORE_WAIT = ("upload", "gateway", "connect")
SEGMENTS = (*BEFORE_WAIT, "wait", "reasoning", "decode", "tail")
CAUSES = ("network", "input", "queue", "prefill", "unexplained")
FAILED = "upstream_error|upstream_truncated|upstream_timeout|budget_failed|internal_error"


GLANCE = [
    Panel(
        "Requests",
        "Requests per second that ended, however they did.",
        "reqps",
        [Query("requests", or_zero(rate("requests_total", PAIR)))],
        kind="stat", width=4, height=4,
    ),
    Panel(
        "In flight",
        "Requests that are at a model server at the moment. Filtered by upstream only.",
        "short",
        [Query("in flight", or_zero(f"sum(gateway_inflight{{{UPSTREAM}}})"))],
        kind="stat", width=4, height=4,
    ),
    Panel(
        "Failed",
        "Share of requests that failed on the serving side: the model server erred, broke off or was too slow, "
        "the route's budget ended it, or the gateway itself failed. "
        "Callers that left and requests that were refused do not count as failed.",
        "percentunit",
        [
            Query(
                "failed",
                or_zero(share(rate("requests_total", f'{PAIR}, outcome=~"{FAILED}"'), rate("requests_total", PAIR))),
            )
        ],
        kind="stat", width=4, height=4, most=1, warn_above=0.01, alarm_above=0.05,
    ),
    Panel(
        "TTFT, median",
        "Time to first token: from the first byte of a request to its first token of any kind, thinking included. "
        "Half of the streams were faster. Plain answers have none.",
        "s",
        quantiles("ttft_seconds", 0.5),
        kind="stat", width=4, height=4,
    ),
    Panel(
        "TTFV, median",
        "Time to first visible token: from the first byte of a request to the first token that a reader sees; "
        "thinking is not seen. Half of the streams were faster. Plain answers have none.",
        "s",
        quantiles("ttfv_seconds", 0.5),
        kind="stat", width=4, height=4,
    ),
    Panel(
        "Over the budget",
        "Share of requests whose first token was later than the route's budget allows. Filtered by route only.",
        "percentunit",
        [
            Query(
                "over the budget",
                or_zero(share(rate("budget_exceeded_total", ROUTE), rate("requests_total", ROUTE))),
            )
        ],
        kind="stat", width=4, height=4, most=1, warn_above=0.05, alarm_above=0.2,
    ),
]  # fmt: skip

FIRST_TOKEN = [
    Panel(
        "Time to first token, split",
        "Mean per stream; the parts of a bar add up to the mean time to first token. "
        "upload: the caller was still sending. "
        "gateway: cleaning, shaping, waiting for a free connection. "
        "connect: DNS, TCP and TLS; nothing on a connection that is used again. "
        "wait: the request was at the model server and no token had come. "
        "The first three are means over all requests, plain ones too.",
        "s",
        [*(Query(name, segment(name)) for name in BEFORE_WAIT), Query("wait", first_token_wait())],
        kind="bars", width=12,
    ),
    Panel(
        "The wait, by cause",
        "Mean per request whose causes are known, from the model server's own numbers. "
        "network: one round trip. "
        "input: chat template and tokenizer. "
        "queue: waiting at the server for its turn. "
        "prefill: the server was reading the prompt. "
        "unexplained: the part that nobody measured. "
        "All 0 with traffic: the server tells nothing (vLLM does with --enable-per-request-metrics). "
        "Filtered by upstream only.",
        "s",
        [Query(name, wait_cause(name)) for name in CAUSES],
        kind="bars", width=12,
    ),
    Panel(
        "TTFT against TTFV",
        "TTFT: until the first token of any kind. TTFV: until the first token that a reader sees. "
        "What lies between two lines of the same p is thinking. "
        "p50: half of the streams were faster. p99: one in a hundred was slower. "
        "Streams only; no line while there are none.",
        "s",
        [
            *quantiles("ttft_seconds", 0.5, 0.9, 0.99, prefix="TTFT "),
            *quantiles("ttfv_seconds", 0.5, 0.9, 0.99, prefix="TTFV "),
        ],
        width=12,
    ),
    Panel(
        "Reasoning share",
        "How much of the work is thinking. "
        "of time: what lies between first token and first visible token, of the whole time of all requests. "
        "of tokens: reasoning tokens among the completion tokens, as the model server counts them.",
        "percentunit",
        [
            Query(
                "of time",
                share(rate("segment_seconds_sum", f'{PAIR}, segment="reasoning"'), rate("e2e_seconds_sum", PAIR)),
            ),
            Query(
                "of tokens",
                share(
                    rate("tokens_total", f'{PAIR}, kind="reasoning"'),
                    rate("tokens_total", f'{PAIR}, kind="completion"'),
                ),
            ),
        ],
        width=12, most=1,
    ),
]  # fmt: skip

ANSWER = [
    Panel(
        "Decode rate of one stream",
        "Tokens per second after the first token: one divided by the time per output token. "
        "median: half of the streams were faster. slowest tenth: nine in ten were faster. "
        "Needs the token counts that the model server sends at the end of a stream.",
        "suffix: tok/s",
        [Query("median", stream_speed(0.5)), Query("slowest tenth", stream_speed(0.9))],
    ),
    Panel(
        "Gaps between chunks",
        "Time between two chunks of a stream that carry tokens. A server may put several tokens into one chunk, "
        "so this is not the time per token. A high p99 is what a reader sees as stutter.",
        "s",
        quantiles("interchunk_seconds", 0.5, 0.99),
    ),
    Panel(
        "Tokens of all requests",
        "Tokens per second, as the model servers reported them. "
        "cached is a part of prompt (the server's prefix cache had them), reasoning a part of completion.",
        "suffix: tok/s",
        [Query("{{kind}}", rate("tokens_total", PAIR, "kind"))],
    ),
    Panel(
        "Where a request's time goes",
        "Mean per request, plain ones too; the parts of a bar add up to the mean duration. "
        "reasoning: from the first token to the first visible one. "
        "decode: from there to the last token. "
        "tail: from the last token to the end of the answer. "
        "A plain answer comes whole: all of its making is wait.",
        "s",
        [Query(name, segment(name)) for name in SEGMENTS],
        kind="bars", width=12,
    ),
    Panel(
        "Duration of requests",
        "From the first byte of a request to the end of its answer, streams and plain answers.",
        "s",
        quantiles("e2e_seconds", 0.5, 0.9, 0.99),
        width=12,
    ),
]  # fmt: skip

OUTCOMES = [
    Panel(
        "Outcomes",
        "Requests per second by how they ended; each counts once. "
        "refused: turned away, or answered with an error that is the caller's to mend. "
        "upstream_truncated: the answer broke off after it had begun.",
        "reqps",
        [Query("{{outcome}}", rate("requests_total", PAIR, "outcome"))],
        kind="areas", width=12,
    ),
    Panel(
        "Failures of model servers",
        "Failed exchanges per minute by cause; a cause is shown while it occurs. Filtered by upstream only.",
        "cpm",
        [Query("{{reason}}", f"{per_minute('upstream_failures_total', UPSTREAM, 'reason')} > 0")],
        kind="areas", width=12,
    ),
    Panel(
        "Empty answers, unasked thinking",
        "Per minute. Empty answers have status 200 and nothing to see in them: "
        "burnt_by_thinking (thoughts used up max_tokens), misrouted (the answer came as a thought), empty. "
        "Thinking: reasoning_seen (it thought although the route asks for `thinking: off`), "
        "switch_rejected (the server refused the switch). "
        "Filtered by route only.",
        "cpm",
        [
            Query("empty answer: {{kind}}", per_minute("empty_answers_total", ROUTE, "kind")),
            Query("thinking: {{kind}}", per_minute("thinking_violations_total", ROUTE, "kind")),
        ],
        kind="areas", width=12,
    ),
    Panel(
        "What policies changed",
        "Per minute: changes that routes made to requests, and places in prompts that cleaning changed. "
        "Filtered by route only.",
        "cpm",
        [
            Query("{{kind}}", per_minute("policy_changes_total", ROUTE, "kind")),
            Query("clean: {{kind}}", per_minute("clean_changes_total", ROUTE, "kind")),
        ],
        kind="areas", width=12,
    ),
]  # fmt: skip

GATEWAY = [
    Panel(
        "Overhead",
        "The gateway's own time per request, without connecting and without waiting for a free connection. "
        "Not filtered.",
        "s",
        quantiles("overhead_seconds", 0.5, 0.99, labels=""),
    ),
    Panel(
        "Loop lag",
        "How late the event loop runs a timer. Above some 10 ms the process is short of CPU or something blocks it, "
        "and every other number is late by as much. Not filtered.",
        "s",
        quantiles("loop_lag_seconds", 0.5, 0.99, labels=""),
    ),
    Panel(
        "Requests in flight",
        "Requests at each model server at the moment. Filtered by upstream only.",
        "short",
        [Query("{{upstream}}", level("inflight", "upstream"))],
        kind="areas",
    ),
    Panel(
        "Upstream connections",
        "Connections to model servers at the moment: busy with a request, idle in the pool, or still connecting. "
        "Filtered by upstream only.",
        "short",
        [Query("{{state}}", level("upstream_connections", "state"))],
        kind="areas", width=12,
    ),
    Panel(
        "Connections taken",
        "Per second. reused: from the pool, at no cost. new: had to connect. failed: could not connect. "
        "Filtered by upstream only.",
        "cps",
        [
            Query("reused", rate("upstream_connects_total", f'{UPSTREAM}, reused="true"')),
            Query("new", rate("upstream_connects_total", f'{UPSTREAM}, reused="false", failed="false"')),
            Query("failed", rate("upstream_connects_total", f'{UPSTREAM}, failed="true"')),
        ],
        kind="areas", width=12,
    ),
    Panel(
        "Model servers",
        "up: the last health check passed. With several replicas of the gateway, the one that sees it worst counts. "
        "Filtered by upstream only.",
        "short",
        [Query("{{upstream}}", level("upstream_up", "upstream", "min"))],
        kind="stat", width=12, height=4, words={"0": ("down", "red"), "1": ("up", "green")},
    ),
    Panel(
        "Replicas by version",
        "Gateways that are scraped. Two versions: a roll-out is under way, or was left half done. Not filtered.",
        "short",
        [Query("{{version}}", "count by (version) (gateway_build_info)")],
        kind="stat", width=6, height=4,
    ),
    Panel(
        "Reloads of the configuration",
        "In the time shown. failed: a changed file had mistakes, which the log names; the old settings go on. "
        "Not filtered.",
        "short",
        [Query("{{result}}", "round(sum by (result) (increase(gateway_config_reloads_total[$__range])))")],
        kind="stat", width=6, height=4,
    ),
]  # fmt: skip

ROWS = [
    ("At a glance", GLANCE),
    ("The first token", FIRST_TOKEN),
    ("The answer", ANSWER),
    ("When it is late", LATE),
    ("How requests ended", OUTCOMES),
    ("The gateway itself", GATEWAY),
]

"""The server's own numbers, under vLLM's metric names, and the Prometheus page written from them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

# Buckets of vLLM 0.33, vllm/v1/metrics/buckets.py.
_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
_LATENCY = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts, sum and cumulative buckets, as Prometheus shows them."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Adds one value; a value equal to a bound belongs to that bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> Iterator[tuple[str, int]]:
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            yield ("+Inf" if bound == float("inf") else repr(float(bound)), total)


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is true now; the engine gives it when the page is asked for."""

    running: int
    waiting: int
    kv_cache_usage: float
    block_tokens: int
    cache_blocks: int
    prefix_cache: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """One ended request, in tokens and seconds. Times are None where that phase was never reached."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    generated: int
    max_tokens: int
    choices: int
    e2e_s: float
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None


class Stats:
    """Everything counted since the last start."""

    def __init__(self, max_model_len: int) -> None:
        lengths = tuple(_one_two_five(max_model_len))
        self.started_at = datetime.now(UTC).timestamp()
        self.prefix_queries = self.prefix_hits = 0
        self.prompt_tokens = self.generated_tokens = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(_FINISH_REASONS, 0))
        self.rejected: Counter[str] = Counter(max_num_queued_reqs=0, max_num_queued_tokens=0)
        self.http: Counter[tuple[str, str, str]] = Counter()  # (handler, status class, method)
        self.histograms = {
            "time_to_first_token_seconds": Histogram(_TTFT),
            "inter_token_latency_seconds": Histogram(_ITL),
            "request_time_per_output_token_seconds": Histogram(_ITL),
            **{f"request_{name}_time_seconds": Histogram(_LATENCY) for name in _PHASES},
            "e2e_request_latency_seconds": Histogram(_LATENCY),
            **{name: Histogram(lengths) for name in _LENGTHS},
            "request_params_n": Histogram((1, 2, 5, 10, 20)),
        }
        self._inter_token = self.histograms["inter_token_latency_seconds"]

    def scheduled(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request left the queue; the cache was asked for all of its tokens."""
        self.prefix_queries += prompt_tokens
        self.prefix_hits += cached_tokens
        self.prompt_tokens += prompt_tokens

    def first_token(self, ttft_s: float) -> None:
        self.histograms["time_to_first_token_seconds"].observe(ttft_s)

    def stepped(self, gap_s: float | None, tokens: int) -> None:
        """An engine step gave `tokens` tokens `gap_s` after the one before; None: it was the first."""
        self.generated_tokens += tokens
        if gap_s is not None:
            self._inter_token.observe(gap_s)

    def ended(self, done: Finished) -> None:
        """A request ended, well or not. Aborted ones count, but leave the histograms of whole requests alone."""
        self.finished[done.reason] += 1
        if done.reason == "abort" or done.queue_s is None or done.prefill_s is None or done.decode_s is None:
            return
        observe = {name: histogram.observe for name, histogram in self.histograms.items()}
        observe["request_queue_time_seconds"](done.queue_s)
        observe["request_prefill_time_seconds"](done.prefill_s)
        observe["request_decode_time_seconds"](done.decode_s)
        observe["request_inference_time_seconds"](done.prefill_s + done.decode_s)
        observe["e2e_request_latency_seconds"](done.e2e_s)
        observe["request_prompt_tokens"](done.prompt_tokens)
        observe["request_prefill_kv_computed_tokens"](done.prompt_tokens - done.cached_tokens)
        observe["request_generation_tokens"](done.generated)
        observe["request_params_max_tokens"](done.max_tokens)
        observe["request_params_n"](done.choices)
        if done.generated > 1:
            observe["request_time_per_output_token_seconds"](done.decode_s / (done.generated - 1))


_PHASES = ("queue", "prefill", "decode", "inference")
_LENGTHS = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
)


def _one_two_five(limit: int) -> Iterator[int]:
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > limit:
                return
            yield step * power
        power *= 10


def render_vllm(stats: Stats, gauges: Gauges, model: str) -> bytes:
    """The page of vLLM's `/metrics`: same names, types and labels, those of its series that a gateway may want."""
    page = _Page({"engine": "0", "model_name": model})
    page.gauge("vllm:num_requests_running", gauges.running)
    page.gauge("vllm:num_requests_waiting", gauges.waiting)
    page.family("vllm:num_requests_waiting_by_reason", "gauge", "reason", {"capacity": gauges.waiting, "deferred": 0})
    page.family(
        "vllm:engine_sleep_state", "gauge", "sleep_state", {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    )
    page.gauge("vllm:kv_cache_usage_perc", gauges.kv_cache_usage)
    page.counter("vllm:prefix_cache_queries", stats.prefix_queries, stats.started_at)
    page.counter("vllm:prefix_cache_hits", stats.prefix_hits, stats.started_at)
    page.counter("vllm:num_preemptions", 0, stats.started_at)
    page.counter("vllm:prompt_tokens", stats.prompt_tokens, stats.started_at)
    sources = {"local_compute": stats.prompt_tokens - stats.prefix_hits, "local_cache_hit": stats.prefix_hits}
    page.family("vllm:prompt_tokens_by_source_total", "counter", "source", {**sources, "external_kv_transfer": 0})
    page.counter("vllm:prompt_tokens_cached", stats.prefix_hits, stats.started_at)
    page.counter("vllm:generation_tokens", stats.generated_tokens, stats.started_at)
    page.family("vllm:request_success_total", "counter", "finished_reason", stats.finished)
    page.family("vllm:admission_rejections_total", "counter", "reason", stats.rejected)
    for name, histogram in stats.histograms.items():
        page.histogram(f"vllm:{name}", histogram)
    config = {"block_size": gauges.block_tokens, "enable_prefix_caching": gauges.prefix_cache}
    page.info("vllm:cache_config_info", {**config, "num_gpu_blocks": gauges.cache_blocks})
    page.http(stats.http)
    page.plain("process_start_time_seconds", "gauge", stats.started_at)
    return page.text()


def render_llamacpp(stats: Stats, gauges: Gauges) -> bytes:
    """llama.cpp's short page: no labels, no histograms."""
    page = _Page({})
    page.plain("llamacpp:prompt_tokens_total", "counter", stats.prompt_tokens - stats.prefix_hits)
    page.plain("llamacpp:prompt_seconds_total", "counter", stats.histograms["request_prefill_time_seconds"].sum)
    page.plain("llamacpp:tokens_predicted_total", "counter", stats.generated_tokens)
    decode_s = stats.histograms["request_decode_time_seconds"].sum
    page.plain("llamacpp:tokens_predicted_seconds_total", "counter", decode_s)
    page.plain("llamacpp:requests_processing", "gauge", gauges.running)
    page.plain("llamacpp:requests_deferred", "gauge", gauges.waiting)
    return page.text()


class _Page:
    """Prometheus text format, written line by line. Every series gets the labels given at the start."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def text(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def gauge(self, name: str, value: float) -> None:
        self._head(name, "gauge")
        self._line(name, value)

    def counter(self, name: str, value: float, created: float) -> None:
        self._head(f"{name}_total", "counter")
        self._line(f"{name}_total", value)
        self._head(f"{name}_created", "gauge")
        self._line(f"{name}_created", created)

    def plain(self, name: str, kind: str, value: float) -> None:
        self._head(name, kind)
        self._lines.append(f"{name} {float(value)!r}")

    def family(self, name: str, kind: str, label: str, values: Mapping[str, float]) -> None:
        self._head(name, kind)
        for key, value in values.items():
            self._line(name, value, {label: key})

    def info(self, name: str, labels: Mapping[str, object]) -> None:
        self._head(name, "gauge")
        self._line(name, 1, {key: str(value) for key, value in labels.items()})

    def histogram(self, name: str, histogram: Histogram) -> None:
        self._head(name, "histogram")
        for bound, count in histogram.cumulative():
            self._line(f"{name}_bucket", count, {"le": bound})
        self._line(f"{name}_count", histogram.count)
        self._line(f"{name}_sum", histogram.sum)

    def http(self, counts: Mapping[tuple[str, str, str], int]) -> None:
        self._head("http_requests_total", "counter")
        for (handler, status, method), count in counts.items():
            labels = f'handler="{handler}",method="{method}",status="{status}"'
            self._lines.append(f"http_requests_total{{{labels}}} {float(count)!r}")

    def _head(self, name: str, kind: str) -> None:
        self._lines.append(f"# HELP {name} Simulated.")
        self._lines.append(f"# TYPE {name} {kind}")

    def _line(self, name: str, value: float, more: Mapping[str, str] | None = None) -> None:
        pairs = sorted({**self._labels, **(more or {})}.items())
        labels = ",".join(f'{key}="{_escaped(text)}"' for key, text in pairs)
        self._lines.append(f"{name}{{{labels}}} {float(value)!r}")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

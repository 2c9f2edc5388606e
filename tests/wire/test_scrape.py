"""The numbers that a health check reads from a server's `/metrics`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.engines import FACTS, Engine
from gateway.wire.scrape import ServerNumbers, numbers_in

VLLM = b"""# HELP vllm:num_requests_waiting Requests in queue.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a b} c"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 40.0
vllm:prompt_tokens_total{engine="0"} 100.0
vllm:prompt_tokens_cached_total{engine="0"} 7.0
vllm:prompt_tokens_created{engine="0"} 1.7e9
vllm:generation_tokens_total{engine="0"} 1e3 1690000000 # {trace="x"} 1
process_start_time_seconds 1.69e9
"""


@pytest.mark.parametrize(
    "page, engine, expected",
    [
        (VLLM, "vllm", ServerNumbers(1.69e9, 5, {"vllm:prompt_tokens": 100.0, "vllm:generation_tokens": 1000.0})),
        (VLLM.replace(b"\n", b"\r\n"), "vllm", ServerNumbers(1.69e9, 5, {"vllm:prompt_tokens": 100.0, "vllm:generation_tokens": 1000.0})),
        (VLLM, "openai", ServerNumbers()),
        (VLLM, "sglang", ServerNumbers(1.69e9)),
        (b"sglang:num_queue_reqs{tp_rank=\"0\"} 4\nsglang:generation_tokens_total{} 9", "sglang", ServerNumbers(None, 4, {"sglang:generation_tokens": 9.0})),
        (b"llamacpp:requests_deferred 1\nllamacpp:tokens_predicted_total 8\nllamacpp:tokens_predicted_seconds_total 2", "llamacpp", ServerNumbers(None, 1, {"llamacpp:tokens_predicted": 8.0})),
        (b"vllm:generation_tokens 8\nvllm:num_requests_waiting NaN\nprocess_start_time_seconds x", "vllm", ServerNumbers(None, None, {"vllm:generation_tokens": 8.0})),
        (b"vllm:num_requests_waiting -1\nvllm:num_requests_waiting{broken 4\nvllm:num_requests_waiting", "vllm", ServerNumbers()),
        (b"<html>", "vllm", ServerNumbers()),
        (b"", "vllm", ServerNumbers()),
    ],
)  # fmt: skip
def test_the_numbers_of_a_page(page: bytes, engine: Engine, expected: ServerNumbers) -> None:
    """Sums over engines; names that only begin alike are others; `_total` may be missing."""
    assert numbers_in(page, engine) == expected


@pytest.mark.parametrize("header, start", [(b"1690000000", 1.69e9), (b"soon", None), (None, None)])
def test_llama_cpp_tells_its_start_in_a_header(header: bytes | None, start: float | None) -> None:
    assert numbers_in(b"", "llamacpp", header).start_time_s == start


@given(st.binary(max_size=300), st.sampled_from(list(FACTS)))
def test_no_page_raises(page: bytes, engine: Engine) -> None:
    numbers_in(page, engine)
    numbers_in(VLLM + page, engine)

"""Answers put together from a real vLLM's streams, beside its own plain answers to the same requests.

Every case is asked plainly at the server, and again in two ways: as a stream that is assembled here, and plainly through
a gateway whose route says `stream_upstream`. Each asking has a cache of its own, so that the counts of cached tokens are
the same too.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from gateway.wire.assemble import Assembler, can_assemble, stream_fields
from gateway.wire.kinds import Kind
from tests.vllm.gateway_process import GatewayProcess, serving
from tests.vllm.real_vllm import RealVllm, shared_folder

pytestmark = pytest.mark.vllm

PATHS: dict[str, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROMPT_COUNT = 125
MAX_PROMPT_BYTES = 600

# Times, and what is drawn anew for every answer.
NEVER_EQUAL = frozenset((
    "id", "created", "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
))  # fmt: skip

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "杭州"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
MARK = "｜DSML｜"
ONE_CALL = (
    f'<{MARK}invoke name="get_weather">\n<{MARK}parameter name="city" string="true">杭州</{MARK}parameter>\n'
    f'<{MARK}parameter name="days" string="false">3</{MARK}parameter>\n</{MARK}invoke>\n'
)
CALL = f"<{MARK}tool_calls>\n{ONE_CALL}</{MARK}tool_calls>"
TWO_CALLS = f"<{MARK}tool_calls>\n{ONE_CALL}{ONE_CALL}</{MARK}tool_calls>"
OFF = {"chat_template_kwargs": {"thinking": False}}


@dataclass(frozen=True)
class Case:
    """Members of a request beside its prompt, and what the answer must show lest the case test nothing."""

    name: str
    more: dict[str, Any] = field(default_factory=dict)
    kind: Kind = "chat"
    shows: Callable[[dict[str, Any]], object] = lambda answer: answer["usage"]["completion_tokens"] > 0


def _message(answer: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def says(text: str) -> dict[str, Any]:
    """Makes the model say this: a tiny one calls no tools by itself."""
    return {"structured_outputs": {"choice": [text]}, "tools": [WEATHER], "max_tokens": 600, **OFF}


CASES = (
    Case("thinks and answers", shows=lambda answer: _message(answer)["reasoning"] and _message(answer)["content"]),
    Case("thinking is off", OFF, shows=lambda answer: _message(answer)["reasoning"] is None),
    Case("budget burnt by thinking", {"max_tokens": 24}, shows=lambda answer: _message(answer)["content"] is None),
    Case(
        "reasoning is not included", {"include_reasoning": False, "max_tokens": 24, "logprobs": True},
        shows=lambda answer: _message(answer)["reasoning"] is None and _message(answer)["content"] is None,
    ),
    Case("two choices", {"n": 2, "temperature": 1, **OFF}, shows=lambda answer: len(answer["choices"]) == 2),
    Case(
        "two choices with thoughts and log probabilities", {"n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 1, "max_tokens": 40},
        shows=lambda answer: len(answer["choices"]) == 2,
    ),
    Case(
        "log probabilities", {"logprobs": True, "top_logprobs": 5, "max_tokens": 60},
        shows=lambda answer: len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 5,
    ),
    Case(
        "token ids and the prompt", {"return_token_ids": True, "return_prompt_text": True, "max_tokens": 40},
        shows=lambda answer: answer["choices"][0]["token_ids"] and answer["prompt_token_ids"] and answer["prompt_text"],
    ),
    Case("stop strings", {"stop": ["，", "."], **OFF}, shows=lambda answer: answer["choices"][0]["stop_reason"]),
    Case("stop string at the start", {"stop": ["结", "H", "T"], **OFF}),
    Case("stop string kept", {"stop": ["，", "."], "include_stop_str_in_output": True, **OFF}),
    Case("a JSON object", {"response_format": {"type": "json_object"}, "max_tokens": 40, **OFF}),
    Case(
        "a JSON schema", {"max_tokens": 60, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, **OFF},
        shows=lambda answer: _message(answer)["content"].lstrip().startswith("{"),
    ),
    Case("a thinking budget", {"thinking_token_budget": 8, "max_tokens": 60}),
    Case("tools that may be used and are not", {"tools": [WEATHER], **OFF}, shows=lambda answer: _message(answer)["content"]),
    Case(
        "a tool call", says(CALL),
        shows=lambda answer: _message(answer)["content"] is None and answer["choices"][0]["finish_reason"] == "tool_calls",
    ),
    Case("text and a tool call", says(f"先看天气。\n\n{CALL}"), shows=lambda answer: _message(answer)["content"] and _message(answer)["tool_calls"]),
    Case("two tool calls", says(TWO_CALLS), shows=lambda answer: len(_message(answer)["tool_calls"]) == 2),
    Case(
        "two tool calls of which one is allowed", {**says(TWO_CALLS), "parallel_tool_calls": False},
        shows=lambda answer: len(_message(answer)["tool_calls"]) == 1,
    ),
    Case("tools that must not be used", {"tools": [WEATHER], "tool_choice": "none", **OFF}),
    Case(
        "any tool is forced", {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 80, **OFF},
        shows=lambda answer: _message(answer)["content"] == "",
    ),
    Case("any tool is forced after thoughts", {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 24}),
    Case("one tool is forced", {"tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 80, **OFF}),
    Case("a completion", {"max_tokens": 20}, "completions"),
    Case("two completions", {"max_tokens": 12, "n": 2, "temperature": 1}, "completions", lambda answer: len(answer["choices"]) == 2),
    Case(
        "a completion with log probabilities", {"max_tokens": 12, "logprobs": 3}, "completions",
        lambda answer: len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"],
    ),
    Case("a completion with its prompt", {"max_tokens": 12, "echo": True}, "completions"),
    Case(
        "a completion with its prompt as tokens", {"max_tokens": 12, "echo": True, "return_token_ids": True}, "completions",
        lambda answer: answer["choices"][0]["prompt_token_ids"],
    ),
    Case("a completion that stops", {"max_tokens": 40, "stop": [" ", "，"]}, "completions"),
)  # fmt: skip

# Asked in vain: refused before the stream begins, or in it.
ERRORS = (
    Case("no such model", {"model": "nobody"}),
    Case("a temperature below zero", {"temperature": -3.0}),
    Case("more tokens than there are", {"max_tokens": 100_000}),
    Case("a token that does not exist", {"logit_bias": {"999999": 1}}),
    Case("a grammar that cannot be read", {"structured_outputs": {"regex": "["}}),
    Case("too many log probabilities", {"logprobs": True, "top_logprobs": 500}),
    Case("a completion's token that does not exist", {"allowed_token_ids": [9_999_999]}, "completions"),
)

# Sent upstream as they came, because a stream's answer would be another one.
UNFAITHFUL = (
    Case("log probabilities of the prompt", {"prompt_logprobs": 1}),
    Case("a chat's prompt in the answer", {"echo": True, "max_tokens": 5}),
    Case("stream options without a stream", {"stream_options": {"include_usage": True}}),
    Case("a completion's prompt with log probabilities", {"echo": True, "logprobs": 1, "max_tokens": 5}, "completions"),
    Case("beams", {"use_beam_search": True, "n": 2, "max_tokens": 5}, "completions"),
)


@dataclass(frozen=True)
class Answer:
    """Status and body; `body` is None where a stream gave no answer."""

    status: int
    body: Any


Ask = Callable[[Case, dict[str, Any]], Answer]


def ask_plain(http: httpx2.Client, case: Case, body: dict[str, Any]) -> Answer:
    response = http.post(PATHS[case.kind], json={**body, "cache_salt": uuid.uuid4().hex})
    return Answer(response.status_code, response.json())


def ask_through(http: httpx2.Client, case: Case, body: dict[str, Any], *, as_stream: bool = True) -> Answer:
    """Plainly, at a gateway, which says whether it asked for a stream."""
    response = http.post(PATHS[case.kind], json={**body, "cache_salt": uuid.uuid4().hex})
    changes = response.headers.get("x-gateway-changes", "").split(",")
    assert ("stream=upstream" in [change.strip() for change in changes]) is as_stream
    return Answer(response.status_code, response.json())


def ask_and_assemble(http: httpx2.Client, case: Case, body: dict[str, Any]) -> Answer:
    """The same as a stream, as the gateway would send it and put it together."""
    body = {**body, "cache_salt": uuid.uuid4().hex}
    assembler = Assembler(case.kind, body, "vllm")
    with http.stream("POST", PATHS[case.kind], json={**body, **stream_fields(body)}) as response:
        if not response.headers["content-type"].startswith("text/event-stream"):
            return Answer(response.status_code, json.loads(response.read()))
        for data in response.iter_bytes():
            assembler.feed(data)
    whole = assembler.finish()
    if assembler.error is not None:
        return Answer(assembler.error.status, json.loads(assembler.error.data))
    return Answer(200, None if whole is None else json.loads(whole))


CONFIG = """\
upstreams:
  vllm: {url: "%s"}
routes:
  - {name: seen, upstreams: [vllm], stream_upstream: true}
"""


def differences(plain: object, other: object, path: str = "answer") -> list[str]:
    """Where two answers differ, the order of keys included; not in what never is the same."""
    if type(plain) is not type(other):
        return [f"{path}: {plain!r} or {other!r}"]
    if isinstance(plain, dict) and isinstance(other, dict):
        found = [] if list(plain) == list(other) else [f"{path}: keys {list(plain)} or {list(other)}"]
        for key in plain.keys() & other.keys():
            if key in NEVER_EQUAL and plain[key] is not None:
                found += (
                    [] if type(plain[key]) is type(other[key]) else [f"{path}.{key}: {plain[key]!r} or {other[key]!r}"]
                )
            else:
                found += differences(plain[key], other[key], f"{path}.{key}")
        return found
    if isinstance(plain, list) and isinstance(other, list):
        found = [] if len(plain) == len(other) else [f"{path}: {len(plain)} or {len(other)} of them"]
        for index, pair in enumerate(zip(plain, other, strict=False)):
            found += differences(*pair, f"{path}[{index}]")
        return found
    return [] if plain == other else [f"{path}: {plain!r} or {other!r}"]


def told(case: Case, found: list[str]) -> list[str]:
    """Without what of several choices depends on which one the server asks: its stream counts the cached tokens of the
    first one, its plain answer those of the last, which finds the prompt in the cache.
    """
    return [path for path in found if "n" not in case.more or "cache" not in path.partition(":")[0]]


@pytest.fixture(scope="module")
def seen(tool_vllm: RealVllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway that asks for streams where plain answers are wanted."""
    with serving(CONFIG % tool_vllm.url, tmp_path_factory.mktemp("seen")) as found:
        yield found


@pytest.fixture
def ways(tool_vllm: RealVllm, seen: GatewayProcess) -> dict[str, Ask]:
    """How an answer may be put together from a stream."""
    return {
        "here": lambda case, body: ask_and_assemble(tool_vllm.http, case, body),
        "by the gateway": lambda case, body: ask_through(seen.http, case, body),
    }


@pytest.fixture(scope="module")
def many_prompts() -> list[str]:
    path = shared_folder() / "data" / "prompts.jsonl"
    if not path.exists():
        pytest.skip(f"needs the prompts of {path}; set FIRSTTOKEN_SHARED")
    rows = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]
    short = [prompt for prompt in rows if len(prompt.encode()) <= MAX_PROMPT_BYTES]
    assert len(short) >= PROMPT_COUNT
    return short[:PROMPT_COUNT]


def body_of(model: str, case: Case, prompt: str, seed: int) -> dict[str, Any]:
    """The request; every other one is drawn at temperature 1 from its seed."""
    asked = {"messages": [{"role": "user", "content": prompt}]} if case.kind == "chat" else {"prompt": prompt}
    return {"model": model, **asked, "temperature": seed % 2, "seed": seed, "max_tokens": 600, **case.more}


def asked_prompts(case: Case, prompts: list[str]) -> Iterator[tuple[int, str]]:
    """The prompts of a case, with their seeds: all prompts are shared out among the cases."""
    place = CASES.index(case)
    return ((seed, prompts[seed]) for seed in range(place, len(prompts), len(CASES)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_assembled_answer_equals_the_plain_one_field_by_field(
    tool_vllm: RealVllm, ways: dict[str, Ask], many_prompts: list[str], case: Case
) -> None:
    for seed, prompt in asked_prompts(case, many_prompts):
        body = body_of(tool_vllm.model, case, prompt, seed)
        assert can_assemble(case.kind, body, "vllm")
        plain = ask_plain(tool_vllm.http, case, body)
        assert plain.status == 200, plain.body
        assert case.shows(plain.body), plain.body
        for way, ask in ways.items():
            other = ask(case, body)
            assert other.status == 200, (way, other.body)
            assert told(case, differences(plain.body, other.body)) == [], way


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.name)
def test_a_refusal_has_the_status_and_body_of_the_plain_one(
    tool_vllm: RealVllm, ways: dict[str, Ask], case: Case
) -> None:
    body = body_of(tool_vllm.model, case, "hello", 0)
    assert can_assemble(case.kind, body, "vllm")
    plain = ask_plain(tool_vllm.http, case, body)
    assert plain.status in (400, 404)
    assert {way: ask(case, body) for way, ask in ways.items()} == dict.fromkeys(ways, plain)


@pytest.mark.parametrize("max_tokens", [20, 60, 75, 90, 120, 150, 170, 200, 230])
def test_only_a_tool_call_cut_inside_an_argument_is_another_one_and_said_to_be_doubtful(
    tool_vllm: RealVllm, max_tokens: int
) -> None:
    case = Case("cut", {**says(CALL), "max_tokens": max_tokens})
    body = body_of(tool_vllm.model, case, "hello", 0)  # too short a prompt to be cached
    plain = ask_plain(tool_vllm.http, case, body)
    assembler = Assembler("chat", body, "vllm")
    assembler.feed(tool_vllm.http.post(PATHS["chat"], json={**body, **stream_fields(body)}).content)
    whole = assembler.finish()
    assert whole is not None
    found = differences(plain.body, json.loads(whole))
    assert assembler.is_doubtful or found == []
    assert all(".arguments:" in path for path in found)


@pytest.mark.parametrize("case", UNFAITHFUL, ids=lambda case: case.name)
def test_what_could_not_be_assembled_goes_up_as_it_came(tool_vllm: RealVllm, seen: GatewayProcess, case: Case) -> None:
    body = body_of(tool_vllm.model, case, "hello", 0)
    assert not can_assemble(case.kind, body, "vllm")
    plain = ask_plain(tool_vllm.http, case, body)
    assembled = ask_and_assemble(tool_vllm.http, case, body)
    assert plain.status != assembled.status or differences(plain.body, assembled.body)
    other = ask_through(seen.http, case, body, as_stream=False)
    assert (other.status, differences(plain.body, other.body)) == (plain.status, [])


def test_the_gateway_sees_the_first_token_of_a_plain_answer(
    tool_vllm: RealVllm, seen: GatewayProcess, new_id: str
) -> None:
    body = body_of(tool_vllm.model, CASES[0], "hello", 0)
    seen.http.post(PATHS["chat"], json=body, headers={"x-request-id": new_id})
    record = seen.record(new_id)
    assert record["ttft_ms"] < record["e2e_ms"] / 2
    assert record["reasoning_ms"] > 0

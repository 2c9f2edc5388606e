"""What the simulated server's answers look like: chunks, events, refusals, as the real servers write them."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from gateway.sim.profiles import DEEPSEEK_V4, FAST, LLAMACPP, PROFILES
from tests.sim.asking import HELLO, OFF, PACED, Serving, asked, chat, delta

pytestmark = pytest.mark.looptime


async def test_chunks_have_vllms_keys_in_vllms_order(serving: Serving) -> None:
    response = await chat(serving(), stream=True, max_tokens=2, stream_options={"include_usage": True})
    first, token, last, usage = (chunk for _, chunk in response.chunks())
    assert list(token) == ["id", "object", "created", "model", "choices"]
    assert list(token["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "token_ids"]  # type: ignore[index]
    assert list(first) == [*token, "prompt_token_ids", "prompt_text"]
    assert last["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
    assert usage["choices"] == []
    numbers: Any = usage["usage"]
    assert numbers["total_tokens"] == numbers["prompt_tokens"] + 2
    assert numbers["prompt_tokens_details"]["cached_tokens"] == 0
    assert numbers["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_usage_comes_only_when_asked_for(serving: Serving) -> None:
    response = await chat(serving(), stream=True)
    assert b"usage" not in response.body
    assert b'"choices":[]' not in response.body
    assert response.chunks()[-1][1]["system_fingerprint"]


async def test_running_usage_on_every_chunk_where_asked_for(serving: Serving) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await chat(serving(), stream=True, max_tokens=3, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for _, chunk in response.chunks()]  # type: ignore[index]
    assert counts == [0, 1, 2, 3, 3]


async def test_a_budget_burnt_by_thinking_is_a_success_without_content(serving: Serving) -> None:
    server = serving(PROFILES["demo"])
    plain = await chat(server, max_tokens=64)
    assert plain.status == 200
    choice: Any = plain.json()["choices"][0]  # type: ignore[index]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    assert choice["message"]["reasoning"].startswith("Step 1: ")
    stream = await chat(server, max_tokens=64, stream=True)
    deltas = [delta(chunk) for _, chunk in stream.chunks()]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(list(d) == ["reasoning"] for d in deltas[1:])
    assert len(deltas) == 65


@pytest.mark.parametrize(
    "field,names",
    [
        ("reasoning", ["reasoning"]),
        ("reasoning_content", ["reasoning_content"]),
        ("both", ["reasoning", "reasoning_content"]),
        ("inline", ["content"]),
    ],
)
async def test_thoughts_travel_under_the_name_of_the_servers_version(
    serving: Serving, field: str, names: list[str]
) -> None:
    server = serving(PROFILES["qwen3"].scaled(100).with_fields(reasoning_field=field))
    response = await chat(server, stream=True, max_tokens=5)
    assert list(delta(response.chunks()[1][1])) == names


async def test_llamacpp_sends_headers_with_the_first_token_and_timings_last(serving: Serving) -> None:
    response = await chat(serving(LLAMACPP.with_fields(jitter=0.0)), stream=True, max_tokens=3)
    chunks = [chunk for _, chunk in response.chunks()]
    assert response.head_at == pytest.approx(response.chunks()[0][0])
    assert response.head_at > 0.02
    assert delta(chunks[0]) == {"role": "assistant", "content": None}
    assert list(delta(chunks[1])) == ["reasoning_content"]
    assert delta(chunks[-1]) == {}
    assert chunks[-1]["timings"]["predicted_n"] == 3  # type: ignore[index]
    plain = (await chat(serving(LLAMACPP), max_tokens=3)).json()
    assert plain["choices"][0]["message"]["reasoning_content"]  # type: ignore[index]
    usage = await chat(serving(LLAMACPP), stream=True, max_tokens=3, stream_options={"include_usage": True})
    assert usage.chunks()[-1][1]["usage"]["completion_tokens"] == 3  # type: ignore[index]


async def test_completions_have_no_role_chunk_and_sixteen_tokens_by_default(serving: Serving) -> None:
    server = serving(FAST.with_fields(answer_tokens=(50, 50)))
    body: dict[str, object] = {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk for _, chunk in (await asked(server, "/v1/completions", body)).chunks()]
    assert chunks[0]["object"] == "text_completion"
    assert chunks[0]["choices"][0]["text"]  # type: ignore[index]
    assert len(chunks) == 17
    assert chunks[-1]["choices"] == []
    plain = (await asked(server, "/v1/completions", {"prompt": ["Once", " more"], "n": 2})).json()
    assert [choice["finish_reason"] for choice in plain["choices"]] == ["length", "length"]  # type: ignore[attr-defined]
    assert plain["metrics"] is None, "vLLM gives none for several choices"


async def test_responses_begin_before_the_engine_is_asked_and_end_by_their_status(serving: Serving) -> None:
    server = serving(DEEPSEEK_V4)
    for budget, end in ((5000, b"response.completed"), (20, b"response.incomplete")):
        began = asyncio.get_running_loop().time()
        response = await asked(server, "/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": budget})
        names = [(round(when - began, 6), event.split(b"\n")[0][7:]) for when, event in response.events()]
        assert names[:2] == [(0, b"response.created"), (0, b"response.in_progress")]
        assert names[2][0] > 0.6
        assert names[2][1] == b"response.output_item.added"
        assert names[4][1] == b"response.reasoning_text.delta"
        assert names[-1][1] == end
        assert b"[DONE]" not in response.body
        numbers = [chunk["sequence_number"] for _, chunk in response.chunks()]
        assert numbers == list(range(len(numbers)))
    plain = (await asked(server, "/v1/responses", {"input": HELLO, "reasoning": {"effort": "none"}})).json()
    assert [item["type"] for item in plain["output"]] == ["message"]  # type: ignore[attr-defined]


async def test_messages_begin_with_the_first_token_and_keep_thoughts_in_their_block(serving: Serving) -> None:
    server = serving(PROFILES["demo"])
    body: dict[str, object] = {"messages": HELLO, "max_tokens": 4000, "stream": True}
    response = await asked(server, "/v1/messages", body)
    names = [event.split(b"\n")[0][7:] for _, event in response.events()]
    assert response.head_at == 0
    assert response.events()[0][0] > 0.06
    assert [name for name in names if name != b"content_block_delta"] == [
        b"message_start",
        b"content_block_start",
        b"content_block_stop",
        b"content_block_start",
        b"content_block_stop",
        b"message_delta",
        b"message_stop",
    ]
    assert b'"type":"thinking_delta"' in response.body
    assert b"signature_delta" in response.body
    off = {**body, "thinking": {"type": "disabled"}, "stream": False}
    plain = (await asked(server, "/v1/messages", off)).json()
    assert [block["type"] for block in plain["content"]] == ["text"]  # type: ignore[attr-defined]
    assert plain["stop_reason"] == "end_turn"


async def test_a_required_tool_is_called_in_pieces(serving: Serving) -> None:
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
    }
    response = await chat(serving(), stream=True, tools=[tool], tool_choice="required")
    calls: list[Any] = [delta(chunk)["tool_calls"][0] for _, chunk in response.chunks()[1:-1]]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert calls[0]["id"].startswith("chatcmpl-tool-")
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city":"Paris"}'
    last: Any = response.chunks()[-1][1]
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "weather"}}
    plain: Any = (await chat(serving(), tools=[tool], tool_choice=named)).json()
    assert orjson.loads(plain["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}


async def test_two_choices_have_two_role_chunks_and_their_index(serving: Serving) -> None:
    response = await chat(serving(), stream=True, n=2, max_tokens=3)
    indexes: list[Any] = [chunk["choices"][0]["index"] for _, chunk in response.chunks()]  # type: ignore[index]
    assert indexes == [0, 1] * 4


async def test_the_small_endpoints_answer_as_vllms(serving: Serving) -> None:
    server = serving()
    assert ((await asked(server, "/health")).status, (await asked(server, "/health")).body) == (200, b"")
    assert (await asked(server, "/version")).json() == {"version": "0.33.0"}
    models: Any = (await asked(server, "/v1/models")).json()
    assert (models["data"][0]["id"], models["data"][0]["owned_by"], models["data"][0]["max_model_len"]) == (
        "fast",
        "vllm",
        32768,
    )
    count: Any = (await asked(server, "/tokenize", {"prompt": "hello there"})).json()
    assert count["count"] == len(count["tokens"]) == 2
    assert (await asked(server, "/tokenize", {"messages": HELLO, "return_token_strs": True})).json()["token_strs"]
    assert (await asked(server, "/v1/messages/count_tokens", {"messages": HELLO})).json()["input_tokens"]
    vectors: Any = (await asked(server, "/v1/embeddings", {"input": ["a", "b"], "dimensions": 4})).json()
    assert [len(item["embedding"]) for item in vectors["data"]] == [4, 4]
    packed: Any = (await asked(server, "/v1/embeddings", {"input": "a", "encoding_format": "base64"})).json()
    assert isinstance(packed["data"][0]["embedding"], str)
    page = await asked(server, "/metrics")
    assert b'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 1.0' in page.body
    assert b"llamacpp:" in (await asked(serving(LLAMACPP), "/metrics")).body


BASE = {"model": "fast", "messages": HELLO}


@pytest.mark.parametrize(
    "path,body,status,kind,param",
    [
        ("/v1/chat/completions", {**BASE, "model": "nope"}, 404, "NotFoundError", "model"),
        ("/v1/chat/completions", b"{bad", 400, "Bad Request", "body.1"),
        ("/v1/chat/completions", b"[]", 400, "Bad Request", "body"),
        ("/v1/chat/completions", b"\xff\xfe", 400, "Bad Request", "body.0"),
        ("/v1/chat/completions", {"model": "fast"}, 400, "Bad Request", "body.messages"),
        ("/v1/chat/completions", {**BASE, "messages": "hi"}, 400, "Bad Request", "body.messages"),
        ("/v1/chat/completions", {**BASE, "tools": []}, 400, "BadRequestError", "tools"),
        ("/v1/chat/completions", {**BASE, "tool_choice": "auto"}, 400, "BadRequestError", "tool_choice"),
        ("/v1/chat/completions", {**BASE, "stream_options": {"a": 1}}, 400, "BadRequestError", "stream_options"),
        ("/v1/chat/completions", {**BASE, "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ("/v1/chat/completions", {**BASE, "max_tokens": "5"}, 400, "Bad Request", "body.max_tokens"),
        ("/v1/chat/completions", {**BASE, "max_completion_tokens": 99999}, 400, "BadRequestError", "max_tokens"),
        ("/v1/chat/completions", {**BASE, "stop": list("abcde")}, 400, "Bad Request", "body.stop"),
        ("/v1/chat/completions", {**BASE, "temperature": -1}, 400, "BadRequestError", "temperature"),
        ("/v1/chat/completions", {**BASE, "reasoning_effort": "hard"}, 400, "Bad Request", "body.reasoning_effort"),
        ("/v1/completions", {"model": "fast"}, 400, "Bad Request", "body.prompt"),
        ("/v1/embeddings", {"model": "nope", "input": "a"}, 404, "NotFoundError", "model"),
    ],
)
async def test_refusals_have_vllms_envelope(
    serving: Serving, path: str, body: dict[str, object] | bytes, status: int, kind: str, param: str
) -> None:
    response = await asked(serving(), path, body)
    assert response.status == status
    error: Any = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)
    assert list(error) == ["message", "type", "param", "code"]


async def test_numbers_that_only_python_reads_are_taken(serving: Serving) -> None:
    body = b'{"model":"fast","messages":[],"seed":123456789012345678901234567890,"top_p":1e400,"x":NaN,"max_tokens":1}'
    assert (await asked(serving(), "/v1/chat/completions", body)).status == 200


async def test_context_overflow_is_clamped_or_refused_as_the_version_does(serving: Serving) -> None:
    small = FAST.with_fields(max_model_len=64, answer_tokens=(500, 500))
    long = [{"role": "user", "content": "word " * 40}]
    clamped: Any = (await chat(serving(small), messages=long, max_tokens=60)).json()
    assert clamped["usage"]["total_tokens"] == 64
    old = serving(small.with_fields(context_overflow="refuse"))
    refused = await chat(old, messages=long, max_tokens=60)
    assert refused.status == 400
    assert b"maximum context length is 64 tokens" in refused.body
    assert (await chat(old, messages=long, max_tokens=5)).status == 200
    assert (await chat(serving(small), messages=[{"role": "user", "content": "word " * 80}])).status == 400


async def test_other_envelopes_and_refusals_without_one(serving: Serving) -> None:
    assert (await asked(serving(), "/nope")).json() == {"detail": "Not Found"}
    wrong = await asked(serving(), "/v1/chat/completions")
    assert (wrong.status, wrong.header(b"allow")) == (405, b"POST")
    guarded = serving(api_key="secret")
    assert (await asked(guarded, "/v1/models")).json() == {"error": "Unauthorized"}
    assert (await asked(guarded, "/v1/models", headers=[(b"authorization", b"Bearer secret")])).status == 200
    assert (await asked(guarded, "/metrics")).status == 200
    anthropic = (await asked(serving(), "/v1/messages", {"model": "x", "messages": [], "max_tokens": 1})).json()
    assert anthropic["type"] == "error"
    assert (await chat(serving(FAST.with_fields(rejects_kwargs=True)), **OFF)).status == 400
    text = await asked(serving(), "/v1/chat/completions", b"{}", headers=[(b"content-type", b"text/plain")])
    assert text.status == 400
    busy = serving(PACED.with_fields(max_queued=1))
    answers = await asyncio.gather(chat(busy), chat(busy))
    assert sorted(answer.status for answer in answers) == [200, 503]
    llama = (await chat(serving(LLAMACPP), model="x")).json()
    assert list(llama["error"]) == ["code", "message", "type"]  # type: ignore[call-overload]


async def test_ids_and_words_repeat_with_the_seed(serving: Serving) -> None:
    answers = [(await chat(serving(seed=seed))).json() for seed in (1, 1, 2)]
    ids = [answer["id"] for answer in answers]
    assert ids[0] == ids[1] != ids[2]
    assert answers[0]["choices"] == answers[1]["choices"]

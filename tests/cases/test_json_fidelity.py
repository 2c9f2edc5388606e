"""What a caller's JSON looked like when it reached the model server."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from tests.support.playing import plain, serving, streaming
from tests.support.raw import DONE, answer, chat, chunk

POLICY = {
    "thinking": "off",
    "max_tokens": {"default": 1024},
    "defaults": {"temperature": 0.3},
    "drop": ["logit_bias"],
}
TOOLS = (
    b'"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":'
    b'{"id":{"type":"integer","const":12345678901234567890123,"minimum":-9223372036854775809}}}}}]'
)
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


def body(*members: bytes) -> bytes:
    return b"{" + b",".join((b'"model":"m"', *members, MESSAGES)) + b"}"


@pytest.mark.parametrize("route", [{}, POLICY], ids=["as-is", "policies"])
async def test_an_id_of_23_digits_in_a_tool_schema_arrives_digit_for_digit(route: dict[str, object]) -> None:
    """C044."""
    async with serving(plain(), route=route) as (upstream, running):
        assert (await running.ask(body(TOOLS))).status == 200
        assert TOOLS in upstream.requests[0].body
        assert (upstream.requests[0].body == body(TOOLS)) == (not route)
        await running.settled()


@pytest.mark.parametrize("route", [{}, POLICY], ids=["as-is", "policies"])
async def test_numbers_keep_their_spelling(route: dict[str, object]) -> None:
    """C045. 0.10, 1e5 and 1e400 are the upstream's to judge."""
    numbers = (
        b'"temperature":0.10',
        b'"seed":1e5',
        b'"metadata":{"price":3.141592653589793238462643,"big":1e400,"long":100000000000000000000.0}',
    )
    async with serving(plain(), route=route) as (upstream, running):
        assert (await running.ask(body(*numbers))).status == 200
        for spelling in numbers:
            assert spelling in upstream.requests[0].body


async def test_big_numbers_in_an_answer_stay_exact() -> None:
    """C046: no part of the gateway reads an answer into doubles and writes it again."""
    odd = answer()[:-1] + b',"created_ns":1764533000123456789,"seed":9007199254740993,"x":1.10}'
    async with serving(plain(odd)) as (_, running):
        assert (await running.ask(chat(stream=False))).body == odd


@pytest.mark.parametrize("word", [b"NaN", b"-Infinity", b"Infinity"])
async def test_an_answer_with_infinite_logprobs_is_no_server_error(word: bytes) -> None:
    """C047."""
    odd = answer().replace(
        b'"finish_reason"', b'"logprobs":{"content":[{"token":"y","logprob":%b}]},"finish_reason"' % word
    )
    assert odd != answer()
    async with serving(plain(odd)) as (_, running):
        response = await running.ask(chat(stream=False))
        assert (response.status, response.body) == (200, odd)
        record = await running.last_record()
        assert (record["outcome"], record["completion_tokens"]) == ("complete", 2)


async def test_a_stream_with_nan_logprobs_arrives_and_is_timed() -> None:
    """C047."""
    odd = chunk({"content": "y"}).replace(b'"logprobs":null', b'"logprobs":{"content":[{"token":"y","logprob":NaN}]}')
    events = [odd, chunk(finish="stop"), DONE]
    async with serving(streaming(*events)) as (_, running):
        response = await running.ask(chat())
        assert response.body == b"".join(events)
        record = await running.last_record()
        assert record["outcome"] == "complete"
        assert record["ttft_ms"] is not None


@pytest.mark.parametrize("word", [b"NaN", b"Infinity", b"-Infinity"])
async def test_nan_in_a_request_is_a_400_with_a_sentence(word: bytes) -> None:
    """C047."""
    async with serving(plain()) as (upstream, running):
        response = await running.ask(body(b'"temperature":%b' % word))
        assert response.status == 400
        assert response.error["code"] == "invalid_json"
        assert word.decode() in response.error["message"]
        assert upstream.requests == []


@pytest.mark.parametrize(
    "twice",
    [
        b'"model":"expensive"',
        b'"stream":false,"stream":true',
        b'"max_tokens":5,"max_tokens":99999',
        b'"max_completion_tokens":5,"max_completion_tokens":99999',
        b'"chat_template_kwargs":{},"chat_template_kwargs":{"thinking":true}',
        b'"messages":[]',
        b'"mod\\u0065l":"expensive"',
    ],
)
async def test_a_key_that_decides_something_may_not_stand_twice(twice: bytes) -> None:
    """C051: the policy would check one value and the model server use the other."""
    async with serving(plain()) as (upstream, running):
        response = await running.ask(body(twice))
        assert (response.status, response.error["code"]) == (400, "duplicate_key")
        assert upstream.requests == []
        assert (await running.last_record())["outcome"] == "refused"


async def test_a_model_named_twice_for_a_reranker_is_refused_too() -> None:
    """C051, on the paths whose bodies are otherwise relayed unread."""
    async with serving(plain()) as (upstream, running):
        response = await running.ask(b'{"model":"cheap","model":"expensive","query":"q"}', "/v1/rerank")
        assert (response.status, response.error["code"]) == (400, "duplicate_key")
        assert upstream.requests == []


async def test_other_keys_may_stand_twice_and_keep_their_bytes() -> None:
    """C051 is about decisions; what the gateway does not decide on is the caller's and the server's affair."""
    twice = body(b'"user":"a","user":"b"')
    async with serving(plain()) as (upstream, running):
        assert (await running.ask(twice)).status == 200
        assert upstream.requests[0].body == twice


@pytest.mark.parametrize("route", [{}, POLICY], ids=["as-is", "policies"])
async def test_a_schema_nested_300_deep_arrives_intact(route: dict[str, object]) -> None:
    """C053: orjson reads 1024 levels and writes 254; nothing may be written again."""
    deep = b'"tools":' + b'[{"a":' * 150 + b"1.10" + b"}]" * 150
    async with serving(plain(), route=route) as (upstream, running):
        assert (await running.ask(body(deep))).status == 200
        assert deep in upstream.requests[0].body


@pytest.mark.parametrize(
    "hostile",
    [body(b'"tools":' + b"[" * 1100 + b"]" * 1100), b'{"a":' + b"[" * 100_000, b"[" * 100_000],
    ids=["1100", "100k", "bare"],
)
async def test_hostile_nesting_is_refused_fast_and_the_worker_lives(hostile: bytes) -> None:
    """C053."""
    async with serving(plain()) as (upstream, running):
        began = time.monotonic()
        response = await running.ask(hostile)
        assert (response.status, response.error["code"]) == (400, "json_too_deep")
        assert time.monotonic() - began < 1
        assert upstream.requests == []
        assert (await running.ask(body())).status == 200


async def test_earlier_turns_keep_their_bytes_from_turn_to_turn() -> None:
    """C055: a prefix cache over the text, or a signature over the bytes, must find them again."""
    call = (
        b'{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",'
        b'"function":{"name":"f","arguments":"{\\"b\\":1, \\"a\\":2}"}}]}'
    )
    turns = [
        b'{"role":"user", "content":"\\u4f60\\u597d"}',
        call,
        b'{"content":"42","role":"tool","tool_call_id":"c1"}',
    ]
    async with serving(plain(), route=POLICY) as (upstream, running):
        for count in (1, 2, 3):
            sent = b'{"model":"m","messages":[' + b",".join(turns[:count]) + b"]}"
            assert (await running.ask(sent)).status == 200
        forwarded = [request.body for request in upstream.requests]
    for earlier, later in itertools.pairwise(forwarded):
        messages = earlier[earlier.index(b"[") : earlier.index(b"]}") if b"]}" in earlier else earlier.index(b"],")]
        assert messages in later
    assert call in forwarded[-1]


async def test_fields_that_nobody_here_knows_arrive() -> None:
    """C056."""
    unknown: dict[str, object] = {f"vendor_{number}": {"x": [number, None, "é"]} for number in range(9)}
    unknown |= {"guided_json": {"type": "object"}, "top_k": 20, "extra_body": {"chat_template_kwargs": {"a": 1}}}
    message = {
        "role": "assistant", "content": "a", "reasoning_content": "r", "name": "n", "prefix": True,
        "cache_control": {"type": "ephemeral"},
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "strict": True, "x-vendor": 1}, "defer_loading": True}
    sent = {"model": "m", "messages": [message, {"role": "user", "content": "hi"}], "tools": [tool], **unknown}
    async with serving(plain(), route=POLICY) as (upstream, running):
        assert (await running.ask(json.dumps(sent).encode())).status == 200
        arrived = upstream.requests[0].json
    assert {key: arrived[key] for key in sent} == sent

"""Halves of emoji, byte-order marks and odd content types."""

from __future__ import annotations

import json

import pytest

from tests.support.playing import plain, serving, streaming
from tests.support.raw import DONE, Received, Wire, chat, chunk, whole

OFF = {"clean": {"control": False, "dashes": False, "long_runs": False, "roles": False}}


def saying(text: bytes) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % text


@pytest.mark.parametrize(
    "text, clean",
    [
        (b"cut \\ud83d here", "cut \ufffd here"),
        (b"\\udcb0 first", "\ufffd first"),
        (b"\\ude00\\ud83d", "\ufffd\ufffd"),
        (b"end \\ud83d", "end \ufffd"),
    ],
)
async def test_half_an_emoji_is_repaired_and_counted(text: bytes, clean: str) -> None:
    """C048: the backend alone would have accepted it, so the gateway must not answer 400 or 500."""
    async with serving(plain()) as (upstream, running):
        response = await running.ask(saying(text))
        assert response.status == 200
        assert (response.header("x-gateway-changes") or "").startswith("clean=control:")
        assert upstream.requests[0].json["messages"][0]["content"] == clean
        record = await running.last_record()
        json.dumps(record).encode("utf-8")  # nothing in it that a log could not hold
        assert await running.metric("gateway_clean_changes_total", route="main", kind="control") >= 1


@pytest.mark.parametrize("text", [b"cut \\ud83d here", b"\\udcb0", b"\\ude00\\ud83d"])
async def test_half_an_emoji_keeps_its_bytes_where_cleaning_is_off(text: bytes) -> None:
    """C048."""
    async with serving(plain(), route=OFF) as (upstream, running):
        assert (await running.ask(saying(text))).status == 200
        assert upstream.requests[0].body == saying(text)


async def test_half_an_emoji_in_a_model_name_is_answered() -> None:
    """C048, C109: no log, metric, page or error may fail on it."""
    odd = b'{"model":"m\\ud83d","messages":[{"role":"user","content":"hi"}]}'
    async with serving(plain(), route={"match": {"models": ["m"]}}) as (upstream, running):
        response = await running.ask(odd)
        assert (response.status, response.error["code"]) == (404, "no_route")
        assert upstream.requests == []
        request_id = response.header("x-request-id")
        assert (await running.get(f"/gateway/requests/{request_id}")).status == 200
        assert (await running.get("/gateway/status")).status == 200
        assert (await running.get("/metrics")).status == 200
        await running.settled()


@pytest.mark.parametrize(
    "text, decoded",
    [
        (b"\\ud83c\\udf78 \\ud83d\\udc69\\u200d\\ud83d\\udc67", "🍸 👩\u200d👧"),
        ("🍸 👩\u200d👧".encode(), "🍸 👩\u200d👧"),
        (b"\\ud83c\\udf78\\ud83d", "🍸\ufffd"),
    ],
)
async def test_escaped_emoji_stay_whole(text: bytes, decoded: str) -> None:
    """C049, also when the cleaning has something to do in the same text."""
    async with serving(plain()) as (upstream, running):
        for sent, expected in ((text, decoded), (text + b"\\u0007", decoded)):
            assert (await running.ask(saying(sent))).status == 200
            assert upstream.requests[-1].json["messages"][0]["content"] == expected


async def test_an_emoji_streamed_in_two_halves_is_relayed_and_timed() -> None:
    """C050."""
    halves = [chunk({"content": "?"}).replace(b"?", half) for half in (b"\\ud83d", b"\\ude00")]
    events = [*halves, chunk(finish="stop"), DONE]
    async with serving(streaming(*events)) as (_, running):
        response = await running.ask(chat())
        assert response.body == b"".join(events)
        record = await running.last_record()
        assert (record["outcome"], record["chunks"], record["verdict"]) == ("complete", 2, "ok")
        assert record["ttft_ms"] is not None
        assert (await running.get("/gateway/status")).status == 200


async def test_a_byte_order_mark_is_taken_off() -> None:
    """C052a."""
    async with serving(plain()) as (upstream, running):
        assert (await running.ask(b"\xef\xbb\xbf" + chat(stream=False))).status == 200
        assert upstream.requests[0].body == chat(stream=False)


@pytest.mark.parametrize("encoding, name", [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16"), ("utf-32", "UTF-32")])
async def test_another_encoding_is_refused_by_its_name(encoding: str, name: str) -> None:
    """C052b."""
    async with serving(plain()) as (upstream, running):
        response = await running.ask(chat(stream=False).decode().encode(encoding))
        assert (response.status, response.error["code"]) == (400, "invalid_json")
        assert name in response.error["message"]
        assert upstream.requests == []


@pytest.mark.parametrize(
    "kind, told",
    [
        ("application/json; charset=iso-8859-1", "application/json; charset=iso-8859-1"),
        ("Application/JSON", "Application/JSON"),
        ("text/plain", "application/json"),
        ("application/x-www-form-urlencoded", "application/json"),
    ],
)
async def test_the_content_type_does_not_decide_what_is_json(kind: str, told: str) -> None:
    """C052c, d: curl sends a form's type when nobody says otherwise, and vLLM would refuse it."""
    sent = chat(stream=False, content="你好 é")
    async with serving(plain()) as (upstream, running):
        assert (await running.ask(sent, headers={"content-type": kind})).status == 200
        assert upstream.requests[0].body == sent
        assert upstream.requests[0].header("content-type") == told


async def test_json_without_any_content_type_is_taken() -> None:
    """C052e."""
    sent = chat(stream=False)
    async with serving(plain()) as (upstream, running), running.client() as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(sent) + sent
        )
        assert (await client.response()).status == 200
        assert upstream.requests[0].body == sent
        assert upstream.requests[0].header("content-type") == "application/json"


@pytest.mark.parametrize(
    "sent, words",
    [
        (b"", "empty"),
        (b'{"model":"m",}', "line 1"),
        (b'{"model":"m"} trailing', "after the end"),
        (b"[1,2]", "array"),
        (b'"text"', "string"),
        (b"null", "null"),
        (b'{"model":"\xff"}', "UTF-8"),
        (b"<html>", "line 1"),
    ],
)
async def test_a_body_that_is_no_json_object_gets_a_sentence_that_helps(sent: bytes, words: str) -> None:
    """C052: a 400 in the API's shape, never a 500, and the next request on the connection is served."""
    async with serving(plain()) as (upstream, running), running.client() as client:
        response = await client.ask(sent)
        assert (response.status, response.error["code"]) == (400, "invalid_json")
        assert words in response.error["message"]
        assert (await client.ask(chat(stream=False))).status == 200
        assert len(upstream.requests) == 1
        await running.settled()


async def test_an_error_body_with_half_an_emoji_is_relayed_as_it_came() -> None:
    """C050, on the error's way."""
    odd = b'{"error":{"message":"bad \\ud83d","type":"BadRequestError","param":null,"code":400}}'

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(odd, "400 Bad Request"))

    async with serving(play) as (_, running):
        response = await running.ask(chat())
        assert (response.status, response.body) == (400, odd)


async def test_a_streamed_error_with_half_an_emoji_becomes_a_real_error() -> None:
    """C050: the first event of the stream is an error, and its words cannot be spelt in UTF-8."""
    odd = b'data: {"object":"error","message":"bad \\ud83d","code":400}\n\n'
    async with serving(streaming(odd, DONE)) as (_, running):
        response = await running.ask(chat())
        assert response.status == 400
        assert response.error["message"].startswith("bad ")
        await running.settled()

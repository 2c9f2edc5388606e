"""A model server's errors in the one shape that every SDK reads."""

from __future__ import annotations

import json

import pytest

from gateway.readable import is_nested, with_readable_error, with_readable_event
from gateway.wire.answer import StreamError

FLAT = b'{"object":"error","message":"no room","code":400}'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "body, message",
    [
        (FLAT, "no room"),
        (b'{"detail":"no"}', "no"),
        (b' {"detail":[{"loc":["body"],"msg":"bad"},"odd"]}\n', "bad; odd"),
        ('{"message":"没有"}'.encode(), "没有"),
    ],
)
def test_a_flat_refusal_keeps_what_it_says_and_gets_an_error(body: bytes, message: str) -> None:
    told = json.loads(with_readable_error(body))
    assert told.pop("error")["message"] == message
    assert told == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"Internal Server Error", b"{}", b"[1]", b'{"a":1}', b"{oops}", b'{"error":"no"}', b'{"message":""}',
        b'{"error":{"message":"no"}}', b'{"detail":{"a":1}}', b"<html>{}</html>",
    ],
)  # fmt: skip
def test_everything_else_stays_as_it_is(body: bytes) -> None:
    assert with_readable_error(body) == body


def test_a_flat_error_in_a_stream_is_told_in_its_place() -> None:
    error = StreamError(400, "no room", "400", FLAT)
    before, behind = b'data: {"a":1}\n\n', b'data: {"b":2}\n\n' + DONE
    told = with_readable_event(before + b"data: " + FLAT + b"\n\n" + behind, error, is_open=False)
    assert told is not None
    assert told.startswith(before)
    assert told.endswith(behind)
    event = told.removeprefix(before).removesuffix(behind)
    assert json.loads(event.removeprefix(b"data: "))["error"] == {
        "message": "no room", "type": "upstream_error", "param": None, "code": "400",
    }  # fmt: skip


@pytest.mark.parametrize(
    "passed, is_open, parts",
    [
        (b'":400}\n\n' + DONE, False, (b'":400}\n\n', DONE)),
        (b'":400}\n\n', False, (b'":400}\n\n', b"")),
        (b'":400}\n\ndata: {"b', True, None),
    ],
    ids=["before the end mark", "behind it", "not inside another event"],
)
def test_an_error_whose_beginning_is_out_is_told_once_more(
    passed: bytes, is_open: bool, parts: tuple[bytes, bytes] | None
) -> None:
    told = with_readable_event(passed, StreamError(400, "no room", "", FLAT), is_open=is_open)
    if parts is None:
        assert told is None
        return
    assert told is not None
    event = told.removeprefix(parts[0]).removesuffix(parts[1])
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "no room"
    assert event.endswith(b"\n\n")


def test_one_that_every_sdk_can_read_passes_as_it_came() -> None:
    nested = b'{"error":{"message":"no"}}'
    assert is_nested(nested)
    assert not is_nested(b'{"error":"no"}')
    assert not is_nested(b"oops")
    assert with_readable_event(nested, StreamError(0, "no", "", nested), is_open=True) == nested

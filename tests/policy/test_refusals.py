"""Which 400 is about an edit of ours, in the words of the servers that say it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.refusals import is_context_overflow, is_switch_rejected, is_usage_rejected


def nested(message: str, param: str | None = None) -> bytes:
    """vLLM since 0.10."""
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}).encode()


def flat(message: str) -> bytes:
    """SGLang, and vLLM before 0.10."""
    return json.dumps(
        {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
    ).encode()


SWITCH = [
    "chat_template is not supported for Mistral tokenizers.",
    "Unsupported kwarg: enable_thinking",
    "apply_chat_template() got an unexpected keyword argument 'thinking'",
    "Harmony does not support reasoning_effort='none'",
    "Unknown parameter: 'chat_template_kwargs'.",
    "This model does not support disabling reasoning.",
    "unexpected kwargs",
]
CONTEXT = [
    "This model's maximum context length is 4096 tokens. However, you requested 4524 tokens (3500 in the messages, 1024 in the completion).",
    "'max_tokens' or 'max_completion_tokens' is too large: 1024. This model's maximum context length is 4096 tokens and your request has 3500 input tokens",
    "max_completion_tokens=9000 cannot be greater than max_model_len=max_total_tokens=4096. Please request fewer output tokens.",
    "Requested token count exceeds the model's maximum context length of 4096 tokens.",
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "the request exceeds the available context size, try increasing it",
    "max_tokens: 20000 > 8192, which is the maximum allowed number of output tokens",
    "prompt is too long",
]
USAGE = [
    "Stream options can only be defined when `stream=True`. (stream_options)",
    "Unrecognized request argument supplied: stream_options",
    "extra fields not permitted: include_usage",
]
OTHERS = [
    "`tools` must not be an empty array.",
    "model `x` does not exist",
    "thinking_token_budget needs --reasoning-parser",
    "",
]


@pytest.mark.parametrize(
    "form", [nested, flat, lambda message: json.dumps({"detail": message}).encode(), lambda message: message.encode()]
)
def test_each_server_is_understood(form: Callable[[str], bytes]) -> None:
    for is_it, own in ((is_switch_rejected, SWITCH), (is_context_overflow, CONTEXT), (is_usage_rejected, USAGE)):
        for message in (*SWITCH, *CONTEXT, *USAGE, *OTHERS):
            assert is_it(400, form(message)) is (message in own), message


def test_the_parameter_and_fastapis_details_are_read_too() -> None:
    assert is_switch_rejected(400, nested("Extra inputs are not permitted", "chat_template_kwargs"))
    detail = {
        "detail": [{"loc": ["body", "chat_template_kwargs"], "msg": "Extra inputs are not permitted", "input": {}}, "x"]
    }
    assert is_switch_rejected(422, json.dumps(detail).encode())
    assert not is_usage_rejected(422, json.dumps(detail).encode())
    assert is_switch_rejected(400, b'{"error":"unknown field enable_thinking"}')


@pytest.mark.parametrize("status", [200, 401, 404, 413, 429, 500, 503])
def test_only_a_bad_request_is_about_our_edits(status: int) -> None:
    assert not is_switch_rejected(status, nested(SWITCH[0]))
    assert not is_context_overflow(status, nested(CONTEXT[0]))


def test_words_of_the_caller_that_an_error_repeats_do_not_count() -> None:
    message = (
        "[{'type': 'missing', 'loc': ('body', 'messages', 0, 'role'), 'msg': 'Field required', "
        "'input': {'content': 'explain chat_template_kwargs and max_tokens and stream_options'}}]"
    )
    assert not is_switch_rejected(400, nested(message))
    assert not is_context_overflow(400, nested(message))
    assert not is_usage_rejected(400, nested(message))
    two = (
        message[:-1]
        + ", {'type': 'extra_forbidden', 'loc': ('body', 'chat_template_kwargs'), 'msg': 'Extra', 'input': {}}]"
    )
    assert is_switch_rejected(400, nested(two))


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.text(max_size=5),
        lambda x: (
            st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["error", "detail", "message", "param"]), x)
        ),
    )
    .map(json.dumps)
    .map(str.encode)
)
def test_any_body_is_classified_without_an_error(body: bytes) -> None:
    for is_it in (is_switch_rejected, is_context_overflow, is_usage_rejected):
        assert is_it(400, body) in (True, False)

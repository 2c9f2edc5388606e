"""`/v1/chat/completions` as vLLM writes it."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from gateway.sim.answers.identity import Identity, fingerprint
from gateway.sim.answers.numbers import Numbers
from gateway.sim.engine import Run
from gateway.sim.intake import Ask
from gateway.sim.plan import Plan, Token
from gateway.sim.profiles import Profile

DONE = b"data: [DONE]\n\n"
ROLE = (
    b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    b'"prompt_token_ids":null,"prompt_text":null'
)


class ChatAnswer:
    """Chunks are put together from bytes, so that a fast profile costs little per token."""

    def __init__(self, profile: Profile, ask: Ask, identity: Identity) -> None:
        self._profile, self._ask, self._identity = profile, ask, identity
        head = {"id": f"chatcmpl-{identity.request_id}", "object": "chat.completion.chunk"}
        head |= {"created": identity.created, "model": ask.model}  # type: ignore[dict-item]
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._before = [self._head + b',"choices":[{"index":%d,"delta":{' % index for index in range(len(ask.plans))]
        self._said_tool = [False] * len(ask.plans)
        self._reasoning_shown = 0

    def opening(self) -> Sequence[bytes]:
        return ()

    def first(self, run: Run) -> Sequence[bytes]:
        """The role chunk: vLLM sends it right before the first token, not early."""
        tail = ROLE + self._running_usage(run, 0) + b"}\n\n"
        return [before + tail for before in self._before]

    def token(self, token: Token, run: Run) -> Sequence[bytes]:
        self._reasoning_shown += token.channel == "reasoning"
        if token.channel == "hidden" and token.finish is None:
            return ()
        delta = self._delta(token)
        if token.finish is None:
            end = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]'
        else:
            end = (
                b'},"logprobs":null,"finish_reason":"%s","stop_reason":null,"token_ids":null}]' % token.finish.encode()
            )
            if not self._ask.include_usage:
                end += b',"system_fingerprint":"%s"' % fingerprint(self._profile).encode()
        return (self._before[token.choice] + delta + end + self._running_usage(run, run.generated) + b"}\n\n",)

    def closing(self, run: Run) -> Sequence[bytes]:
        if not self._ask.include_usage:
            return (DONE,)
        numbers = Numbers.of(run)
        tail: dict[str, object] = {"choices": [], "usage": numbers.openai_usage(self._profile)}
        tail["system_fingerprint"] = fingerprint(self._profile)
        if self._profile.per_request_metrics:
            tail["metrics"] = numbers.metrics()
        return (self._head + b"," + orjson.dumps(tail)[1:] + b"\n\n", DONE)

    def whole(self, run: Run) -> bytes:
        numbers = Numbers.of(run)
        answer: dict[str, object] = {
            "id": f"chatcmpl-{self._identity.request_id}",
            "object": "chat.completion",
            "created": self._identity.created,
            "model": self._ask.model,
            "choices": [self._choice(index, plan) for index, plan in enumerate(run.job.plans)],
            "service_tier": None,
            "system_fingerprint": fingerprint(self._profile),
            "usage": numbers.openai_usage(self._profile),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
        }
        if self._profile.per_request_metrics:
            answer["metrics"] = numbers.metrics()
        return orjson.dumps(answer)

    def _delta(self, token: Token) -> bytes:
        if token.channel == "reasoning":
            text = orjson.dumps(token.text)
            return b",".join(b'"%s":%s' % (name.encode(), text) for name in reasoning_names(self._profile))
        if token.channel == "tool_name":
            function = {"name": token.text, "arguments": ""}
            call = {"id": f"chatcmpl-tool-{self._identity.hex()}", "type": "function", "index": 0, "function": function}
            self._said_tool[token.choice] = True
            return b'"tool_calls":[' + orjson.dumps(call) + b"]"
        if token.channel == "tool_arguments":
            return b'"tool_calls":[{"index":0,"function":{"arguments":' + orjson.dumps(token.text) + b"}}]"
        return b'"content":' + orjson.dumps(token.text)

    def _running_usage(self, run: Run, completion: int) -> bytes:
        if not self._ask.continuous_usage:
            return b""
        usage: dict[str, object] = {"prompt_tokens": run.prompt_tokens, "total_tokens": run.prompt_tokens + completion}
        usage |= {
            "completion_tokens": completion,
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_shown},
        }
        return b',"usage":' + orjson.dumps(usage)

    def _choice(self, index: int, plan: Plan) -> dict[str, object]:
        content, reasoning = plan.text_of("content"), plan.text_of("reasoning")
        message: dict[str, object] = {"role": "assistant", "content": content or None, "refusal": None}
        message |= {"annotations": None, "audio": None, "function_call": None}
        if name := plan.text_of("tool_name"):
            function = {"name": name, "arguments": plan.text_of("tool_arguments")}
            message["tool_calls"] = [
                {"id": f"chatcmpl-tool-{self._identity.hex()}", "type": "function", "function": function}
            ]
        for field in reasoning_names(self._profile):
            message[field] = reasoning or None
        finish = {"finish_reason": plan.finish, "stop_reason": None, "token_ids": None}
        return {"index": index, "message": message, "logprobs": None, **finish}


def reasoning_names(profile: Profile) -> tuple[str, ...]:
    """The fields that carry thoughts; vLLM 0.11.1 to 0.15 sent both."""
    if profile.reasoning_field == "both":
        return ("reasoning", "reasoning_content")
    return ("reasoning_content",) if profile.reasoning_field == "reasoning_content" else ("reasoning",)

"""`/v1/completions` as vLLM writes it: no role chunk, no thoughts, the first chunk is text."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from gateway.sim.answers.chat import DONE
from gateway.sim.answers.identity import Identity, fingerprint
from gateway.sim.answers.numbers import Numbers
from gateway.sim.engine import Run
from gateway.sim.intake import Ask
from gateway.sim.plan import Token
from gateway.sim.profiles import Profile


class CompletionAnswer:
    """Text chunks with the legacy object name."""

    def __init__(self, profile: Profile, ask: Ask, identity: Identity) -> None:
        self._profile, self._ask = profile, ask
        head: dict[str, object] = {"id": f"cmpl-{identity.request_id}", "object": "text_completion"}
        self._head = head | {"created": identity.created, "model": ask.model}
        self._before = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'

    def opening(self) -> Sequence[bytes]:
        return ()

    def first(self, _run: Run) -> Sequence[bytes]:
        return ()

    def token(self, token: Token, run: Run) -> Sequence[bytes]:
        finish = b"null" if token.finish is None else b'"%s"' % token.finish.encode()
        end = (
            b',"logprobs":null,"finish_reason":%s,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
            % finish
        )
        if self._ask.continuous_usage:
            end += b',"usage":' + orjson.dumps(Numbers.of(run).openai_usage(self._profile, chat=False))
        return (self._before + b'%d,"text":' % token.choice + orjson.dumps(token.text) + end + b"}\n\n",)

    def closing(self, run: Run) -> Sequence[bytes]:
        if not self._ask.include_usage:
            return (DONE,)
        chunk = {**self._head, "choices": [], **self._end(run)}
        return (b"data: " + orjson.dumps(chunk) + b"\n\n", DONE)

    def whole(self, run: Run) -> bytes:
        choices = [
            {
                "index": index,
                "text": plan.text_of("content"),
                "logprobs": None,
                "finish_reason": plan.finish,
                "stop_reason": None,
            }
            for index, plan in enumerate(run.job.plans)
        ]
        return orjson.dumps({**self._head, "choices": choices, "service_tier": None, **self._end(run)})

    def _end(self, run: Run) -> dict[str, object]:
        numbers = Numbers.of(run)
        end: dict[str, object] = {"usage": numbers.openai_usage(self._profile, chat=False)}
        end["system_fingerprint"] = fingerprint(self._profile)
        if self._profile.per_request_metrics:
            end["metrics"] = numbers.metrics()
        return end

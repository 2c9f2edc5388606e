"""`/v1/chat/completions` as llama.cpp's server writes it: another key order, `content: null` first, `timings` last."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from gateway.sim.answers.chat import DONE, reasoning_names
from gateway.sim.answers.identity import Identity, fingerprint
from gateway.sim.answers.numbers import Numbers
from gateway.sim.engine import Run
from gateway.sim.intake import Ask
from gateway.sim.plan import Token
from gateway.sim.profiles import Profile


class LlamaCppAnswer:
    """Chunks of llama.cpp; the finish reason stands alone in a chunk with an empty delta."""

    def __init__(self, profile: Profile, ask: Ask, identity: Identity) -> None:
        self._profile, self._ask = profile, ask
        self._head: dict[str, object] = {"created": identity.created, "id": f"chatcmpl-{identity.request_id}"}
        self._head |= {"model": ask.model, "system_fingerprint": fingerprint(profile)}

    def opening(self) -> Sequence[bytes]:
        return ()

    def first(self, _run: Run) -> Sequence[bytes]:
        return (self._chunk(0, {"role": "assistant", "content": None}),)

    def token(self, token: Token, run: Run) -> Sequence[bytes]:
        events = []
        if token.text and token.channel != "hidden":
            events.append(self._chunk(token.choice, self._delta(token)))
        if token.finish is not None:
            timings = None if self._ask.include_usage else Numbers.of(run).llamacpp_timings()
            events.append(self._chunk(token.choice, {}, token.finish, timings))
        return events

    def closing(self, run: Run) -> Sequence[bytes]:
        if not self._ask.include_usage:
            return (DONE,)
        last = {"choices": [], **self._head, "object": "chat.completion.chunk", **self._end(run)}
        return (b"data: " + orjson.dumps(last) + b"\n\n", DONE)

    def whole(self, run: Run) -> bytes:
        choices = []
        for index, plan in enumerate(run.job.plans):
            message: dict[str, object] = {"role": "assistant", "content": plan.text_of("content")}
            if reasoning := plan.text_of("reasoning"):
                message[reasoning_names(self._profile)[0]] = reasoning
            choices.append({"finish_reason": plan.finish, "index": index, "message": message})
        return orjson.dumps({"choices": choices, **self._head, "object": "chat.completion", **self._end(run)})

    def _end(self, run: Run) -> dict[str, object]:
        numbers = Numbers.of(run)
        usage: dict[str, object] = {"completion_tokens": numbers.completion, "prompt_tokens": numbers.prompt}
        usage |= {"total_tokens": numbers.prompt + numbers.completion}
        usage["prompt_tokens_details"] = {"cached_tokens": numbers.cached}
        return {"usage": usage, "timings": numbers.llamacpp_timings()}

    def _chunk(
        self, index: int, delta: dict[str, object], finish: str | None = None, timings: dict[str, object] | None = None
    ) -> bytes:
        choice = {"finish_reason": finish, "index": index, "delta": delta}
        chunk = {"choices": [choice], **self._head, "object": "chat.completion.chunk"}
        if timings is not None:
            chunk["timings"] = timings
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _delta(self, token: Token) -> dict[str, object]:
        if token.channel == "reasoning":
            return {reasoning_names(self._profile)[0]: token.text}
        if token.channel == "tool_name":
            function = {"name": token.text, "arguments": ""}
            return {"tool_calls": [{"index": 0, "id": "call0", "type": "function", "function": function}]}
        if token.channel == "tool_arguments":
            return {"tool_calls": [{"index": 0, "function": {"arguments": token.text}}]}
        return {"content": token.text}

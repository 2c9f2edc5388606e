"""`/v1/messages` as vLLM writes it: named events, thoughts in their own block, nothing before the first token."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from gateway.sim.answers.identity import Identity
from gateway.sim.answers.numbers import Numbers
from gateway.sim.engine import Run
from gateway.sim.intake import Ask
from gateway.sim.plan import Token
from gateway.sim.profiles import Profile

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer:
    """Anthropic's events. At most one thinking and one text block, in this order."""

    def __init__(self, _profile: Profile, ask: Ask, identity: Identity) -> None:
        self._identity, self._ask = identity, ask
        self._signature = identity.hex() + identity.hex()
        self._block: str | None = None
        self._index = -1

    def opening(self) -> Sequence[bytes]:
        return ()

    def first(self, run: Run) -> Sequence[bytes]:
        usage = {"input_tokens": run.prompt_tokens, "output_tokens": 0}
        message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return (_event("message_start", {"message": message}),)

    def token(self, token: Token, _run: Run) -> Sequence[bytes]:
        if not token.text or token.channel == "hidden":
            return ()
        block = "thinking" if token.channel == "reasoning" else "text"
        events = [] if block == self._block else [*self._close_block(), self._open_block(block)]
        delta = {"type": f"{block}_delta", block: token.text}
        return (*events, _event("content_block_delta", {"delta": delta, "index": self._index}))

    def closing(self, run: Run) -> Sequence[bytes]:
        delta = {"stop_reason": _STOP_REASONS.get(run.job.plans[0].finish, "end_turn"), "stop_sequence": None}
        usage = Numbers.of(run).anthropic_usage()
        return (
            *self._close_block(),
            _event("message_delta", {"delta": delta, "usage": usage}),
            _event("message_stop", {}),
        )

    def whole(self, run: Run) -> bytes:
        plan = run.job.plans[0]
        content: list[dict[str, object]] = []
        if thinking := plan.text_of("reasoning"):
            content.append({"type": "thinking", "thinking": thinking, "signature": self._signature})
        if said := plan.text_of("content"):
            content.append({"type": "text", "text": said})
        end = {"stop_reason": _STOP_REASONS.get(plan.finish, "end_turn"), "stop_sequence": None}
        return orjson.dumps({**self._message(), "content": content, **end, "usage": Numbers.of(run).anthropic_usage()})

    def _message(self) -> dict[str, object]:
        return {
            "id": f"chatcmpl-{self._identity.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._ask.model,
        }

    def _open_block(self, block: str) -> bytes:
        self._block = block
        self._index += 1
        return _event("content_block_start", {"content_block": {"type": block, block: ""}, "index": self._index})

    def _close_block(self) -> list[bytes]:
        if self._block is None:
            return []
        events = [_event("content_block_stop", {"index": self._index})]
        if self._block == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature}
            events.insert(0, _event("content_block_delta", {"delta": delta, "index": self._index}))
        self._block = None
        return events


def _event(name: str, fields: dict[str, object]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))

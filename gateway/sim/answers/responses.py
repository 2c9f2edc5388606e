"""`/v1/responses` as vLLM writes it: two events before the engine is asked, named events, no `[DONE]`."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from gateway.sim.answers.identity import Identity
from gateway.sim.answers.numbers import Numbers
from gateway.sim.engine import Run
from gateway.sim.intake import Ask
from gateway.sim.plan import Token
from gateway.sim.profiles import Profile

Fields = dict[str, object]
_KINDS = {"reasoning": ("rs", "reasoning_text", "reasoning"), "content": ("msg", "output_text", "message")}


class ResponsesAnswer:
    """Items open when their first token is there and close when another kind begins."""

    def __init__(self, profile: Profile, ask: Ask, identity: Identity) -> None:
        self._profile, self._ask, self._identity = profile, ask, identity
        self._sequence = 0
        self._output: list[Fields] = []
        self._kind: str | None = None
        self._item_id = ""
        self._text: list[str] = []

    def opening(self) -> Sequence[bytes]:
        response = self._response("in_progress", None, [])
        return [self._event(f"response.{name}", {"response": response}) for name in ("created", "in_progress")]

    def first(self, _run: Run) -> Sequence[bytes]:
        return ()

    def token(self, token: Token, _run: Run) -> Sequence[bytes]:
        if not token.text or token.channel not in _KINDS:
            return ()
        events = [] if token.channel == self._kind else [*self._close_item(), *self._open_item(token.channel)]
        self._text.append(token.text)
        part = _KINDS[token.channel][1]
        events.append(self._event(f"response.{part}.delta", self._place({"content_index": 0, "delta": token.text})))
        return events

    def closing(self, run: Run) -> Sequence[bytes]:
        """The last event is named after the status (vLLM 0.32 still called it `completed` in every case)."""
        events = self._close_item()
        plan = run.job.plans[0]
        status = "incomplete" if plan.finish == "length" else "completed"
        response = self._response(status, run, self._output)
        return (*events, self._event(f"response.{status}", {"response": response}))

    def whole(self, run: Run) -> bytes:
        plan = run.job.plans[0]
        said = {"reasoning": plan.text_of("reasoning"), "content": plan.text_of("content")}
        output = [
            self._item(kind, f"{_KINDS[kind][0]}_{self._identity.hex()}", text, "completed")
            for kind, text in said.items()
            if text
        ]
        return orjson.dumps(self._response("incomplete" if plan.finish == "length" else "completed", run, output))

    def _open_item(self, kind: str) -> list[bytes]:
        prefix, part, _ = _KINDS[kind]
        self._kind, self._text, self._item_id = kind, [], f"{prefix}_{self._identity.hex()}"
        return [
            self._event(
                "response.output_item.added",
                self._place({"item": self._item(kind, self._item_id, None, "in_progress")}, 1),
            ),
            self._event(
                "response.content_part.added", self._place({"content_index": 0, "part": {"text": "", "type": part}})
            ),
        ]

    def _close_item(self) -> list[bytes]:
        if self._kind is None:
            return []
        part, said = _KINDS[self._kind][1], "".join(self._text)
        item = self._item(self._kind, self._item_id, said, "completed")
        events = [
            self._event(f"response.{part}.done", self._place({"content_index": 0, "text": said})),
            self._event(
                "response.content_part.done", self._place({"content_index": 0, "part": {"text": said, "type": part}})
            ),
            self._event("response.output_item.done", self._place({"item": item}, 1)),
        ]
        self._output.append(item)
        self._kind = None
        return events

    def _place(self, fields: Fields, whole_item: int = 0) -> Fields:
        where: Fields = {"output_index": len(self._output)}
        return {**fields, **where} if whole_item else {**fields, "item_id": self._item_id, **where}

    def _item(self, kind: str, item_id: str, said: str | None, status: str) -> Fields:
        _, part, item_type = _KINDS[kind]
        content: list[Fields] = [] if said is None else [{"text": said, "type": part}]
        if kind == "reasoning":
            return {"id": item_id, "summary": [], "type": item_type, "content": content or None, "status": status}
        for text in content:
            text["annotations"] = []
        return {"id": item_id, "content": content, "role": "assistant", "status": status, "type": item_type}

    def _response(self, status: str, run: Run | None, output: list[Fields]) -> Fields:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response: Fields = {"id": f"resp_{self._identity.request_id}", "created_at": self._identity.created}
        response |= {
            "incomplete_details": incomplete,
            "instructions": self._ask.body.get("instructions"),
            "metadata": None,
        }
        response |= {"model": self._ask.model, "object": "response", "output": output, "parallel_tool_calls": True}
        response |= {"temperature": 1.0, "tool_choice": "none", "tools": [], "top_p": 1.0, "background": False}
        response |= {"max_output_tokens": self._ask.max_tokens, "previous_response_id": None, "service_tier": "auto"}
        response |= {"status": status, "truncation": "disabled", "usage": None, "user": None}
        if run is not None:
            numbers = Numbers.of(run)
            response["usage"] = numbers.responses_usage()
            if self._profile.per_request_metrics:
                response["metrics"] = numbers.metrics()
        return response

    def _event(self, name: str, fields: Fields) -> bytes:
        data = {**fields, "sequence_number": self._sequence, "type": name}
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(data))

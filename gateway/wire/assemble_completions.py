"""Choices of a streamed `/v1/completions` answer, as the plain answer has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.wire.answer import JsonObject
from gateway.wire.assemble_layout import Layout, arrange
from gateway.wire.assemble_parts import Joined, Kept, Logprobs, Text


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a request decides how its plain answer looks."""

    tools: str = "none"
    """`none`, `auto`, `required`, or `named` for one function."""
    wants_token_ids: bool = False


def asked_of(data: Mapping[str, object]) -> Asked:
    choice = data.get("tool_choice")
    tools = choice if isinstance(choice, str) else "named" if isinstance(choice, dict) else "auto"
    if not data.get("tools") or tools not in ("auto", "required", "named"):
        tools = "none"
    return Asked(tools, data.get("return_token_ids") is True)


class ChoiceParts:
    """Parts of one choice: its text, and what chat completions have in common with it."""

    __slots__ = ("_fields", "_logprobs", "_text", "_token_ids", "finish")

    def __init__(self) -> None:
        self.finish: object = None
        self._text = Text()
        self._logprobs = Logprobs()
        self._token_ids: Joined | None = None
        self._fields = Kept()

    @property
    def has_reasoning(self) -> bool:
        return False

    @property
    def is_doubtful(self) -> bool:
        """The plain answer may say something else here."""
        return False

    def take(self, raw: JsonObject) -> int:
        """One member of a chunk's `choices`; how many bytes more are held. Raises ValueError for a strange one."""
        held = 0
        for key, value in raw.items():
            if key == "finish_reason":
                self.finish = value or self.finish
            elif key == "logprobs":
                held += self._logprobs.take(value)
            elif key == "token_ids" and isinstance(value, list):
                self._token_ids = self._token_ids or Joined()
                held += self._token_ids.add(value)
            elif key != "index":
                held += self._take_own(key, value)
        return held

    def _take_own(self, key: str, value: object) -> int:
        """Whatever is not the same in both APIs."""
        return self._text.add(text_of(key, value)) if key == "text" else self._fields.put(key, value)

    def build(self, index: int, layout: Layout, asked: Asked, *, has_reasoning_parser: bool) -> dict[str, object]:  # noqa: ARG002
        """The choice of the plain answer."""
        found = self._common(index)
        found["text"] = str(self._text)
        if not asked.wants_token_ids:
            found.pop("prompt_token_ids", None)  # vLLM's streams say them with `echo`, its plain answers do not
        return arrange(layout.choice, found)

    def _common(self, index: int) -> dict[str, object]:
        found = dict(self._fields.values)
        found["index"] = index
        found["finish_reason"] = self.finish
        if self._logprobs.is_said:
            found["logprobs"] = self._logprobs.value()
        if self._token_ids is not None:
            found["token_ids"] = self._token_ids.value()
        return found


def text_of(key: str, value: object) -> str:
    """A piece of text; null is an empty one. Raises ValueError for anything else: no rule says how to join it."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is not text")
    return value

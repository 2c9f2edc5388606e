"""The shapes of answers: one class per API, all with the methods of `Answer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.sim.answers.chat import ChatAnswer
from gateway.sim.answers.completions import CompletionAnswer
from gateway.sim.answers.identity import Identity
from gateway.sim.answers.llamacpp import LlamaCppAnswer
from gateway.sim.answers.messages import MessagesAnswer
from gateway.sim.answers.numbers import Numbers
from gateway.sim.answers.responses import ResponsesAnswer
from gateway.sim.engine import Run
from gateway.sim.intake import Ask
from gateway.sim.plan import Token
from gateway.sim.profiles import Profile

__all__ = ["Answer", "Identity", "Numbers", "make_answer"]


class Answer(Protocol):
    """How one answer looks. Each item of a sequence is one whole SSE event."""

    def opening(self) -> Sequence[bytes]:
        """Events sent at once, before the engine is asked."""

    def first(self, run: Run) -> Sequence[bytes]:
        """Events that arrive with the first token, right before it."""

    def token(self, token: Token, run: Run) -> Sequence[bytes]:
        """Events of one token; none for a hidden one."""

    def closing(self, run: Run) -> Sequence[bytes]:
        """Events behind the last token, the terminator included."""

    def whole(self, run: Run) -> bytes:
        """The body of a plain answer."""


def make_answer(profile: Profile, ask: Ask, identity: Identity) -> Answer:
    """The shape for the API that was asked, in the dialect of the server."""
    if ask.api == "completions":
        return CompletionAnswer(profile, ask, identity)
    if ask.api == "responses":
        return ResponsesAnswer(profile, ask, identity)
    if ask.api == "messages":
        return MessagesAnswer(profile, ask, identity)
    if profile.engine == "llamacpp":
        return LlamaCppAnswer(profile, ask, identity)
    return ChatAnswer(profile, ask, identity)

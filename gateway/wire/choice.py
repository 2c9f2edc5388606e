"""One answer of a stream: when its first visible text came, and whether a piece of text is thinking.

A server without a reasoning parser streams the thoughts inside the text. The rules (cases C088): `<think>` counts at
the very start only, blanks before it aside; its span ends at `</think>` or never. A template may have put the opening
tag into the prompt, so a `</think>` that nothing opened ends a span that began with the answer: what had been taken
for visible was thinking. A tag that the answer mentions in its middle is text.

Tags may be cut anywhere. Work per piece is constant: at most seven characters are kept.

    START ── blank or the beginning of a tag ──> START
      ├──── `<think>` ──> THINKING ── `</think>` ──> AFTER ── text ──> ANSWER
      └──── text ──> ANSWER ── `</think>`, nothing opened ──> AFTER
"""

from __future__ import annotations

from typing import Literal

_OPEN = "<think>"
_CLOSE = "</think>"
_KEEP = len(_CLOSE) - 1

Phase = Literal["start", "thinking", "after", "answer"]


class Choice:
    """State of one `choice.index`. `t_visible` is in ns, 0 while nothing visible came."""

    __slots__ = ("_t_carry", "carry", "has_reasoning", "has_tool", "is_late_close", "is_settled", "phase", "t_visible")

    def __init__(self) -> None:
        self.phase: Phase = "start"
        self.t_visible = 0
        self.has_reasoning = False
        self.has_tool = False
        self.is_late_close = False
        """A `</think>` without an opening tag showed that earlier text had been thinking."""
        self.is_settled = False
        """Visible text has begun and no later text can change that."""
        self.carry = ""  # end of the text so far that may be the beginning of a tag
        self._t_carry = 0

    def see(self, now: int) -> None:
        """Something visible other than text: a refusal, audio, a tool call."""
        if not self.t_visible:
            self.t_visible = now

    def reason(self) -> None:
        """A reasoning field: the server separates thoughts, so the text holds none but at its start."""
        self.has_reasoning = True
        if self.phase == "answer":
            self.is_settled = True

    def text(self, piece: str, now: int) -> bool:
        """Take a piece of the answer's text; True when it, or a part of it, was thinking."""
        if self.phase == "answer":
            return not self.is_settled and self._watch(piece, now)
        if self.phase == "start":
            return self._begin(piece, now)
        if self.phase == "thinking":
            return self._think(piece, now)
        self._after(piece, now)
        return False

    def close(self) -> None:
        """The stream ended: a beginning of `<think>` that never became one was text."""
        if self.phase == "start" and self.carry:
            self.see(self._t_carry)

    def _begin(self, piece: str, now: int) -> bool:
        text = self.carry + piece
        start = text.lstrip()
        if start.startswith(_OPEN):
            self.phase = "thinking"
            self.has_reasoning = True
            self.carry = ""
            return self._think(start[len(_OPEN) :], now)
        if _OPEN.startswith(start):  # blank so far, or a part of the tag
            if start and not self.carry:
                self._t_carry = now
            self.carry = start
            return False
        t_start = self._t_carry if self.carry else now
        self.carry = ""
        self._answer(t_start)
        self.is_settled = self.has_reasoning
        return not self.is_settled and self._watch(text, now)

    def _think(self, piece: str, now: int) -> bool:
        text = self.carry + piece
        _, close, rest = text.partition(_CLOSE)
        if close:
            self._close_span(rest, now)
        else:
            self.carry = text[-_KEEP:]
        return True

    def _close_span(self, rest: str, now: int) -> None:
        self.phase = "after"
        self.carry = ""
        self.has_reasoning = True
        self._after(rest, now)

    def _after(self, piece: str, now: int) -> None:
        if piece and not piece.isspace():
            self._answer(now)
            self.is_settled = True

    def _answer(self, now: int) -> None:
        self.phase = "answer"
        self.see(now)

    def _watch(self, piece: str, now: int) -> bool:
        """Look for a closing tag that nothing opened."""
        if not self.carry and "<" not in piece:
            return False
        text = self.carry + piece
        before, close, rest = text.partition(_CLOSE)
        if _OPEN in before:
            self.is_settled = True
            self.carry = ""
            return False
        if close:
            self.is_late_close = True
            if not self.has_tool:
                self.t_visible = 0
            self._close_span(rest, now)
            return True
        last = text.rfind("<", max(0, len(text) - _KEEP))
        tail = text[last:] if last >= 0 else ""
        self.carry = tail if _OPEN.startswith(tail) or _CLOSE.startswith(tail) else ""
        return False

"""Following a streamed answer: instants, tokens, errors and the end, from the bytes as they were relayed.

The base class cuts events, keeps the clockwork and reads errors; a subclass per API says what a token is there
(openai.py, responses.py, anthropic.py). It runs once per read of every stream: after the first visible token an
ordinary chunk costs one cut, one `orjson.loads` and a handful of look-ups. Instants are the definitions of
latency-methods §1; events that share a read share its `now`.

Nothing here raises, whatever a server sends.
"""

from __future__ import annotations

from bisect import bisect_left

import orjson

from gateway.wire.answer import (
    JsonObject,
    ServerTimes,
    StreamError,
    Usage,
    as_object,
    error_of,
    finish_word,
    lenient_loads,
)
from gateway.wire.choice import Choice
from gateway.wire.sse import Event, EventSplitter

# Upper bounds of the inter-chunk histogram (spec.md §8), in ns; gaps above the last one fall into a 16th bucket.
GAP_BOUNDS_NS = tuple(
    int(ms * 1_000_000) for ms in (1, 2.5, 5, 10, 20, 30, 50, 75, 100, 150, 250, 500, 1000, 2500, 5000)
)

# More choices than any request asks for; the rest of them share one state, so that memory stays bounded.
MAX_CHOICES = 256

# What a part of an event turned out to be; the greatest of its parts is what the event was. An event that holds both
# the end of the thoughts and text counts as reasoning.
NOTHING, TOKEN, REASONING = 0, 1, 2


class StreamReader:
    """Feed a stream's bytes with the instant they arrived. Instants are monotonic ns > 0; 0 means never."""

    __slots__ = (
        "_is_garbled", "_metrics", "_splitter", "_t_partial", "_timings", "_usage", "bad_events", "choices", "error",
        "events", "finish_reasons", "first_chunk_tokens", "gaps", "is_done", "reasoning_events", "t_event", "t_last",
        "t_token", "t_visible", "token_events",
    )  # fmt: skip

    def __init__(self) -> None:
        self.t_event = 0
        """First event of any kind; comments and pings are none."""
        self.t_token = 0
        self.t_visible = 0
        """May go back to 0 and come again: see `late_think_close`."""
        self.t_last = 0
        self.events = 0
        self.token_events = 0
        self.reasoning_events = 0
        self.finish_reasons: dict[int, str] = {}
        """By choice index, in OpenAI's words; the first word of a choice stays."""
        self.error: StreamError | None = None
        self.is_done = False
        """The API's own end mark came. Later events only add usage."""
        self.bad_events = 0
        """Events whose data is not JSON (or not UTF-8)."""
        self.gaps = [0] * (len(GAP_BOUNDS_NS) + 1)
        """Counts of gaps between token events, per bound of GAP_BOUNDS_NS, not cumulative."""
        self.first_chunk_tokens = 0
        """Tokens in the first token event: 1 unless the server said otherwise; 0 before it."""
        self.choices: dict[int, Choice] = {}
        self._splitter = EventSplitter()
        self._usage: JsonObject | None = None
        self._metrics: object = None
        self._timings: object = None
        self._is_garbled = False
        self._t_partial = 0

    # --- what was seen

    @property
    def usage(self) -> Usage | None:
        """The last usage the server gave; running totals are not summed."""
        return None

    @property
    def server(self) -> ServerTimes | None:
        return None

    @property
    def is_finished(self) -> bool:
        """The answer is whole: end mark, or every choice that was seen has its finish reason (cases C007)."""
        return self.is_done or (bool(self.finish_reasons) and self.choices.keys() <= self.finish_reasons.keys())

    @property
    def is_open(self) -> bool:
        """The last bytes fed ended inside an event."""
        return self._splitter.is_open

    @property
    def saw_id(self) -> bool:
        """An `id` line was seen: a comment written between events would break some clients (cases C004)."""
        return self._splitter.saw_id

    @property
    def comments(self) -> int:
        return self._splitter.comments

    @property
    def inspect_lost(self) -> bool:
        """Part of the stream could not be read: an event over the bound, or one without anything to recognise."""
        return self._is_garbled or self._splitter.overflowed

    @property
    def late_think_close(self) -> bool:
        """A `</think>` came that nothing opened: `t_visible` then counts from after it."""
        return any(choice.is_late_close for choice in self.choices.values())

    @property
    def has_reasoning(self) -> bool:
        return any(choice.has_reasoning for choice in self.choices.values())

    @property
    def gap_count(self) -> int:
        return max(0, self.token_events - 1)

    @property
    def gap_sum_ns(self) -> int:
        return self.t_last - self.t_token

    def __repr__(self) -> str:
        state = "done" if self.is_done else "finished" if self.is_finished else "open"
        trouble = f", error {self.error.status}" if self.error else ""
        return f"{type(self).__name__}({state}, {self.events} events, {self.token_events} with tokens{trouble})"

    # --- feeding

    def feed(self, data: bytes, now: int) -> None:
        """Take one read of the stream that arrived at `now`."""
        splitter = self._splitter
        self._take(splitter.feed(data), now)
        if splitter.is_open:
            self._t_partial = now

    def close(self, now: int) -> None:
        """The stream ended, in whatever way. A last event without its blank line is read if it is whole."""
        last = self._splitter.finish()
        if last and (last[0][1].strip() == b"[DONE]" or lenient_loads(last[0][1])[1]):
            self._take(last, self._t_partial or now)
        for choice in self.choices.values():
            choice.close()
        self._find_visible()

    def _take(self, events: list[Event], now: int) -> None:
        for name, body in events:
            if not self.t_event:
                self.t_event = now
            self.events += 1
            try:
                payload = orjson.loads(body)
            except ValueError:
                self._odd_event(name, body, now)
                continue
            if type(payload) is dict:
                if self.is_done:
                    self._late(payload)
                else:
                    self._read(name, payload, body, now)

    def _odd_event(self, name: bytes, body: bytes, now: int) -> None:
        """An event that orjson refuses: the end mark, an empty ping, odd JSON, or no JSON."""
        stripped = body.strip()
        if stripped == b"[DONE]":
            self.is_done = True
            return
        if not stripped:
            return
        payload, is_sound = lenient_loads(body)
        if not is_sound:
            self.bad_events += 1
        if self.is_done:
            self._late(as_object(payload))
        elif isinstance(payload, dict):
            self._read(name, payload, body, now)
        elif not is_sound and not self._scan(body, now):
            self._is_garbled = True

    def _read(self, name: bytes, payload: JsonObject, body: bytes, now: int) -> None:  # noqa: ARG002
        """One event before the end mark. A subclass knows what a token is; this one only knows errors."""
        self._take_error(name, payload, body)

    def _late(self, payload: JsonObject) -> None:
        """An event after the end mark: usage is still welcome, nothing else is (fault-catalogue C12)."""

    def _scan(self, body: bytes, now: int) -> bool:  # noqa: ARG002
        """Look for what matters in bytes that are not JSON; False when nothing was found."""
        return False

    # --- for subclasses

    def _take_error(self, name: bytes, payload: JsonObject, body: bytes) -> None:
        if self.error is None:
            self.error = error_of(payload, body, is_error_event=name == b"error")

    def _choice(self, index: object = 0) -> Choice:
        return self.choices.get(self._key(index)) or self._new_choice(index)

    def _new_choice(self, index: object) -> Choice:
        choice = self.choices[self._key(index)] = Choice()
        return choice

    def _key(self, index: object) -> int:
        key = index if type(index) is int else 0
        return key if key in self.choices or len(self.choices) < MAX_CHOICES else -1

    def _finish(self, index: object, word: object) -> None:
        if isinstance(word, str) and word:
            self._choice(index)
            self.finish_reasons.setdefault(self._key(index), finish_word(word))

    def _token(self, kind: int, now: int, tokens: int = 1) -> None:
        """An event with a token; `tokens` is how many, and only the first event's number is kept."""
        last = self.t_last
        if last:
            self.gaps[bisect_left(GAP_BOUNDS_NS, now - last)] += 1
        else:
            self.t_token = now
            self.first_chunk_tokens = tokens
        self.t_last = now
        self.token_events += 1
        if kind == REASONING:
            self.reasoning_events += 1

    def _take_text(self, choice: Choice, piece: str, now: int) -> int:
        """A piece of the answer's text, which may hold `<think>` spans."""
        was_visible, was_late = choice.t_visible, choice.is_late_close
        is_thinking = choice.text(piece, now)
        if choice.t_visible != was_visible:
            self._find_visible()
        if choice.is_late_close and not was_late and len(self.choices) == 1:
            self.reasoning_events = self.token_events  # all of it was thinking; with n > 1 it cannot be told apart
        return REASONING if is_thinking else TOKEN

    def _take_reasoning(self, choice: Choice) -> int:
        if not choice.has_reasoning:
            choice.reason()
        return REASONING

    def _take_visible(self, choice: Choice, now: int) -> int:
        """Visible output that is not text: a refusal, audio, a tool call."""
        choice.see(now)
        if not self.t_visible:
            self.t_visible = now
        return TOKEN

    def _take_tool(self, choice: Choice, now: int) -> int:
        choice.has_tool = True
        return self._take_visible(choice, now)

    def _find_visible(self) -> None:
        self.t_visible = min((c.t_visible for c in self.choices.values() if c.t_visible), default=0)

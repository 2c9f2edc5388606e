"""The instants of one request, and the segments between them (latency-methods §1).

All instants are monotonic ns on one clock, 0 while they have not happened. The segments are a partition: whatever is
missing, they add up to `end − recv` exactly. What never came lends its time to the segment that was waiting for it:
no token → all of it is `wait`; nothing visible → all of it is `reasoning`.

       recv      body        sent        token       visible      last       end
        ├ upload ──┼─ gateway ─┼── wait ───┼ reasoning ─┼─ decode ──┼── tail ──┤
                        └ connect is taken out of gateway
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gateway.wire.answer import ServerTimes

Cause = Literal["queue", "prefill", "network", "input", "unexplained"]
TtftSource = Literal["stream", "none"]


class Segments(NamedTuple):
    """Durations in ns, none negative. The field names are the values of the metric label `segment`."""

    upload: int
    gateway: int
    connect: int
    wait: int
    reasoning: int
    decode: int
    tail: int

    @property
    def total(self) -> int:
        return sum(self)


class WaitCause(NamedTuple):
    """A part of the wait for the first token."""

    cause: Cause
    source: str
    seconds: float


class Timeline:
    """Instants of one request. Assign them as they happen; every question may be asked at any time."""

    __slots__ = (
        "body", "connect_end", "connect_start", "end", "event", "header", "last", "recv", "sent",
        "slot_wait_ns", "token", "ttft_source", "visible",
    )  # fmt: skip

    def __init__(self, recv: int) -> None:
        self.recv = recv
        """First byte of the request head."""
        self.body = 0
        """Last byte of the request body."""
        self.connect_start = 0
        self.connect_end = 0
        """Both 0 when a connection was reused."""
        self.sent = 0
        """Last byte of the upstream request written."""
        self.header = 0
        self.event = 0
        self.token = 0
        self.visible = 0
        self.last = 0
        self.end = 0
        self.slot_wait_ns = 0
        """Waiting for a free connection; a part of the gateway segment."""
        self.ttft_source: TtftSource = "stream"
        """`none`: the answer came whole, so its first token cannot be timed."""

    def __repr__(self) -> str:
        known = (name for name in ("body", "sent", "header", "event", "token", "visible", "last", "end"))
        seen = ", ".join(f"{name} +{(at - self.recv) / 1e6:.1f} ms" for name in known if (at := getattr(self, name)))
        return f"Timeline({seen})"

    def answer_whole(self, now: int) -> None:
        """A plain answer was complete at `now`: there is no first token to tell from the last."""
        self.token = self.visible = self.last = now
        self.ttft_source = "none"

    def segments(self, now: int = 0) -> Segments:
        """The partition of `recv` to `end`, or to `now` while the request runs."""
        if (
            0 < self.recv <= self.body <= self.sent <= self.token <= self.visible <= self.last <= self.end
            and not self.connect_start
        ):  # all of it happened, in order, on a connection that was there: nothing to fill in
            return Segments(
                self.body - self.recv, self.sent - self.body, 0, self.token - self.sent,
                self.visible - self.token, self.last - self.visible, self.end - self.last,
            )  # fmt: skip
        end = max(self.recv, self.end or now)
        visible = self.visible or end
        last = (self.last or visible) if self.visible else end
        token = self.token or visible
        sent = self.sent or self.header or self.event or token
        start, stop = self._connect(sent)
        body = self.body or start or sent

        at_body = _between(self.recv, body, end)
        at_sent = _between(at_body, sent, end)
        at_token = _between(at_sent, token, end)
        at_visible = _between(at_token, visible, end)
        at_last = _between(at_visible, last, end)
        connect = _between(at_body, stop, at_sent) - _between(at_body, start, at_sent) if start else 0
        connect = max(0, connect)
        return Segments(
            upload=at_body - self.recv,
            gateway=at_sent - at_body - connect,
            connect=connect,
            wait=at_token - at_sent,
            reasoning=at_visible - at_token,
            decode=at_last - at_visible,
            tail=end - at_last,
        )

    def _connect(self, sent: int) -> tuple[int, int]:
        """When connecting began and ended; an attempt that never ended lasts until the request was sent or ended."""
        if not self.connect_start:
            return 0, 0
        return self.connect_start, self.connect_end or sent

    @property
    def e2e_ns(self) -> int | None:
        return max(0, self.end - self.recv) if self.end else None

    @property
    def ttft_ns(self) -> int | None:
        """First token of any channel; None for plain answers and while there is none."""
        return self._since(self.recv, self.token)

    @property
    def ttfv_ns(self) -> int | None:
        """First visible token."""
        return self._since(self.recv, self.visible)

    @property
    def upstream_ttft_ns(self) -> int | None:
        """From the last byte sent upstream to the first token."""
        return self._since(self.sent, self.token)

    def _since(self, start: int, instant: int) -> int | None:
        if not instant or not start or self.ttft_source == "none":
            return None
        return max(0, instant - start)

    def tpot_ns(self, completion_tokens: int | None, first_chunk_tokens: int = 1) -> float | None:
        """Decode time per token; None where it is undefined: a single token, or all of them in one read.

        The tokens of the first chunk were not waited for one by one and do not count (cases C099).
        """
        if completion_tokens is None or completion_tokens <= 1 or self.ttft_source == "none":
            return None
        tokens = completion_tokens - max(1, first_chunk_tokens)
        decode = self.last - self.token
        return decode / tokens if self.token and tokens > 0 and decode > 0 else None


def server_timing(timeline: Timeline, now: int) -> bytes:
    """The value of `Server-Timing` with what is known at `now`; durations in ms."""
    if not timeline.body:
        return b""
    known = timeline.segments(now)
    text = f"upload;dur={_ms(known.upload)}"
    if timeline.sent:
        text += f", gateway;dur={_ms(known.gateway)}, connect;dur={_ms(known.connect)}"
    if timeline.token:
        text += f", wait;dur={_ms(known.wait)}"
    ttft_ns = timeline.ttft_ns
    if ttft_ns is not None:
        text += f", ttft;dur={_ms(ttft_ns)}"
    if timeline.visible and timeline.ttft_source == "stream":
        text += f", reasoning;dur={_ms(known.reasoning)}"
    return text.encode()


def wait_causes(timeline: Timeline, server: ServerTimes | None, rtt_ns: int | None = None) -> list[WaitCause]:
    """The wait split by what the server measured (latency-methods §3, source 1); empty when it measured nothing.

    The parts are never negative and add up to the wait. Queue and prefill are the server's; of the rest, one round
    trip is network and what remains is input processing (template, tokenizer). Where the server left one of the two
    out, or the round trip is not known, the remainder cannot be named and is `unexplained`. A plain answer's wait
    holds its generation too; that is left out of the sum when the server told it, and else nothing is said.
    """
    if server is None or not timeline.token or (server.queue_ms is None and server.prefill_ms is None):
        return []
    left = timeline.segments(timeline.last).wait
    if timeline.ttft_source == "none":
        if server.generation_ms is None:
            return []
        left = max(0, left - round(server.generation_ms * 1e6))
    measured: list[tuple[Cause, int | None]] = [
        ("queue", _ns(server.queue_ms)), ("prefill", _ns(server.prefill_ms)), ("network", rtt_ns),
    ]  # fmt: skip
    found: list[WaitCause] = []
    for cause, ns in measured:
        if ns is not None:
            part = _between(0, ns, left)
            found.append(WaitCause(cause, "server", part / 1e9))
            left -= part
    rest: Cause = "input" if len(found) == len(measured) else "unexplained"
    return [*found, WaitCause(rest, "server", left / 1e9)]


def _ns(ms: float | None) -> int | None:
    return None if ms is None else round(ms * 1e6)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f}".rstrip("0").rstrip(".") if ns else "0"


def _between(low: int, value: int, high: int) -> int:
    """`value` moved into low…high; low ≤ high wherever this is called."""
    if value <= low:
        return low
    if value >= high:
        return high
    return value

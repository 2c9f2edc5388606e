"""One sending of a request to one upstream. What is known of an attempt lives here until it turns out to be the one
that answers: only then does the exchange adopt it, so that a loser leaves no trace in headers, metrics or log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from gateway.errors import GatewayError
    from gateway.policy.breaker import Breaker, Permit
    from gateway.relay import Relay, Result
    from gateway.runtime import RouteState
    from gateway.timing.predict import Predictor, Waiting
    from gateway.upstream.state import UpstreamState
    from gateway.wire.plain import PlainAnswer
    from gateway.wire.stream import StreamReader

AttemptKind = Literal["first", "retry", "hedge", "fallback"]


class Gate(Protocol):
    """Decides between attempts that run at the same time. Called from the event loop's callbacks, must not block."""

    def claim(self, attempt: Attempt, now: int) -> bool:
        """The attempt has the answer's beginning. False: another one was first."""

    def leads(self, attempt: Attempt) -> bool:
        """Whether this attempt speaks to the waiting caller (budget, heartbeats): one at a time does."""

    def wants(self, attempt: Attempt) -> bool:
        """False: another attempt has the answer already."""

    def on_budget(self, attempt: Attempt, now: int) -> None:
        """The first-token budget passed."""

    def estimate_ms(self, attempt: Attempt, now: int) -> int | None:
        """Time to the attempt's first token as far as is known."""

    def on_silence(self, attempt: Attempt, now: int) -> None:
        """The attempt's upstream turned out to answer nobody."""

    def on_hedge_due(self, now: int) -> None: ...
    def on_token(self, attempt: Attempt, now: int) -> None:
        """The attempt's first token, for what learns from it."""


class Attempt:
    """See the module."""

    __slots__ = (
        "asked", "breaker", "changes", "error", "header", "is_booked", "is_seen", "is_settled", "kind",
        "max_tokens", "permit",
        "plain", "predictor", "reader", "relay", "result", "route", "sent", "state", "thinking_asked", "ticket",
        "token_noted",
    )  # fmt: skip

    def __init__(self, kind: AttemptKind, route: RouteState, state: UpstreamState) -> None:
        self.kind = kind
        self.route = route
        self.state = state
        self.reader: StreamReader | None = None
        self.plain: PlainAnswer | None = None
        self.asked: dict[str, object] = {}  # what a plain request asks for, where its answer is put together here
        self.changes: list[str] = []
        self.is_seen = False  # the upstream answers as a stream
        self.thinking_asked = "client"
        self.max_tokens: int | None = None
        self.sent = 0  # last byte of the request written, monotonic ns
        self.header = 0
        self.relay: Relay | None = None  # while an answer is waited for
        self.result: Result | None = None
        self.error: GatewayError | None = None  # it got as far as no answer
        self.breaker: Breaker | None = None
        self.permit: Permit | None = None
        self.predictor: Predictor | None = None
        self.ticket: Waiting | None = None
        self.token_noted = False
        self.is_settled = False  # breaker, predictor and all that learn from it were told of its end
        self.is_booked = False  # as a failure that did not decide the request

    @property
    def has_failed(self) -> bool:
        """Of an ended one that is no answer: it failed, and was not just too late."""
        return self.result is None or self.result.kind != "outrun"

    def __repr__(self) -> str:
        return f"<Attempt {self.kind} at {self.state.name}>"

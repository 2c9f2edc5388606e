"""What an answer was worth: an answer, nothing visible, thoughts that nobody asked for, or not an answer at all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gateway.errors import GatewayError, UpstreamBadResponse
from gateway.wire.plain import read_plain
from gateway.wire.reader import verdict_of

if TYPE_CHECKING:
    from gateway.account import Account
    from gateway.exchange import Exchange
    from gateway.runtime import RouteState
    from gateway.upstream.http1 import ResponseHead
    from gateway.upstream.state import UpstreamState

log = logging.getLogger("gateway.judging")

_JSON_KINDS = frozenset(("chat", "completions", "responses", "messages", "embeddings"))


class Verdicts:
    """Judges answers and books what route owners must know."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def plain(self, x: Exchange, body: bytes) -> str | None:
        """Reads a whole answer once; its verdict."""
        if x.kind not in _JSON_KINDS or x.is_stream:
            return None
        if x.plain is None:
            x.plain = read_plain(x.kind, body, max_tokens=x.max_tokens, is_thinking_off=x.thinking_asked == "off")
        return x.plain.verdict

    def problem_of(self, x: Exchange, head: ResponseHead, body: bytes) -> GatewayError | None:
        """Why a plain answer with a good status cannot be passed on, if so."""
        encoding = head.get(b"content-encoding")
        if x.kind not in _JSON_KINDS or (encoding is not None and encoding.lower() != b"identity"):
            return None
        self._read(x, body)
        has_error = x.plain is not None and x.plain.error is not None
        if x.is_stream and not has_error:
            return UpstreamBadResponse(
                "The model server did not answer with a stream although one was asked for.", reason="mode_mismatch"
            )
        if body.lstrip()[:1] not in (b"{", b"["):
            return UpstreamBadResponse(
                "The upstream answered with something that is not JSON; is `url` really a model server's?",
                reason="content_type",
            )
        return None

    def status_of(self, x: Exchange, status: int) -> int:
        """An error that came with a good status gets the status it names, else 502 (fault-catalogue B19)."""
        if x.plain is not None and x.plain.error is not None:
            return x.plain.error.status or 502
        return status

    def book_plain(self, x: Exchange, route: RouteState, state: UpstreamState) -> None:
        plain = x.plain
        if plain is None or plain.error is not None:
            return
        x.verdict = plain.verdict
        self._check_switch(x, route, state, has_reasoning=plain.has_reasoning)

    def budget(self, x: Exchange, route: RouteState, now: int) -> None:
        """Whether a stream was over a first-token budget: by the instants of its tokens, not by when a timer looked."""
        reader = x.reader
        if x.budget_action is not None or reader is None or not x.is_stream:
            return
        limits = route.config.budget
        for limit_ms, seen in ((limits.ttft_ms, reader.t_token), (limits.ttfv_ms, reader.t_visible)):
            if limit_ms is not None and (seen or now) - x.timeline.recv > limit_ms * 1_000_000:
                x.budget_action = limits.on_exceed

    def stream(self, x: Exchange, route: RouteState, state: UpstreamState) -> None:
        """After a stream: its verdict if it came to its end, and whether the thinking switch worked."""
        reader = x.reader
        if reader is None or not x.is_stream:
            return
        if x.outcome == "complete":
            x.verdict = verdict_of(reader, max_tokens=x.max_tokens, is_thinking_off=x.thinking_asked == "off")
        self._check_switch(x, route, state, has_reasoning=reader.has_reasoning)

    def _read(self, x: Exchange, body: bytes) -> None:
        if x.plain is None:
            x.plain = read_plain(x.kind, body, max_tokens=x.max_tokens, is_thinking_off=x.thinking_asked == "off")

    def _check_switch(self, x: Exchange, route: RouteState, state: UpstreamState, *, has_reasoning: bool) -> None:
        """`thinking: off` is measured, not believed (C085)."""
        if x.thinking_asked != "off" or not has_reasoning or x.verdict == "misrouted":
            return
        name = route.config.name
        self._account.route(name).violations["reasoning_seen"].inc()
        if name not in state.violations_seen:
            state.violations_seen.add(name)
            log.warning(
                "route `%s` asks upstream `%s` not to think, and model `%s` thinks all the same "
                "(hint: set `family` of the upstream; `firsttoken check` lists the families)",
                name,
                state.name,
                x.model,
            )

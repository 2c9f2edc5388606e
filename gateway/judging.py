"""What an answer was worth: an answer, nothing visible, thoughts that nobody asked for, or not an answer at all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gateway.errors import GatewayError, UpstreamBadResponse
from gateway.wire.kinds import JSON_KINDS
from gateway.wire.plain import read_plain
from gateway.wire.reader import verdict_of

if TYPE_CHECKING:
    from gateway.account import Account
    from gateway.attempt import Attempt
    from gateway.exchange import Exchange
    from gateway.upstream.http1 import ResponseHead

log = logging.getLogger("gateway.judging")


class Verdicts:
    """Judges answers and books what route owners must know."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def plain(self, x: Exchange, body: bytes) -> str | None:
        """Reads a whole answer once; its verdict."""
        if x.kind not in JSON_KINDS or x.is_stream:
            return None
        if x.plain is None:
            x.plain = read_plain(x.kind, body, max_tokens=x.max_tokens, is_thinking_off=x.thinking_asked == "off")
        return x.plain.verdict

    def problem_of(self, x: Exchange, head: ResponseHead, body: bytes) -> GatewayError | None:
        """Why a plain answer with a good status cannot be passed on, if so."""
        encoding = head.get(b"content-encoding")
        if x.kind not in JSON_KINDS or (encoding is not None and encoding.lower() != b"identity"):
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
        if has_error or x.plain is None:
            return None
        if not x.plain.is_json:
            return UpstreamBadResponse(
                "The model server's answer is not whole JSON; it may have broken off. Its log says why.",
                reason="bad_json",
            )
        if b'"choices"' in body and x.kind in ("chat", "completions") and not x.plain.parts:  # SDKs index into them
            return UpstreamBadResponse(
                "The upstream answered without any choices; its log may say why.", reason="no_choices"
            )
        return None

    def status_of(self, x: Exchange, status: int) -> int:
        """An error that came with a good status gets the status it names, else 502 (fault-catalogue B19)."""
        if x.plain is not None and x.plain.error is not None:
            return x.plain.error.status or 502
        return status

    def book_plain(self, x: Exchange, attempt: Attempt) -> None:
        plain = x.plain
        if plain is None or plain.error is not None:
            return
        x.verdict = plain.verdict
        self._check_switch(x, attempt, has_reasoning=plain.has_reasoning)

    def budget(self, x: Exchange, now: int) -> None:
        """Whether a stream was over a first-token budget: by the instants of its tokens, not by when a timer looked."""
        reader = x.reader
        limits = x.budget
        if x.budget_action is not None or reader is None or not x.is_seen or limits is None:
            return
        for limit_ms, seen in ((limits.ttft_ms, reader.t_token), (limits.ttfv_ms, reader.t_visible)):
            if limit_ms is not None and (seen or now) - x.timeline.recv > limit_ms * 1_000_000:
                x.budget_action = "wait" if limits.on_exceed == "wait" else "heartbeat"

    def stream(self, x: Exchange, attempt: Attempt) -> None:
        """After a stream: its verdict if it came to its end, and whether the thinking switch worked."""
        reader = x.reader
        if reader is None or not x.is_stream:
            return
        if x.outcome in ("complete", "pending_done"):
            x.verdict = verdict_of(reader, max_tokens=x.max_tokens, is_thinking_off=x.thinking_asked == "off")
        self._check_switch(x, attempt, has_reasoning=reader.has_reasoning)

    def _read(self, x: Exchange, body: bytes) -> None:
        if x.plain is None:
            x.plain = read_plain(x.kind, body, max_tokens=x.max_tokens, is_thinking_off=x.thinking_asked == "off")

    def _check_switch(self, x: Exchange, attempt: Attempt, *, has_reasoning: bool) -> None:
        """`thinking: off` is measured, not believed (C085)."""
        if x.thinking_asked != "off" or not has_reasoning or x.verdict == "misrouted":
            return
        name, state = attempt.route.config.name, attempt.state
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

"""What a running request may tell whoever waits for it: its phase, and how long it will still take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.attempt import Attempt
    from gateway.exchange import Exchange

MS = 1_000_000


def prospects(x: Exchange, attempt: Attempt | None, now: int) -> dict[str, object]:
    """Phase and estimates, ms; absent where not known. `attempt`: the one that leads, None between two."""
    told: dict[str, object] = {"elapsed_ms": (now - x.timeline.recv) // MS}
    if attempt is None or attempt.relay is None:
        return {**told, "phase": "queued"}
    reader = attempt.reader
    if reader is not None and reader.t_token:
        told["phase"] = "answering" if reader.t_visible else "reasoning"
    else:
        predictor, ticket = attempt.predictor, attempt.ticket
        ahead = predictor.ahead_of(ticket) if predictor is not None and ticket is not None else 0
        told["phase"] = "queued" if ahead else "prefill"
    if attempt.predictor is not None and attempt.ticket is not None:
        whole = not x.is_stream or told["phase"] in ("answering", "reasoning")
        ask = attempt.predictor.until_complete if whole else attempt.predictor.remaining
        left = ask(attempt.ticket, now)
        told["estimation_basis"] = left.basis
        if left.p50_s is not None and left.p90_s is not None:
            told["estimation_ms"] = round(left.p50_s * 1000)
            told["estimation_p90_ms"] = round(left.p90_s * 1000)
    return told


def first_token_ms(attempt: Attempt, now: int) -> int | None:
    """Until its first token; None when that came, or nothing is known."""
    if attempt.predictor is None or attempt.ticket is None or attempt.token_noted:
        return None
    left_s = attempt.predictor.remaining(attempt.ticket, now).p50_s
    return None if left_s is None else round(left_s * 1000)

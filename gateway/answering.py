"""What becomes of the attempt that decides: an answer for the caller, relayed or to be sent whole, or an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from gateway.complaints import no_answer
from gateway.errors import UpstreamBadResponse, body_of
from gateway.exchange import ClientGone
from gateway.readable import is_nested, with_readable_error
from gateway.reply import Reply, masked, response_headers
from gateway.wire.kinds import JSON_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.attempt import Attempt
    from gateway.exchange import Exchange
    from gateway.judging import Verdicts
    from gateway.relay import Result

_STREAM_ONLY = frozenset((b"content-type", b"cache-control", b"x-accel-buffering"))


class Answering:
    """Turns the last attempt's result into what the caller gets. Holds no state of a request."""

    def __init__(self, verdicts: Verdicts, clock: Callable[[], int]) -> None:
        self._verdicts = verdicts
        self._clock = clock

    def outcome(self, x: Exchange, attempt: Attempt) -> Reply | None:
        """The answer to send, or None when it was relayed. Raises `GatewayError`, `ClientGone`."""
        x.adopt(attempt)
        if attempt.error is not None:
            raise attempt.error
        result, state = attempt.result, attempt.state
        assert result is not None
        self._verdicts.budget(x, x.timeline.end or self._clock())
        if result.kind in ("gone", "outrun"):
            raise ClientGone
        if result.kind == "failed":
            assert result.error is not None
            raise result.error
        if result.kind == "lost":
            assert result.lost is not None
            raise no_answer(result.lost, state.name)
        if result.kind == "sent":
            self._verdicts.stream(x, attempt)
            return None
        if result.kind == "stream_error":
            return self._reply_to_stream_error(x, attempt, result)
        return self._reply(x, attempt, result)

    def _reply_to_stream_error(self, x: Exchange, attempt: Attempt, result: Result) -> Reply:
        """The stream's first event was an error and nothing went out: the caller gets it as a real status."""
        error = x.reader.error if x.reader is not None else None
        assert error is not None and result.head is not None
        status = error.status or 502
        if is_nested(error.data):
            body = error.data
        else:
            told = UpstreamBadResponse(error.message, status=status, code=error.code or None, reason="stream_error")
            body = body_of(told, x.api, x.request_id)
        fields = response_headers(x, attempt.route, attempt.state, result.head, self._clock())
        headers = [(b"content-type", b"application/json"), *(field for field in fields if field[0] not in _STREAM_ONLY)]
        x.settle("refused" if status < 500 else "upstream_error", "stream_error")
        return Reply(status, headers, masked(body, attempt.state))

    def _reply(self, x: Exchange, attempt: Attempt, result: Result) -> Reply:
        head, body = result.head, result.body
        assert head is not None
        status = head.status
        if status < 400:
            problem = self._verdicts.problem_of(x, head, body)
            if problem is not None:
                raise problem
            status = self._verdicts.status_of(x, status)
            told = x.plain.error if x.plain is not None else None
            if status >= 400 and told is not None and not is_nested(body):  # its status is ours, so are its words
                said = UpstreamBadResponse(told.message, status=status, code=told.code or None)
                body = body_of(said, x.api, x.request_id)
            self._verdicts.book_plain(x, attempt)
            if not x.is_seen:
                x.timeline.answer_whole(x.timeline.end)
        headers = response_headers(x, attempt.route, attempt.state, head, self._clock())
        if head.is_event_stream:  # it was put together from a stream
            headers = [field for field in headers if field[0] not in _STREAM_ONLY]
            headers.append((b"content-type", b"application/json"))
        if status < 400:
            x.settle("complete")
        else:
            x.settle("refused" if status < 500 else "upstream_error", "http_4xx" if status < 500 else "http_5xx")
            body = masked(body, attempt.state)
            if x.api == "openai" and x.kind in JSON_KINDS and not head.is_coded:
                body = with_readable_error(body)
        return Reply(status, headers, body)


def refusal_of(attempt: Attempt) -> tuple[int, bytes]:
    """Status and body of an answer that is complete and unsent, also of an error that came inside a stream."""
    result, reader = attempt.result, attempt.reader
    if result is None:
        return 0, b""
    if result.kind == "held" and result.head is not None:
        return result.head.status, result.body
    if result.kind == "stream_error" and reader is not None and reader.error is not None:
        return reader.error.status, reader.error.data
    return 0, b""


def is_answer(result: Result | None) -> bool:
    """A complete answer with a good status, or one that went out, or nobody there to have it."""
    if result is None:
        return False
    is_good = result.head is not None and result.head.status < 400
    return result.kind in ("sent", "gone") or (result.kind == "held" and is_good)


def timing_comment(x: Exchange) -> bytes:
    """The request's times as a comment block after the end of its stream (`x-gateway-timing: trailer`)."""
    timeline, reader = x.timeline, x.reader
    if reader is not None:
        timeline.event, timeline.token = reader.t_event, reader.t_token
        timeline.visible, timeline.last = reader.t_visible, reader.t_last
    segments = timeline.segments()
    fields = {f"{name}_ms": round(value / 1e6, 3) for name, value in segments._asdict().items()}
    total: dict[str, object] = {"request_id": x.request_id, "e2e_ms": round(segments.total / 1e6, 3)}
    for name, value in (("ttft_ms", timeline.ttft_ns), ("ttfv_ms", timeline.ttfv_ns)):
        if value is not None:
            total[name] = round(value / 1e6, 3)
    return b": timing " + orjson.dumps({**total, **fields}) + b"\n\n"

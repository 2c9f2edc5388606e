"""A plain request that goes up as a stream (`stream_upstream`): its tokens are seen and timed as they come, and the
caller gets the one JSON text that the server would have sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.complaints import nothing_came, too_large_to_assemble, unfinished
from gateway.relay import Relay, Result

if TYPE_CHECKING:
    from gateway.wire.assemble import Assembler

GATHERED_S: Final = 0.02  # for the end of the body behind the end of the stream; the caller waits for it


class GatheringRelay(Relay):
    """Holds everything until the answer is whole. `assembler` is set before it runs."""

    __slots__ = ("assembler",)
    assembler: Assembler

    def on_end(self, now: int) -> None:
        if self._state == "held" and self._head is not None and self._head.is_event_stream:
            self._gathered(now)
        else:
            super().on_end(now)

    def _hold_event(self, data: bytes, now: int) -> None:
        reader, assembler = self.reader, self.assembler
        reader.feed(data, now)
        if self._awaits_token and reader.t_token:
            self._note_token(now)
        self._held.clear()
        assembler.feed(data)
        if reader.error is not None:
            self._finish_unsent(Result("stream_error", self._head, reader.error.data), now, close=True)
        elif assembler.is_lost:
            self.fail(too_large_to_assemble(), now)
        elif reader.is_done:  # the end of the body is due; without it the connection is not used again
            self._exchange.timeline.end = now
            self._patience.call_later(GATHERED_S, self._stop_gathering)

    def _gathered(self, now: int) -> None:
        reader = self.reader
        reader.close(now)
        if reader.error is not None:
            self._finish_unsent(Result("stream_error", self._head, reader.error.data), now)
            return
        body = self.assembler.finish() if reader.is_finished else None
        if self.assembler.is_doubtful:  # a tool call was cut: a plain answer's own parser might have said less
            changes = self._attempt.changes
            changes[:] = ["stream=doubtful" if change == "stream=upstream" else change for change in changes]
        if body is None:
            self.fail(unfinished() if reader.events else nothing_came(), now)
        else:
            self._finish_unsent(Result("held", self._head, body), self._exchange.timeline.end or now)

    def _stop_gathering(self) -> None:
        connection = self._connection
        self._gathered(self._exchange.timeline.end)
        if connection is not None:
            connection.close()

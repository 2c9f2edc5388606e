"""The caller's side of a request that may outlive its connection.

    attached   everything passes straight through
    creating   the budget passed, and a store that replicas share is told of the request: the record is there before
               the 202 leaves (C122). A first token that comes meanwhile still goes out directly
    detached   the connection was answered 202, or is gone; what the request writes goes into its recording
    withdrawn  it could not be announced: the caller waits like anybody else, and hears heartbeats

Nothing was written before it is detached, so there is no moment in which both, or neither, would get the answer (C126).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.store.entry import StoreDown

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.exchange import Call, CallWatcher, Exchange
    from gateway.pending import PendingBook
    from gateway.recording import Recording
    from gateway.store.entry import Store
    from gateway.wire.headers import Headers


class HeldCall:
    """See the module. Implements `exchange.Call`, and watches the connection's own."""

    def __init__(self, call: Call, x: Exchange, book: PendingBook, recording: Recording) -> None:
        self._call = call
        self._x = x
        self._book = book
        self.recording = recording
        recording.call = self
        self.method = call.method
        self.path = call.path
        self.query = call.query
        self.headers: Headers = call.headers
        self.received_ns = call.received_ns
        self.body_ns = call.body_ns
        self.is_started = False
        self.stalled = False
        self.is_cancelled = False
        self.released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection has its answer, whichever it was."""
        self._watcher: CallWatcher | None = None
        self._is_attached = True
        self._is_withdrawn = False
        self._creating: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<HeldCall {'attached' if self._is_attached else 'detached'}>"

    @property
    def is_gone(self) -> bool:
        return self.is_cancelled or (self._is_attached and self.is_started and self._call.is_gone)

    @property
    def is_paused(self) -> bool:
        return self._is_attached and self._call.is_paused

    async def read_body(self, limit: int, take: Callable[[int], bool]) -> bytes:
        """Never: it was read before the call was held."""
        raise NotImplementedError

    def watch(self, watcher: CallWatcher | None) -> None:
        self._watcher = watcher
        if watcher is not None and self._is_attached:
            self._call.watch(self)

    # The connection, while attached

    def on_client_gone(self) -> None:
        """Opted in and gone: the request goes on, unless its answer was already going out to that connection."""
        if self._is_attached and not self.detach():
            self.stalled = self._call.stalled
            self._tell_gone()

    def on_client_paused(self) -> None:
        if self._watcher is not None and self._is_attached:
            self._watcher.on_client_paused()

    def on_client_resumed(self) -> None:
        if self._watcher is not None and self._is_attached:
            self._watcher.on_client_resumed()

    def _tell_gone(self) -> None:
        self.is_cancelled = True
        self.release()
        if self._watcher is not None:
            self._watcher.on_client_gone()

    # Detaching

    def detach(self) -> bool:
        """Frees the connection, with a 202 where somebody waits on it. False: it must stay, there is no room for a
        recording or the answer has begun."""
        if not self._is_attached:
            return True
        if self.is_started or self._is_withdrawn or not self._book.admit(self.recording):
            return False
        self._x.is_detached = True
        store, is_new = self._book.store, self._creating is None
        if self._call.is_gone:  # nobody waits for the 202, so nothing waits for the store
            self._leave()
        elif not store.is_shared:
            self._release_with_202()
        if store.is_shared and is_new:
            self._creating = self._book.spawn(self._create(store))
        return True

    async def announced(self) -> bool:
        """Whether its id may be told to somebody: other replicas can find it, or none are there."""
        if self._creating is not None:
            await asyncio.wait((self._creating,))
        return not self._is_attached

    async def _create(self, store: Store) -> None:
        try:
            await store.create(self.recording.entry)
        except StoreDown:
            if self._is_attached and not self.is_started and not self.is_cancelled:
                self._stay_attached()
            return  # detached: its caller is gone, and whoever asks here again finds it here
        if self._is_withdrawn:  # its first token came meanwhile: the answer went out directly
            store.finish(self.recording.entry)
        elif self.is_cancelled and self._is_attached:  # before anything was promised
            if not self.recording.is_running:
                store.finish(self.recording.entry)
        elif self._is_attached:
            self._release_with_202()
        elif self.recording.size or not self.recording.is_running:  # written before the store knew of it
            store.restore(self.recording.entry, self.recording.read(0))

    def _stay_attached(self) -> None:
        """Nobody else could answer for it: the caller waits on its connection, and hears heartbeats."""
        self._x.is_opted_in = False
        self._x.budget_action = "heartbeat"
        self._withdraw()
        if self._watcher is not None:
            self._watcher.on_client_resumed()

    def _withdraw(self) -> None:
        self._x.is_detached = False
        if self._x.outcome == "pending_done":
            self._x.outcome = "complete"
        self._is_withdrawn = True
        self._book.withdraw(self.recording)

    def _release_with_202(self) -> None:
        headers, body = self._book.announcement(self.recording, self._x)
        self._call.start(202, headers, len(body))
        self._call.write(body)
        self._call.end()
        self._leave()

    def _leave(self) -> None:
        self._is_attached = False
        self.release()
        if self._watcher is not None:
            self._watcher.on_client_resumed()  # a recording is never full

    def release(self) -> None:
        if not self.released.done():
            self.released.set_result(None)

    def cancel(self) -> None:
        """Somebody with the right to do so wants no answer any more."""
        if self._is_attached:
            self._call.abort()
        self._tell_gone()

    # Writing

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        self.is_started = True
        if not self._is_attached:
            self.recording.start(status, headers)
            self._book.store.update(self.recording.entry)
            return
        if self._x.is_detached:
            self._withdraw()
        self._call.start(status, headers, length)

    def flush(self) -> None:
        if self._is_attached:
            self._call.flush()

    def write(self, data: bytes) -> None:
        if self._is_attached:
            self._call.write(data)
        elif data and self.recording.is_running and not self.recording.is_full:
            if self._book.take(self.recording, data):
                self._book.store.append(self.recording.entry.id, data)
            else:
                self._tell_gone()

    def end(self, data: bytes = b"") -> None:
        if self._is_attached:
            self._call.end(data)
            self.release()
            return
        self.write(data)
        if self.recording.is_running and not self.recording.is_full:
            self.recording.entry.info["is_complete"] = True  # whatever went wrong is told inside
        self._book.end(self, self._x)

    def abort(self) -> None:
        if self._is_attached:
            self._call.abort()
            self.release()
        else:
            self._book.end(self, self._x)

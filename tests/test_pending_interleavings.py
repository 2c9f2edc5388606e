"""Every order in which budget, first token, store, cancel, leaving, end and expiry can meet, in virtual time (C126).

The request itself is a script on the side of the upstream; caller, store and clock are fakes that the test moves.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.config import Pending
from gateway.exchange import CallWatcher, Exchange
from gateway.held import HeldCall
from gateway.metrics import Metrics
from gateway.pending import PendingBook
from gateway.store.entry import Entry, StoreDown
from gateway.store.memory import MemoryStore
from gateway.web.pending import OwnResult, wait_for_end
from gateway.wire.headers import Headers
from tests.support.simlink import in_virtual_time, now_ns

CREATE_S = 3.0
BODY = b"answer"


class FakeCall:
    """A connection: what was written to it, and whether its client is there."""

    method, path, query = "POST", "/v1/chat/completions", b""
    received_ns = body_ns = 0
    is_paused = stalled = False

    def __init__(self) -> None:
        self.headers: Headers = []
        self.is_started = self.is_gone = self.is_aborted = False
        self.status = 0
        self.body = b""
        self.ends = 0
        self._watcher: CallWatcher | None = None

    async def read_body(self, limit: int, take: Any) -> bytes:
        raise NotImplementedError

    def watch(self, watcher: CallWatcher | None) -> None:
        self._watcher = watcher
        if watcher is not None and self.is_gone:
            watcher.on_client_gone()

    def leave(self) -> None:
        if not self.is_gone and not self.ends:
            self.is_gone = True
            if self._watcher is not None:
                self._watcher.on_client_gone()

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        assert not self.is_started, "two answers on one connection"
        self.is_started, self.status = True, status

    def flush(self) -> None:
        pass

    def write(self, data: bytes) -> None:
        assert not self.ends
        self.body += data

    def end(self, data: bytes = b"") -> None:
        self.write(data)
        self.ends += 1
        self._watcher = None

    def abort(self) -> None:
        self.is_aborted = True
        self.ends += 1


class FakeStore(MemoryStore):
    """A shared store whose announcement takes its time, and what it was told."""

    is_shared = True

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.states: list[str] = []
        self.data = bytearray()
        self.is_created = False

    async def create(self, entry: Entry) -> None:
        entry.size, entry.is_whole = 0, True
        await asyncio.sleep(CREATE_S)
        if self.fails:
            raise StoreDown("down")
        self.is_created = True

    def append(self, entry_id: str, data: bytes) -> None:
        if self.is_created:
            self.data += data

    def finish(self, entry: Entry) -> None:
        if self.is_created:
            self.states.append(entry.state)

    def restore(self, entry: Entry, data: bytes | None) -> None:
        assert data is not None
        self.data[:] = data
        if entry.state != "pending":
            self.states.append(entry.state)


class Request:
    """What a trial does, as far as its held call can see: it answers, or ends when nobody wants it."""

    def __init__(self, book: PendingBook) -> None:
        self.book = book
        self.call = FakeCall()
        self.x = Exchange(self.call)
        self.held: HeldCall = book.hold(self.call, self.x, None, b"{}", model="m")
        self.held.watch(self)
        self.is_over = False
        self.states: list[str] = []

    # as `Leaving` and `Trial` do

    def on_client_gone(self) -> None:
        if not self.is_over:
            self.x.settle("client_cancelled")
            self._over()

    def on_client_paused(self) -> None: ...
    def on_client_resumed(self) -> None: ...

    def _over(self) -> None:
        self.is_over = True
        self.book.end(self.held, self.x)
        self.note()

    def note(self) -> None:
        self.states.append(self.held.recording.entry.state)

    # what may happen

    def budget(self) -> None:
        if not self.is_over and not self.held.is_started:
            self.held.detach()

    def token(self) -> None:
        if not self.is_over and not self.held.is_started:
            self.held.start(200, [], None)
            self.held.write(BODY)

    def done(self) -> None:
        self.token()
        if not self.is_over:
            self.x.settle("complete")
            self.held.end()
            self._over()

    def gone(self) -> None:
        self.call.leave()

    def cancel(self) -> None:
        self.book.cancel(self.held.recording.entry.id)

    def retry(self) -> None:
        self.held.detach()


def book_of(store: MemoryStore, **limits: Any) -> PendingBook:
    return PendingBook(Pending(**limits), store, Metrics(CollectorRegistry()).pending, now_ns)


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


EVENTS = ("budget", "token", "done", "gone", "cancel")
ORDERS = [
    order
    for count in range(1, 6)
    for order in itertools.permutations(EVENTS, count)
    if "done" in order or "cancel" in order or "gone" in order
]


def failing_store() -> FakeStore:
    return FakeStore(fails=True)


STORES: dict[str, Callable[[], MemoryStore | FakeStore]] = {
    "memory": MemoryStore, "shared": FakeStore, "down": failing_store,
}  # fmt: skip


@pytest.mark.parametrize("kind", STORES)
@in_virtual_time
async def test_every_order_gives_exactly_one_answer_and_one_end(kind: str) -> None:
    """C126: {direct answer, promise}, never both, never neither; a promise reaches one terminal state and keeps it."""
    gaps = (0.0, 1.0) if kind == "memory" else (0.0, 1.0, CREATE_S)
    for order in ORDERS:
        for gap in gaps:
            store = STORES[kind]()
            book = book_of(store)
            request = Request(book)
            for event in order:
                getattr(request, event)()
                await asyncio.sleep(gap) if gap else await settle()
            await asyncio.sleep(CREATE_S)
            request.done()
            await asyncio.sleep(CREATE_S)
            check(request, store, (kind, order, gap))


def check(request: Request, store: MemoryStore, what: object) -> None:
    call, recording, book = request.call, request.held.recording, request.book
    assert request.is_over, what
    assert request.held.released.done(), what
    assert book.running == 0, what
    assert not book._running, what
    assert (recording.call, recording.describe) == (None, None), what
    if call.status == 202:
        assert (call.body != b"", call.ends) == (True, 1), what
        assert BODY not in call.body, what
    is_promised = book.find(recording.entry.id) is not None
    if is_promised:
        assert recording.entry.state in ("done", "cancelled"), what
        assert call.status in (0, 202), what  # 0: it left before its 202
        assert recording.read(0) == (BODY if recording.entry.state == "done" else recording.read(0)), what
        assert request.states.count("pending") == 0, what
    else:
        assert call.status != 202, what
        assert call.status == 200 or call.is_gone or call.is_aborted or request.held.is_cancelled, what
    if isinstance(store, FakeStore) and store.is_created:
        assert store.states[:1] == [recording.entry.state], what
        assert set(store.states) == {recording.entry.state}, what
        if recording.entry.state == "done":
            assert bytes(store.data) == recording.read(0), what
    gauge = book._meters.running.value
    assert gauge == 0, what


@pytest.mark.parametrize("offset", [-0.001, 0.0, 0.001])
@pytest.mark.parametrize("kind", STORES)
@in_virtual_time
async def test_the_first_token_meets_the_announcement(kind: str, offset: float) -> None:
    """Store create × first token: direct before its end, recorded after it."""
    store = STORES[kind]()
    request = Request(book_of(store))
    request.budget()
    await asyncio.sleep(CREATE_S + offset)
    request.done()
    await asyncio.sleep(CREATE_S)
    check(request, store, (kind, offset))
    is_direct = kind == "down" or (kind == "shared" and offset < 0)
    if offset or kind != "shared":
        assert request.call.status == (200 if is_direct else 202)
    assert request.x.outcome == ("complete" if request.call.status == 200 else "pending_done")


@in_virtual_time
async def test_a_store_that_is_down_leaves_the_caller_where_it_was() -> None:
    """G2: the caller waits and hears heartbeats; from then on its leaving is a leaving."""
    request = Request(book_of(FakeStore(fails=True)))
    request.budget()
    assert request.x.is_detached  # no heartbeat while it is undecided
    await asyncio.sleep(CREATE_S + 1)
    assert (request.x.is_detached, request.x.is_opted_in, request.x.budget_action) == (False, False, "heartbeat")
    assert not request.held.detach()
    request.gone()
    assert request.x.outcome == "client_cancelled"
    assert request.book.running == 0


@pytest.mark.parametrize("offset", [-2.0, -0.001, 0.0, 0.001, 2.0])
@in_virtual_time
async def test_a_poll_meets_the_end_and_the_expiry(offset: float) -> None:
    """Expiry × poll: whoever found the result has it whole, later ones are told that it is gone."""
    book = book_of(MemoryStore(), ttl_s=5)
    request = Request(book)
    request.budget()
    entry_id = request.held.recording.entry.id
    found = OwnResult(request.held.recording)
    polling = asyncio.ensure_future(wait_for_end(found, 60))
    await asyncio.sleep(10)
    request.done()
    await polling
    assert (found.entry.state, await found.read(0)) == ("done", BODY)
    await asyncio.sleep(5 + offset)
    before = book.find(entry_id)
    assert before is not None
    book.sweep()
    assert (book.find(entry_id) is None) == (offset > 0)
    assert book.is_expired(entry_id, "") == (offset > 0)
    assert not book.is_expired(entry_id, "other")
    assert before.read(0) == BODY
    assert (book.bytes == 0) == (offset > 0)


@pytest.mark.parametrize("order", list(itertools.permutations(("done", "cancel", "expire", "poll"))))
@in_virtual_time
async def test_completion_cancel_expiry_and_poll_in_every_order(order: tuple[str, ...]) -> None:
    """C126: done is never overwritten, and a poll always ends."""
    book = book_of(MemoryStore(), ttl_s=1)
    request = Request(book)
    request.budget()
    recording = request.held.recording
    seen: list[str] = []
    polls: list[asyncio.Future[None]] = []
    for event in order:
        if event == "poll":
            polls.append(asyncio.ensure_future(wait_for_end(OwnResult(recording), 60)))
        elif event == "expire":
            await asyncio.sleep(2)
            book.sweep()
        else:
            getattr(request, event)()
        seen.append(recording.entry.state)
    await asyncio.gather(*polls)
    ends = [state for state in seen if state != "pending"]
    assert len(set(ends)) == 1
    assert ends[0] == ("done" if order.index("done") < order.index("cancel") else "cancelled")
    assert book.running == 0

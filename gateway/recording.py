"""One answer that its caller comes back for: what was promised, what came so far, how it ended.

Written by the request's own task through `held.HeldCall`, read by any number of pollers and followers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.held import HeldCall
    from gateway.store.entry import Entry, State
    from gateway.wire.headers import Headers

NEVER_KEPT: Final = frozenset((b"set-cookie", b"set-cookie2"))  # secrets of one connection; others may read a store


class Recording:
    """See the module. Its end is decided once; the first word counts (C126).

    `size` is counted here: `Entry.size` belongs to the store, which may be behind, or hold nothing.
    """

    __slots__ = ("_data", "_waiters", "call", "describe", "ended_ns", "entry", "is_full", "max_bytes")

    def __init__(self, entry: Entry, *, max_bytes: int) -> None:
        self.entry = entry
        self.max_bytes = max_bytes
        self.describe: Callable[[], dict[str, object]] | None = None
        """What is known of the running request: phase, estimates. None once it is over."""
        self.call: HeldCall | None = None
        self.ended_ns = 0
        self.is_full = False
        """More came than may be kept: what is here is a beginning, and nothing is added to it."""
        self._data = bytearray()
        self._waiters: dict[asyncio.Future[None], int] = {}  # how many bytes each of them knows

    def __repr__(self) -> str:
        return f"<Recording {self.entry.state}, {self.size} bytes>"

    @property
    def size(self) -> int:
        """Bytes of the answer so far."""
        return len(self._data)

    @property
    def is_running(self) -> bool:
        return self.entry.state == "pending"

    def start(self, status: int, headers: Headers) -> None:
        """The upstream's own answer began."""
        if self.is_running:
            self.entry.status = status
            self.entry.headers = [field for field in headers if field[0] not in NEVER_KEPT]

    def append(self, data: bytes) -> bool:
        """More of the answer. False: it is larger than one result may be, and nothing was added."""
        if self.is_full or self.size + len(data) > self.max_bytes:
            self.is_full = True
            return False
        self._data += data
        self._wake()
        return True

    def finish(self, state: State, now: int, error: dict[str, object] | None = None) -> bool:
        """The end. False: it had ended before, and nothing changes."""
        if not self.is_running:
            return False
        self.entry.state = state
        self.entry.error = error
        self.ended_ns = now
        self.let_go()
        self._wake()
        return True

    def let_go(self) -> None:
        """The request is over: it and its recording held each other."""
        self.describe = self.call = None

    def read(self, offset: int) -> bytes:
        """Everything from `offset` on."""
        return bytes(memoryview(self._data)[offset:])

    async def wait(self, size: int, timeout_s: float) -> None:
        """Returns when there is more than `size` bytes, the end, or the time is over."""
        if self.size > size or not self.is_running:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = size
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._waiters.pop(waiter, None)

    def _wake(self) -> None:
        for waiter, size in self._waiters.items():
            if (self.size > size or not self.is_running) and not waiter.done():
                waiter.set_result(None)

"""The store of several replicas: a Valkey or Redis server, over `valkey`'s asyncio client.

Four parts: `link` sends commands and is the breaker; `mirror` is what the store knows and should know about our own
entries; `listening` hears of changes; this file puts them together and answers for the entries of others.

Leases: every process renews one key each second. Readers that find an entry running without a lease write its end as
failed, once and for all, so that no two of them say different things. A paused store lets leases end although their
owners live, so after an outage they get the time of one long reconnect before anybody judges them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeVar

from gateway import config
from gateway.store import keys
from gateway.store.entry import Entry, StoreDown, decode, encode
from gateway.store.link import CONNECT_S, LONGEST_PAUSE_S, Command, Link
from gateway.store.listening import Listening
from gateway.store.mirror import Mirror

log = logging.getLogger("gateway.store")

T = TypeVar("T")

LEASE_S: Final = 3.5  # with a look each second, "replica_lost" is told within 5 s of a replica's death
GRACE_S: Final = LONGEST_PAUSE_S + CONNECT_S  # after an outage, until everybody has reconnected
LOOK_EVERY_S: Final = 1.0  # waiting does not depend on messages alone
FLUSH_EVERY_S: Final = 0.05  # a stream's chunks of this time become one write, so a follower elsewhere is that late
READ_BYTES: Final = 256 * 1024  # one read at most; far below what 50 ms allow
CLOSE_S: Final = 0.5
MARK_S: Final = 24 * 3600
AGAIN_AFTER_S: Final = 1.0
_REPLICA_LOST: Final[dict[str, object]] = {
    "reason": "replica_lost",
    "message": "the gateway that ran this request is gone; send the request again",
}
_RESULT_LOST: Final[dict[str, object]] = {
    "reason": "store_lost",
    "message": "the shared store no longer has the whole answer; send the request again",
}


class ValkeyStore:
    """Satisfies `Store`.

    Raises:
        StoreUnusable: the package `valkey` is missing, or the address cannot be one.
    """

    is_shared = True

    def __init__(self, address: str, limits: config.Pending) -> None:
        self.replica = secrets.token_hex(8)
        self.on_cancel: Callable[[str], None] | None = None
        self.on_state: Callable[[bool], None] | None = None
        self.on_damaged: Callable[[str], None] | None = None
        self._ttl_ms = int(limits.ttl_s * 1000)
        self._link = Link(address)
        self._link.on_change = self._state_changed
        self._mirror = Mirror(limits)
        self._listening = Listening(self._link, self.replica, self._cancel_asked)
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._mark = 0  # the last one that the store acknowledged
        self._renewed_at = 0.0

    def __repr__(self) -> str:
        return f"ValkeyStore({self.replica}, {self._link!r}, {self._mirror!r})"

    @property
    def is_up(self) -> bool:
        """False while every call fails at once."""
        return self._link.is_up

    async def open(self) -> None:
        """Starts connecting, and waits for the first attempt's end, whatever it was (G1)."""
        loop = asyncio.get_running_loop()
        self._renewed_at = loop.time()
        work = {"keep": self._keep, "write": self._write, "listen": self._listening.run}
        self._tasks = [loop.create_task(_for_ever(run), name=f"store-{name}") for name, run in work.items()]
        await self._link.tried.wait()
        if not self.is_up:
            self._state_changed(False)

    async def close(self) -> None:
        """Writes what is queued and gives the lease back, within half a second."""
        try:
            async with asyncio.timeout(CLOSE_S):
                while self.is_up and not self._mirror.is_written:
                    await self._flush()
                news: list[Command] = [
                    ("PUBLISH", keys.changed_channel(entry_id), "") for entry_id in self._mirror.running()
                ]
                await self._link.run(("DEL", keys.lease_key(self.replica), keys.mark_key(self.replica)), *news)
        except (StoreDown, TimeoutError):
            pass
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._link.close()

    async def create(self, entry: Entry) -> None:
        """Announces an entry, with the lease that vouches for it."""
        if not self.is_up:
            raise StoreDown("the store is down")
        commands = [self._lease(), self._mirror.add(entry)]
        if entry.fingerprint:
            commands.append(("SET", keys.same_key(entry.fingerprint), entry.id, "PX", self._ttl_ms))
        is_created = False
        try:
            _, reply, *_ = await self._link.run(*commands)
            is_created = reply == 0
        finally:
            if is_created:
                self._mirror.created(entry.id)
            else:
                self._mirror.abandon(entry.id)
            self._work.set()
        if not is_created:
            raise StoreDown("the store did not take the entry")

    def append(self, entry_id: str, data: bytes) -> None:
        """Queues more bytes of the answer."""
        if self._mirror.append(entry_id, data):
            self._work.set()

    def update(self, entry: Entry) -> None:
        """Queues news."""
        if self._mirror.update(entry):
            self._work.set()

    def finish(self, entry: Entry) -> None:
        """Queues the end."""
        if self._mirror.finish(entry):
            self._work.set()

    def restore(self, entry: Entry, data: bytes | None) -> None:
        """Queues the whole entry again."""
        self._mirror.restore(entry, data)
        self._work.set()

    async def get(self, entry_id: str) -> Entry | None:
        """The entry as it is now. One whose owner is gone is failed from here on."""
        entry = await self._load(entry_id)
        if entry is None or entry.state != "pending" or not await self._is_lost(entry):
            return entry
        lost = replace(entry, state="failed", error=_REPLICA_LOST)
        await self._link.run(
            ("HSETNX", keys.entry_key(entry_id), "end", encode(lost)),  # the owner may have ended it just now
            ("PEXPIRE", keys.entry_key(entry_id), self._ttl_ms),
            ("PEXPIRE", keys.data_key(entry_id), self._ttl_ms),
            ("PUBLISH", keys.changed_channel(entry_id), ""),
        )
        return await self._load(entry_id)

    async def read(self, entry_id: str, offset: int, limit: int) -> bytes:
        """Up to 256 KiB of the answer."""
        if limit <= 0:
            return b""
        last = offset + min(limit, READ_BYTES) - 1
        (reply,) = await self._link.run(("GETRANGE", keys.data_key(entry_id), offset, last))
        return reply if isinstance(reply, bytes) else b""

    async def wait(self, entry_id: str, size: int, timeout_s: float) -> None:
        """Waits for a message, and looks once a second in case it got lost."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        with self._listening.events(entry_id) as event:
            await self._listening.subscribe(entry_id)
            while True:
                event.clear()
                entry = await self.get(entry_id)
                left_s = ends_at - loop.time()
                if entry is None or entry.state != "pending" or entry.size > size or left_s <= 0:
                    return
                try:
                    async with asyncio.timeout(min(left_s, LOOK_EVERY_S)):
                        await event.wait()
                except TimeoutError:
                    pass

    async def cancel(self, entry_id: str) -> bool:
        """Leaves the wish where the owner looks each second, and tells it at once."""
        entry = await self.get(entry_id)
        if entry is None or entry.state != "pending":
            return False
        if entry.replica == self.replica:
            self._cancel_asked(entry_id)
            return True
        wishes = keys.cancels_key(entry.replica)
        await self._link.run(
            ("SADD", wishes, entry_id),
            ("PEXPIRE", wishes, self._ttl_ms),
            ("PUBLISH", keys.cancel_channel(entry.replica), entry_id),
        )
        return True

    async def find(self, fingerprint: str) -> str | None:
        """The last entry with this fingerprint, if it still runs."""
        if not fingerprint:
            return None
        (reply,) = await self._link.run(("GET", keys.same_key(fingerprint)))
        if not isinstance(reply, bytes):
            return None
        entry = await self.get(reply.decode("utf-8", "replace"))
        return entry.id if entry is not None and entry.state == "pending" else None

    async def _load(self, entry_id: str) -> Entry | None:
        hash_, size = await self._link.run(("HGETALL", keys.entry_key(entry_id)), ("STRLEN", keys.data_key(entry_id)))
        if not isinstance(hash_, dict):
            return None
        entry = decode(entry_id, hash_.get(b"end")) or decode(entry_id, hash_.get(b"record"))
        if entry is None:
            return None
        stored = size if isinstance(size, int) else 0
        if entry.state == "done" and stored < entry.size:  # the server dropped it for want of memory
            entry.state, entry.error = "failed", dict(_RESULT_LOST)
        entry.size = stored
        return entry

    async def _is_lost(self, entry: Entry) -> bool:
        if entry.replica == self.replica:
            return False
        (has_lease,) = await self._link.run(("EXISTS", keys.lease_key(entry.replica)))
        up_since = self._link.up_since
        in_grace = up_since > 0 and asyncio.get_running_loop().time() - up_since < GRACE_S
        return has_lease == 0 and not in_grace

    async def _keep(self) -> None:
        await self._link.keep(self._beat)

    async def _beat(self) -> None:
        """Renews the lease, hears what got lost on the way, and finds out whether the store forgot something."""
        wishes, mark = keys.cancels_key(self.replica), keys.mark_key(self.replica)
        _, before, _, cancels = await self._link.probe(
            self._lease(), ("GET", mark), ("SET", mark, self._mark + 1, "EX", MARK_S), ("SMEMBERS", wishes)
        )
        if self._mark and before not in (str(self._mark).encode(), str(self._mark + 1).encode()):
            self._mirror.forgotten()  # it was emptied, or is an older copy (G5)
        self._mark += 1
        if isinstance(cancels, (set, list)) and cancels:
            for entry_id in cancels:
                self._cancel_asked(entry_id.decode("utf-8", "replace"))
            await self._link.probe(("SREM", wishes, *cancels))
        await self._listening.tidy()
        self._look_after_own()

    def _look_after_own(self) -> None:
        now = asyncio.get_running_loop().time()
        self._mirror.expire(now)
        if now - self._renewed_at > self._mirror.renew_every_s:
            self._renewed_at = now
            self._mirror.renew()
        self._work.set()

    async def _write(self) -> None:
        """Writes what is queued whenever the store is up, for ever."""
        while True:
            await self._work.wait()
            await self._link.came_up.wait()
            self._work.clear()
            self._have_restored()
            try:
                while not self._mirror.is_written:
                    await self._flush()
                    self._have_restored()
            except StoreDown:
                self._work.set()
            await asyncio.sleep(FLUSH_EVERY_S)

    async def _flush(self) -> None:
        batch = self._mirror.batch()
        if not batch.commands:
            return
        try:
            replies = await self._link.run(*batch.commands)
        except BaseException:
            self._mirror.refuse(batch)
            raise
        self._mirror.acknowledge(batch, replies, asyncio.get_running_loop().time())

    def _have_restored(self) -> None:
        """Asks the owner for what the store lost, as far as the queue has room."""
        while (entry_id := self._mirror.next_damaged()) is not None:
            if self.on_damaged is None:
                self._mirror.give_up(entry_id)
            else:
                _call(self.on_damaged, entry_id)

    def _lease(self) -> Command:
        return ("SET", keys.lease_key(self.replica), "1", "PX", int(LEASE_S * 1000))

    def _cancel_asked(self, entry_id: str) -> None:
        if self.on_cancel is not None and self._mirror.cancelled(entry_id):
            _call(self.on_cancel, entry_id)

    def _state_changed(self, is_up: bool) -> None:
        if self.on_state is not None:
            _call(self.on_state, is_up)


def _call(callback: Callable[[T], None], argument: T) -> None:
    try:
        callback(argument)
    except Exception:  # the owner's mistake must not end our loops
        log.exception("a callback of the store failed")


async def _for_ever(run: Callable[[], Awaitable[None]]) -> None:
    """Starts the work again should it ever fail by a mistake of ours."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("the store's work in the background failed")
        await asyncio.sleep(AGAIN_AFTER_S)

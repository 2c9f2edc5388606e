"""News from other replicas: which entries changed, which of ours somebody wants stopped.

Messages are a short cut and nothing more. They may get lost with the connection, so whoever waits looks for himself
once a second, and cancel requests also lie in a set that the owner reads with every beat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from gateway.store import keys
from gateway.store.entry import StoreDown
from gateway.store.link import COMMAND_S, Link

if TYPE_CHECKING:
    from valkey.asyncio.connection import AbstractConnection

AGAIN_AFTER_S: Final = 0.2
_CHANGED: Final = keys.changed_channel("").encode()


class Listening:
    """One connection for all subscriptions of this process."""

    def __init__(self, link: Link, replica: str, on_cancel: Callable[[str], None]) -> None:
        self._link = link
        self._cancels = keys.cancel_channel(replica)
        self._on_cancel = on_cancel
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._subscribed: set[str] = set()
        self._connection: AbstractConnection | None = None

    async def run(self) -> None:
        """Listens whenever the store is up, for ever."""
        while True:
            await self._link.came_up.wait()
            try:
                await self._listen()
            except StoreDown:
                pass
            await asyncio.sleep(AGAIN_AFTER_S)

    @contextmanager
    def events(self, entry_id: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever the entry may have changed."""
        event = asyncio.Event()
        waiting = self._waiting.setdefault(entry_id, set())
        waiting.add(event)
        try:
            yield event
        finally:
            waiting.discard(event)
            if not waiting and self._waiting.get(entry_id) is waiting:
                del self._waiting[entry_id]

    async def subscribe(self, entry_id: str) -> None:
        """Asks for messages about an entry; without a connection for them nothing happens."""
        if entry_id not in self._subscribed and self._connection is not None:
            self._subscribed.add(entry_id)
            await self._tell(self._connection, "SUBSCRIBE", entry_id)

    async def tidy(self) -> None:
        """Ends subscriptions that nobody waits for."""
        idle = [entry_id for entry_id in self._subscribed if entry_id not in self._waiting]
        if idle and self._connection is not None:
            self._subscribed.difference_update(idle)
            await self._tell(self._connection, "UNSUBSCRIBE", *idle)

    async def _tell(self, connection: AbstractConnection, verb: str, *ids: str) -> None:
        try:
            await self._send(connection, verb, *map(keys.changed_channel, ids))
        except StoreDown:
            pass  # `_listen` notices and starts over

    async def _listen(self) -> None:
        connection = await self._link.connection()
        try:
            self._subscribed = set(self._waiting)
            channels = [self._cancels, *map(keys.changed_channel, self._subscribed)]
            await self._send(connection, "SUBSCRIBE", *channels)
            self._connection = connection
            for entry_id in list(self._waiting):
                self._notify(entry_id)  # what was said while nobody listened
            while True:
                self._receive(await connection.read_response(timeout=None))
        except StoreDown:
            raise
        except Exception as error:  # noqa: BLE001  whatever a library makes of a broken stream
            raise StoreDown(type(error).__name__) from None
        finally:
            self._connection = None
            self._subscribed = set()
            await self._link.drop(connection)

    async def _send(self, connection: AbstractConnection, *command: str) -> None:
        try:
            async with asyncio.timeout(COMMAND_S):
                await connection.send_command(*command)
        except Exception as error:  # noqa: BLE001
            await self._link.drop(connection)  # ends `_listen`, which starts over
            raise StoreDown(type(error).__name__) from None

    def _receive(self, reply: object) -> None:
        match reply:
            case [b"message", bytes(channel), bytes(data)]:
                if channel.startswith(_CHANGED):
                    self._notify(channel[len(_CHANGED) :].decode("utf-8", "replace"))
                else:
                    self._on_cancel(data.decode("utf-8", "replace"))
            case _:
                pass  # confirmations

    def _notify(self, entry_id: str) -> None:
        for event in self._waiting.get(entry_id, ()):
            event.set()

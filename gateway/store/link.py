"""The connection to a Valkey or Redis server, with a breaker of its own.

Every command is bounded to 50 ms (fault-catalogue G2–G4). After the first that fails, all others fail at once
until a write has gone through again; a write, because a server may answer reads while it refuses writes
(READONLY, OOM; G5, G6). One probe follows a failure immediately, so that a single hiccup costs nobody anything and
writes no line; later ones back off with jitter, and the second failure in a row is told once per outage.

All connections are thrown away with a failure: a late answer must never be read as that to the next command (G4).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from gateway.store.entry import StoreDown, StoreUnusable

if TYPE_CHECKING:
    from valkey.asyncio import Valkey
    from valkey.asyncio.connection import AbstractConnection, ConnectionPool

log = logging.getLogger("gateway.store")

Command = tuple[str | bytes | int, ...]

COMMAND_S: Final = 0.05  # fault-catalogue G2, G3
CONNECT_S: Final = 1.0  # TCP, TLS and AUTH, in the background, where nobody waits
BEAT_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 2.0  # G5: at most 5 s degraded
CALM_S: Final = 10.0  # failures nearer to each other than this are one outage
MAX_CONNECTIONS: Final = 64
_MISSING_PACKAGE: Final = "the setting `store` needs the package `valkey`; hint: pip install 'firsttoken[valkey]'"


class Link:
    """Sends commands, or says at once that it cannot."""

    def __init__(self, address: str) -> None:
        self.is_up = False
        self.up_since = 0.0  # loop time of the last recovery; 0 while there was none
        self.on_change: Callable[[bool], None] | None = None
        self.tried = asyncio.Event()  # set after the first attempt to connect, however it ended
        self.came_up = asyncio.Event()
        self._pool_of = _pools(address, self._prepare)
        self._client: Valkey | None = None
        self._connections: set[AbstractConnection] = set()  # all that were made and not thrown away
        self._failed_at = -CALM_S
        self._failures = 0
        self._has_warned = False
        self._has_told_end = False
        self._has_been_up = False
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"Link({'up' if self.is_up else 'down'}, {self._failures} failures of late)"

    async def run(self, *commands: Command) -> list[object]:
        """The reply to each command, sent together. A wrong type under a key is a reply too, as the exception.

        Raises:
            StoreDown: at once while the store counts as down, else after 50 ms at the latest.
        """
        if not self.is_up:
            raise StoreDown("the store is down")
        return await self.probe(*commands)

    async def probe(self, *commands: Command) -> list[object]:
        """As `run`, also while the store counts as down. For the beat, whose success ends an outage."""
        client = self._client
        if client is None:
            raise StoreDown("the store is not connected")
        try:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            async with asyncio.timeout(COMMAND_S):
                replies: list[object] = await pipeline.execute(raise_on_error=False)
        except Exception as error:  # noqa: BLE001  whatever a library makes of a broken stream is an outage to us
            raise self._note_failure(client, error) from None
        for reply in replies:
            if isinstance(reply, Exception) and not is_wrong_type(reply):
                raise self._note_failure(client, reply)
        return replies

    async def keep(self, beat: Callable[[], Awaitable[None]]) -> None:
        """Runs `beat` every second, and again and again after a failure until it goes through. For ever."""
        while True:
            await self._discard()
            self._wake.clear()
            try:
                if self._client is None:
                    await self._connect()
                await beat()
                self._note_success()
            except StoreDown:
                pass
            self.tried.set()
            await self._pause()

    async def close(self) -> None:
        """Drops every connection."""
        self._client = None
        self._switch(False)
        await self._discard(even_current=True)

    async def connection(self) -> AbstractConnection:
        """One more connection, for subscriptions. The caller gives it to `drop`.

        Raises:
            StoreDown: it could not be made; this alone counts as no failure.
        """
        client = self._client
        if client is None:
            raise StoreDown("the store is not connected")
        connection: AbstractConnection = client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(CONNECT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001
            raise StoreDown(_describe(error)) from None
        return connection

    async def drop(self, connection: AbstractConnection) -> None:
        """Throws one connection away at once, whatever it still had to say."""
        self._connections.discard(connection)
        writer: asyncio.StreamWriter | None = connection._writer  # the library offers no way to abort
        if writer is not None:
            writer.transport.abort()  # a paused server would keep a close waiting for unsent bytes
        await connection.disconnect(nowait=True)

    async def _connect(self) -> None:
        from valkey.asyncio import Valkey

        client = Valkey(connection_pool=self._pool_of())
        self._client = client
        try:
            async with asyncio.timeout(CONNECT_S):
                await client.execute_command("PING")  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001
            raise self._note_failure(client, error) from None

    async def _prepare(self, connection: AbstractConnection) -> None:
        """Greets the server on a new connection. One that is given up in between must not be used again (G4)."""
        self._connections.add(connection)
        try:
            await connection.on_connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise

    def _note_failure(self, client: Valkey, error: Exception) -> StoreDown:
        if client is self._client:  # the others were cut off by the first
            self._client = None
            now = asyncio.get_running_loop().time()
            self._failures = self._failures + 1 if now - self._failed_at < CALM_S else 1
            self._failed_at = now
            self._switch(False)
            self._wake.set()
            if self._failures > 1 and not self._has_warned:
                self._has_warned = True
                log.warning("the store is down: %s; pending answers are not shared meanwhile", _describe(error))
        return StoreDown(_describe(error))

    def _note_success(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._failed_at >= CALM_S:
            self._has_warned = self._has_told_end = False
        elif self._has_warned and not self._has_told_end:
            self._has_told_end = True
            log.info("the store answers again")
        if not self.is_up and self._client is not None:  # a call may have failed while the beat ended
            self.up_since = now if self._has_been_up else 0.0
            self._has_been_up = True
            self._switch(True)

    def _switch(self, is_up: bool) -> None:
        if is_up == self.is_up:
            return
        self.is_up = is_up
        if is_up:
            self.came_up.set()
        else:
            self.came_up.clear()
        if self.on_change is not None:
            self.on_change(is_up)

    async def _pause(self) -> None:
        if self.is_up:
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                return
        if self._failures > 1:  # the first failure is probed at once
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures - 2, 8))
            await asyncio.sleep(pause * random.uniform(0.5, 1))

    async def _discard(self, *, even_current: bool = False) -> None:
        if self._client is not None and not even_current:
            return
        for connection in list(self._connections):
            await self.drop(connection)


def is_wrong_type(reply: object) -> bool:
    """Something foreign lies under the key (G7). Older servers wrap the word when a script meets it."""
    return isinstance(reply, Exception) and "WRONGTYPE" in str(reply)


def _describe(error: Exception) -> str:
    """What went wrong, without addresses: the library's texts hold them, and an address may hold a password."""
    text = str(error)
    first = text.split(" ", 1)[0]
    code = f" ({first})" if first.isupper() and first.isalpha() else ""
    return f"{type(error).__name__}{code}"


def _pools(address: str, prepare: Callable[[AbstractConnection], Awaitable[None]]) -> Callable[[], ConnectionPool]:
    """A maker of connection pools; the address is looked at here, so that a wrong one is told at start.

    Raises:
        StoreUnusable: it cannot work.
    """
    try:
        from valkey.asyncio.connection import ConnectionPool
    except ImportError:
        raise StoreUnusable(_MISSING_PACKAGE) from None
    scheme, colon, rest = address.partition(":")
    url = {"redis": "valkey", "rediss": "valkeys"}.get(scheme, scheme) + colon + rest

    def make() -> ConnectionPool:
        return ConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            socket_timeout=None,  # ours is around every command
            lib_name=None,  # two round trips less per connection, and older servers know no CLIENT SETINFO
            lib_version=None,
            valkey_connect_func=prepare,
        )

    try:
        make().make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError) as error:
        raise StoreUnusable(f"the setting `store` is no address of a Valkey: {type(error).__name__}") from None
    return make

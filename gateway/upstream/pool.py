"""Keep-alive connections to one model server.

Newest idle connection first (LIFO), so that the rest age out; idle ones are closed before the server would
(vLLM: 5 s), which is what makes the sporadic 502 after a quiet moment go away. A permit is held from `acquire`
to `release`, `discard` or the cancellation of either, whatever happens in between: cancelled requests are the
common case here, and a slot that does not come back is an outage some hours later (C020). A permit that comes back
goes straight to whoever waits, so one is free only while nobody waits, and a newcomer cannot slip in between.

Happy eyeballs are `aiohappyeyeballs`' (uvloop has none). No proxy variables, no redirects: there is no code for them.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import aiohappyeyeballs

from gateway.config import Upstream
from gateway.errors import Overloaded, UpstreamUnavailable
from gateway.policy.queueing import WaitQueue
from gateway.upstream.connection import Clock, UpstreamConnection, describe_connect_error

NS = 1_000_000_000
HAPPY_EYEBALLS_DELAY_S = 0.25  # RFC 8305
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 30, 10, 3  # a vanished peer is noticed after a minute
TLS_HANDSHAKE_S = 5.0
TCP_INFO_RTT = 68  # offset of `tcpi_rtt` (µs) in Linux's struct tcp_info

Connect = Callable[[Callable[[], UpstreamConnection], Upstream], Awaitable[UpstreamConnection]]


class PoolMeters(Protocol):
    """What the pool reports; see metrics.py."""

    def connected(self, *, reused: bool) -> None: ...
    def connect_failed(self) -> None: ...
    def connections(self, idle: int, busy: int, connecting: int) -> None: ...


@dataclass(slots=True)
class Lease:
    """A connection in use, with what getting it cost (monotonic ns)."""

    connection: UpstreamConnection
    is_reused: bool
    wait_ns: int  # for a slot
    connect_start: int = 0  # DNS, TCP and TLS lie between these; both 0 when reused
    connect_end: int = 0


class Pool:
    """All connections to one upstream."""

    def __init__(
        self, name: str, upstream: Upstream, *, clock: Clock, meters: PoolMeters, connect: Connect | None = None
    ) -> None:
        self.name = name
        self.upstream = upstream
        self._clock = clock
        self._meters = meters
        self._connect = connect or Dialer(upstream).connect
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()
        self._connecting = 0
        self._leases = 0
        wanted = upstream.max_inflight or upstream.max_connections
        self._capacity = min(upstream.max_connections, wanted)
        self._waiting: WaitQueue[asyncio.Future[bool]] = WaitQueue(
            wanted if upstream.max_queue is None else upstream.max_queue
        )
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return (
            f"<Pool {self.name}: {self._leases} in use, {len(self._idle)} idle, "
            f"{self._connecting} connecting, {len(self._open)} open, {len(self._waiting)} queued>"
        )

    @property
    def leases(self) -> int:
        """Permits held: requests that have, or are getting, a connection."""
        return self._leases

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def queued(self) -> int:
        """Requests that wait for a permit."""
        return len(self._waiting)

    @property
    def capacity(self) -> int:
        """Permits there are: `max_inflight`, and never more than `max_connections`."""
        return self._capacity

    @property
    def is_full(self) -> bool:
        """Whether the next request has to wait."""
        return self._leases >= self._capacity

    async def acquire(
        self, *, fresh: bool = False, timeout_s: float | None = None, wait_limit_s: float | None = None
    ) -> Lease:
        """A connection, reused if possible and unless `fresh`.

        `timeout_s` bounds the connecting (default: none), `wait_limit_s` the wait for a slot where it is shorter than
        the upstream's `max_queue_wait_ms`: it is what the caller's deadline leaves. Raises `Overloaded` without a slot,
        at once (`queue_full`) or after the wait (`queue_timeout`), and `UpstreamUnavailable` when connecting fails.
        Cancelling it gives everything back.
        """
        began = self._clock()
        if self._leases < self._capacity:
            self._leases += 1
        else:
            await self._wait_for_permit(wait_limit_s)
        try:
            waited = self._clock() - began
            if not fresh and (connection := self._take_idle()) is not None:
                self._meters.connected(reused=True)
                self._report()
                return Lease(connection, is_reused=True, wait_ns=waited)
            if len(self._open) >= self.upstream.max_connections and self._idle:
                self._idle.pop(0).close()
            started = self._clock()
            connection = await self._open_connection(timeout_s)
            return Lease(connection, False, waited, started, self._clock())
        except BaseException:
            self._give_back()
            raise

    def release(self, lease: Lease) -> None:
        """The exchange is over: a connection that ended cleanly is kept, any other closed."""
        connection = lease.connection
        if (
            connection.can_reuse
            and not self._is_closed
            and self.upstream.keep_alive_s > 0
            and not self._is_old(connection)
        ):
            connection.detach()
            self._idle.append(connection)
            if self._sweep is None:
                self._arm_sweep()
        else:
            connection.close()
        self._give_back()

    def discard(self, lease: Lease) -> None:
        """Like `release`, and the connection is closed whatever its state."""
        lease.connection.close()
        self._give_back()

    def close(self) -> None:
        """Closes idle connections now and those in use when they come back."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._report()

    def abort(self) -> None:
        """Closes everything, also what is in use: the process ends."""
        self.close()
        for connection in list(self._open):
            connection.close()

    async def _wait_for_permit(self, wait_limit_s: float | None) -> None:
        """Returns with a permit that is counted already, as whoever gave it back handed it on."""
        limit_s = self.upstream.max_queue_wait_ms / 1000
        if wait_limit_s is not None:
            limit_s = min(limit_s, max(0.0, wait_limit_s))
        if limit_s == 0:
            raise self._waited_too_long(limit_s)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        if not self._waiting.offer(waiter):
            raise self._queue_is_full()
        timer = loop.call_later(limit_s, self._stop_waiting, waiter)
        try:
            has_permit = await waiter
        except asyncio.CancelledError:
            if not self._waiting.remove(waiter) and not waiter.cancelled() and waiter.result():
                self._give_back()  # cancelled in the instant in which it was given one
            raise
        finally:
            timer.cancel()
        if not has_permit:
            raise self._waited_too_long(limit_s)

    def _stop_waiting(self, waiter: asyncio.Future[bool]) -> None:
        if not waiter.done():
            self._waiting.remove(waiter)
            waiter.set_result(False)

    def _hand_on(self) -> bool:
        """Gives a permit that came back to the next who still waits; False when there is none."""
        while (waiter := self._waiting.take()) is not None:
            if not waiter.done():  # else cancelled in this turn of the loop, and not awake yet
                waiter.set_result(True)
                return True
        return False

    def _waited_too_long(self, limit_s: float) -> Overloaded:
        is_ours = limit_s * 1000 >= self.upstream.max_queue_wait_ms
        whose = "" if is_ours else ", which is all that the caller's own deadline leaves"
        return self._overloaded(f"no free slot within {limit_s * 1000:.0f} ms{whose}", "queue_timeout")

    def _queue_is_full(self) -> Overloaded:
        what = f"{self._capacity} requests run and {len(self._waiting)} wait, and no more may"
        return self._overloaded(what, "queue_full")

    def _overloaded(self, what: str, reason: str) -> Overloaded:
        return Overloaded(
            f"Upstream `{self.name}` is busy: {what}. Try again, or raise `max_inflight`, `max_connections`, "
            "`max_queue` or `max_queue_wait_ms` of this upstream.",
            reason=reason,
            retry_after_s=1,
        )

    def _take_idle(self) -> UpstreamConnection | None:
        now = self._clock()
        oldest = now - int(self.upstream.keep_alive_s * NS)
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > oldest and connection.can_reuse and not self._is_old(connection):
                return connection
            connection.close()
        return None

    def _is_old(self, connection: UpstreamConnection) -> bool:
        return self._clock() - connection.opened_at > self.upstream.max_connection_age_s * NS

    async def _open_connection(self, timeout_s: float | None) -> UpstreamConnection:
        self._connecting += 1
        self._report()
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect(self._new_connection, self.upstream)
        except Exception as error:
            self._meters.connect_failed()
            raise _unavailable(self.name, error, timeout_s) from error
        finally:
            self._connecting -= 1
            self._report()
        if connection.is_closed:
            raise _unavailable(self.name, ConnectionResetError(0, "closed at once"), timeout_s)
        self._open.add(connection)
        self._meters.connected(reused=False)
        return connection

    def _new_connection(self) -> UpstreamConnection:
        return UpstreamConnection(self._clock, self._connection_closed)

    def _connection_closed(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._report()

    def _give_back(self) -> None:
        if not self._waiting or not self._hand_on():
            self._leases -= 1
        self._report()

    def _report(self) -> None:
        self._meters.connections(len(self._idle), self._leases - self._connecting, self._connecting)

    def _arm_sweep(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(self.upstream.keep_alive_s, self._close_expired)

    def _close_expired(self) -> None:
        """Closes what has been idle too long; runs once per idle limit while anything is idle."""
        self._sweep = None
        oldest = self._clock() - int(self.upstream.keep_alive_s * NS)
        expired = [c for c in self._idle if c.idle_since <= oldest]
        if expired:
            self._idle = [c for c in self._idle if c.idle_since > oldest]
            for connection in expired:
                connection.close()
            self._report()
        if self._idle and not self._is_closed:
            wait_ns = min(c.idle_since for c in self._idle) - oldest
            loop = asyncio.get_running_loop()
            self._sweep = loop.call_later(max(0.001, wait_ns / NS), self._close_expired)


class Dialer:
    """Makes TCP and TLS connections to one upstream."""

    def __init__(self, upstream: Upstream) -> None:
        self._tls: ssl.SSLContext | None = None
        if upstream.is_tls:
            self._tls = ssl.create_default_context(cafile=upstream.tls.ca_file)
            if not upstream.tls.verify:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE

    async def connect(self, factory: Callable[[], UpstreamConnection], upstream: Upstream) -> UpstreamConnection:
        """Resolves in a thread of the loop's pool, races addresses, then TLS with SNI and verification."""
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(upstream.host, upstream.port, type=socket.SOCK_STREAM)
        sock = await aiohappyeyeballs.start_connection(
            addresses, happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S, interleave=1, loop=loop
        )
        connection = factory()
        try:
            _tune(sock)
            connection.rtt_ns = kernel_rtt_ns(sock)
            if self._tls is None:
                await loop.create_connection(lambda: connection, sock=sock)
            else:
                await loop.create_connection(
                    lambda: connection,
                    sock=sock,
                    ssl=self._tls,
                    server_hostname=upstream.tls.server_name or upstream.host,
                    ssl_handshake_timeout=TLS_HANDSHAKE_S,
                )
        except BaseException:
            connection.close()  # cancelled between the handshake and our turn: the transport is open and nobody's
            sock.close()
            raise
        return connection


def kernel_rtt_ns(sock: socket.socket) -> int | None:
    """Round trip of the TCP handshake as the kernel measured it; None where it does not tell.

    A stop watch around `connect` would add every delay of our own event loop to the network's account.
    """
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_RTT + 4)
    except OSError:
        return None
    microseconds: int = struct.unpack_from("I", info, TCP_INFO_RTT)[0] if len(info) >= TCP_INFO_RTT + 4 else 0
    return microseconds * 1000 or None


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _unavailable(name: str, error: BaseException, timeout_s: float | None) -> UpstreamUnavailable:
    if isinstance(error, socket.gaierror):
        reason, what = "dns", "its host name does not resolve; check `url` of the upstream"
    else:
        reason, what = describe_connect_error(error)
    if reason == "connect_timeout" and timeout_s is not None:
        what += f" of {timeout_s * 1000:.0f} ms (`timeouts.connect_ms`)"
    return UpstreamUnavailable(f"Upstream `{name}` cannot be reached: {what}.", reason=reason, retry_after_s=2)

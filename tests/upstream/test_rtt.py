"""The network's share of the wait comes from the kernel, not from a stop watch that our own loop can slow down."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from gateway.upstream.pool import kernel_rtt_ns
from tests.support.playing import plain
from tests.support.raw import RawUpstream, chat
from tests.support.running import running_gateway, settings_for


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")
def test_the_round_trip_of_a_loopback_handshake_is_known_and_below_a_second() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()[:2]) as client:
        rtt_ns = kernel_rtt_ns(client)
        assert rtt_ns is not None
        assert 0 < rtt_ns < 1_000_000_000


def test_a_socket_that_is_no_tcp_has_no_round_trip() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert kernel_rtt_ns(left) is None


async def test_fresh_connections_tell_the_round_trip_of_their_upstream() -> None:
    async with RawUpstream(plain()) as upstream, running_gateway(settings_for(upstream.url)) as running:
        await asyncio.gather(*(running.ask(chat(stream=False)) for _ in range(3)))
        rtt_ns = running.gateway.runtime.upstreams["up"].rtt_ns
        assert rtt_ns is not None
        assert rtt_ns < 1_000_000_000

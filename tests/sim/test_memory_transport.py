"""Two protocols joined without a socket behave as if there were one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sim.memory import DEFAULT_WINDOW, MemoryNetwork, MemoryTransport, made_soon, memory_pipe


@dataclass
class End(asyncio.Protocol):
    """Notes everything that happens to it."""

    keeps_open: bool = False
    log: list[object] = field(default_factory=list)
    data: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(MemoryTransport, transport)
        self.log.append("made")

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.log.append(len(data))

    def eof_received(self) -> bool:
        self.log.append("eof")
        return self.keeps_open

    def connection_lost(self, exc: Exception | None) -> None:
        self.log.append(("lost", type(exc).__name__))

    def pause_writing(self) -> None:
        self.log.append("pause")

    def resume_writing(self) -> None:
        self.log.append("resume")


async def pair(*, keeps_open: bool = False, **options: float) -> tuple[End, End]:
    client, server = End(keeps_open=keeps_open), End(keeps_open=keeps_open)
    memory_pipe(client, server, **options)  # type: ignore[arg-type]
    await made_soon()
    return client, server


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_bytes_arrive_later_and_writes_of_one_turn_arrive_together() -> None:
    client, server = await pair()
    client.transport.write(b"ab")
    client.transport.writelines([b"c", bytearray(b"d"), memoryview(b"ef")])
    assert server.data == b""
    await settle()
    assert server.log == ["made", 6]
    assert server.data == b"abcdef"


async def test_both_directions_are_apart() -> None:
    client, server = await pair()
    client.transport.write(b"ping")
    server.transport.write(b"pong")
    await settle()
    assert (client.data, server.data) == (b"pong", b"ping")


@given(writes=st.lists(st.binary(max_size=40), max_size=8), largest_read=st.integers(1, 50))
def test_order_is_kept_whatever_the_reads_size(writes: list[bytes], largest_read: int) -> None:
    async def story() -> None:
        client, server = await pair(largest_read=largest_read)
        for data in writes:
            client.transport.write(data)
        client.transport.close()
        for _ in range(400):
            await asyncio.sleep(0)
        assert server.data == b"".join(writes)
        assert all(size <= largest_read for size in server.log if isinstance(size, int))
        assert server.log[-2:] == ["eof", ("lost", "NoneType")]

    asyncio.run(story())


async def test_closing_delivers_everything_then_ends_both_sides() -> None:
    client, server = await pair()
    client.transport.write(b"last words")
    client.transport.close()
    assert client.transport.is_closing()
    client.transport.write(b"too late")
    await settle()
    assert server.data == b"last words"
    assert server.log == ["made", 10, "eof", ("lost", "NoneType")]
    assert client.log == ["made", ("lost", "NoneType")]


async def test_reset_is_heard_after_what_was_delivered_before_it() -> None:
    client, server = await pair()
    server.transport.write(b"half an ans")
    server.transport.reset()
    await settle()
    assert client.log == ["made", 11, ("lost", "ConnectionResetError")]
    assert server.log == ["made", ("lost", "NoneType")]


async def test_abort_drops_the_write_buffer_but_not_what_the_kernel_had() -> None:
    client, server = await pair(window=4)
    client.transport.write(b"abcdefgh")
    client.transport.abort()
    await settle()
    assert server.log == ["made", 4, "eof", ("lost", "NoneType")]


async def test_half_close_leaves_the_other_direction_open() -> None:
    client, server = await pair(keeps_open=True)
    client.transport.write(b"request")
    client.transport.write_eof()
    with pytest.raises(RuntimeError, match="write_eof"):
        client.transport.write(b"more")
    await settle()
    assert server.log == ["made", 7, "eof"]
    server.transport.write(b"answer")
    server.transport.close()
    await settle()
    assert client.data == b"answer"
    assert client.log[-1] == "eof", "it keeps its own side open until it closes"


async def test_a_reader_that_stops_fills_the_window_then_the_buffer_then_pauses_the_writer() -> None:
    client, server = await pair()
    server.transport.pause_reading()
    server.transport.pause_reading()
    high = client.transport.get_write_buffer_limits()[1]
    client.transport.write(b"x" * DEFAULT_WINDOW)
    assert client.transport.get_write_buffer_size() == 0
    client.transport.write(b"y" * high)
    assert "pause" not in client.log
    client.transport.write(b"z")
    assert client.log == ["made", "pause"]
    await settle()
    assert server.data == b""
    server.transport.resume_reading()
    await settle()
    assert client.log == ["made", "pause", "resume"]
    assert len(server.data) == DEFAULT_WINDOW + high + 1


async def test_a_paused_reader_hears_neither_the_end_nor_a_reset_until_it_reads_again() -> None:
    client, server = await pair()
    server.transport.pause_reading()
    client.transport.write(b"bye")
    client.transport.close()
    await settle()
    assert server.log == ["made"]
    assert client.log == ["made", ("lost", "NoneType")], "the kernel has it, so the writer is done"
    server.transport.resume_reading()
    await settle()
    assert server.log == ["made", 3, "eof", ("lost", "NoneType")]


async def test_closing_waits_for_a_buffer_that_the_kernel_could_not_take() -> None:
    client, server = await pair(window=2)
    server.transport.pause_reading()
    client.transport.write(b"abcdef")
    client.transport.close()
    await settle()
    assert client.log == ["made"]
    server.transport.resume_reading()
    await settle()
    assert server.data == b"abcdef"
    assert client.log == ["made", ("lost", "NoneType")]


async def test_limits_can_be_set_and_pause_at_once() -> None:
    client, server = await pair(window=0)
    server.transport.pause_reading()
    client.transport.write(b"12345")
    client.transport.set_write_buffer_limits(high=4)
    assert client.transport.get_write_buffer_limits() == (1, 4)
    assert client.log == ["made", "pause"]
    client.transport.set_write_buffer_limits(low=3)
    assert client.transport.get_write_buffer_limits() == (3, 12)
    with pytest.raises(ValueError, match="high"):
        client.transport.set_write_buffer_limits(high=1, low=2)


async def test_writing_to_a_closed_end_breaks_the_connection() -> None:
    client, server = await pair(keeps_open=True)
    server.transport.close()
    await settle()
    assert client.log == ["made", "eof"]
    client.transport.write(b"anyone?")
    await settle()
    assert client.log == ["made", "eof", ("lost", "ConnectionResetError")]


@pytest.mark.looptime
async def test_latency_delays_bytes_and_the_end_and_keeps_their_order() -> None:
    loop = asyncio.get_running_loop()
    client, server = await pair(latency_s=0.05)
    client.transport.write(b"a")
    await asyncio.sleep(0.02)
    client.transport.write(b"b")
    client.transport.close()
    while "eof" not in server.log:
        await asyncio.sleep(0.001)
    assert server.log[:4] == ["made", 1, 1, "eof"]
    assert loop.time() == pytest.approx(0.07, abs=0.002)


async def test_a_buffered_protocol_gets_its_bytes_through_its_own_buffer() -> None:
    class Buffered(asyncio.BufferedProtocol):
        def __init__(self) -> None:
            self.buffer, self.data = bytearray(3), b""

        def get_buffer(self, sizehint: int) -> bytearray:
            return self.buffer

        def buffer_updated(self, nbytes: int) -> None:
            self.data += self.buffer[:nbytes]

    server, client = Buffered(), End()
    memory_pipe(client, server)
    await made_soon()
    client.transport.write(b"abcdefgh")
    await settle()
    assert server.data == b"abcdefgh"


async def test_protocols_can_be_exchanged_on_the_way() -> None:
    client, server = await pair()
    second = End()
    server.transport.set_protocol(second)
    assert server.transport.get_protocol() is second
    client.transport.write(b"for the second")
    await settle()
    assert (server.data, second.data) == (b"", b"for the second")


async def test_a_network_connects_by_name_and_refuses_where_nobody_listens() -> None:
    network = MemoryNetwork()
    servers: list[End] = []

    def accept() -> End:
        servers.append(End())
        return servers[-1]

    network.listen("thor", 8000, accept)
    with pytest.raises(OSError, match="in use"):
        network.listen("thor", 8000, accept)
    transport, client = await network.create_connection(End, "thor", 8000, family=0, happy_eyeballs_delay=0.25)
    assert transport.get_extra_info("peername") == ("thor", 8000)
    assert transport.get_extra_info("socket") is None
    transport.write(b"hi")
    await settle()
    assert servers[0].data == b"hi"
    assert client.log == ["made"]
    network.unlisten("thor", 8000)
    with pytest.raises(ConnectionRefusedError):
        await network.create_connection(End, "thor", 8000)
    assert network.connects == 2

"""Replicas that meet in a real Valkey: what one runs, the others can answer for, whatever happens to the store."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway import config
from gateway.store import Entry, Store, StoreDown, StoreUnusable, keys, make_store
from gateway.store.valkey import ValkeyStore
from tests.support.valkey_server import ValkeyServer, valkey_server

LIMITS = config.Pending()
PATIENCE_S = 15.0  # for a busy machine
Opener = Callable[..., Awaitable[Store]]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ValkeyServer]:
    async with valkey_server(tmp_path) as running:
        yield running


@pytest.fixture
async def opener(server: ValkeyServer) -> AsyncIterator[Opener]:
    """Opens stores of one server, each a replica of its own."""
    opened: list[Store] = []

    async def make(limits: config.Pending = LIMITS) -> Store:
        store = make_store(server.address, limits)
        opened.append(store)
        await store.open()
        return store

    yield make
    for store in opened:
        await store.close()


@pytest.fixture
async def owner(opener: Opener) -> Store:
    return await opener()


@pytest.fixture
async def reader(opener: Opener) -> Store:
    return await opener()


def entry(store: Store, name: str = "a" * 32, **values: object) -> Entry:
    made = {"id": name, "owner_key": "digest", "replica": store.replica, "state": "pending", "created_ms": 1, **values}
    return Entry(**made)  # type: ignore[arg-type]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.01)


async def until_entry(store: Store, name: str, is_so: Callable[[Entry | None], bool]) -> Entry | None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if is_so(found := await store.get(name)):
                    return found
            except StoreDown:
                pass
            await asyncio.sleep(0.02)


async def read_all(store: Store, name: str) -> bytes:
    data = b""
    while piece := await store.read(name, len(data), 1 << 20):
        data += piece
    return data


async def followed(store: Store, name: str) -> tuple[bytes, Entry | None]:
    """Replays an entry and follows it to its end, as the stream of a poll does."""
    data = b""
    while True:
        await store.wait(name, len(data), 5)
        found = await store.get(name)
        data += await store.read(name, len(data), 1 << 20)
        if found is None or (found.state != "pending" and len(data) >= found.size):
            return data, found


async def took_ms(call: Awaitable[object]) -> float:
    """How long a call took that found the store down."""
    started = time.perf_counter()
    with pytest.raises(StoreDown):
        await call
    return (time.perf_counter() - started) * 1000


async def usual_ms(call: Callable[[], Awaitable[object]]) -> float:
    """How long such a call takes, whatever else the machine does now and then."""
    return sorted([await took_ms(call()) for _ in range(11)])[5]


async def test_an_answer_that_one_replica_records_is_followed_on_another(owner: Store, reader: Store) -> None:
    """C122."""
    own = entry(owner, info={"phase": "queued", "estimation_ms": 900})
    await owner.create(own)
    seen = await reader.get(own.id)
    assert seen is not None
    assert (seen.state, seen.info, seen.owner_key, seen.replica) == ("pending", own.info, "digest", owner.replica)

    following = asyncio.ensure_future(followed(reader, own.id))
    own.status, own.headers = 200, [(b"content-type", b"text/event-stream"), (b"x-odd", b"\xe9")]
    own.info = {"phase": "answering"}
    owner.update(own)
    pieces = [b"data: %d\n\n" % number for number in range(200)]
    for piece in pieces:
        owner.append(own.id, piece)
        await asyncio.sleep(0)
    own.state = "done"
    owner.finish(own)
    data, end = await following
    assert data == b"".join(pieces)
    assert end is not None
    assert (end.state, end.status, end.headers, end.size) == ("done", 200, own.headers, len(data))


async def test_a_waiter_hears_of_the_first_byte_at_once(owner: Store, reader: Store) -> None:
    own = entry(owner)
    await owner.create(own)
    waiting = asyncio.ensure_future(reader.wait(own.id, 0, 30))
    await asyncio.sleep(0.1)
    started = time.perf_counter()
    owner.append(own.id, b"x")
    await waiting
    assert time.perf_counter() - started < 0.5  # far below the look of each second
    assert await reader.read(own.id, 0, 10) == b"x"


async def test_subscriptions_end_when_nobody_waits_any_more(server: ValkeyServer, owner: Store, reader: Store) -> None:
    own = entry(owner)
    await owner.create(own)
    channel = keys.changed_channel(own.id)
    await reader.wait(own.id, 0, 0.05)
    async with asyncio.timeout(PATIENCE_S):
        while not (await server.ask("PUBSUB", "NUMSUB", channel)).endswith(b":0\r\n"):
            await asyncio.sleep(0.05)
    waiting = asyncio.ensure_future(reader.wait(own.id, 0, 30))
    owner.append(own.id, b"x")
    await waiting


async def test_a_name_that_is_no_text_costs_nothing(owner: Store, reader: Store) -> None:
    """C048."""
    own = entry(owner, info={"model": "half \ud83d", "number": 1 << 70})
    await owner.create(own)
    found = await reader.get(own.id)
    assert found is not None
    assert found.info["model"] == "half ?"


async def test_waiting_ends_with_its_time(owner: Store, reader: Store) -> None:
    await owner.create(entry(owner))
    async with asyncio.timeout(PATIENCE_S):
        await reader.wait("a" * 32, 0, 0.05)
        await reader.wait("never there", 0, 60)


async def test_a_waiter_whose_messages_get_lost_looks_for_himself(
    server: ValkeyServer, owner: Store, reader: Store
) -> None:
    own = entry(owner)
    await owner.create(own)
    waiting = asyncio.ensure_future(reader.wait(own.id, 0, 30))
    await asyncio.sleep(0.05)
    await server.ask("CLIENT", "KILL", "TYPE", "pubsub")
    owner.append(own.id, b"x")
    async with asyncio.timeout(PATIENCE_S):
        await waiting
        await followed_end(owner, reader, own)


async def followed_end(owner: Store, reader: Store, own: Entry) -> None:
    waiting = asyncio.ensure_future(reader.wait(own.id, 1, 30))
    own.state = "done"
    owner.finish(own)
    await waiting


async def test_a_cancel_reaches_the_owner_within_a_tenth_of_a_second_and_once(owner: Store, reader: Store) -> None:
    own = entry(owner)
    heard: list[str] = []
    owner.on_cancel = heard.append
    await owner.create(own)
    await asyncio.sleep(0.1)  # both listen by now
    started = time.perf_counter()
    assert await reader.cancel(own.id)
    await until(lambda: bool(heard))
    assert time.perf_counter() - started < 0.3  # 100 ms, and some for a busy machine
    assert await reader.cancel(own.id)
    assert await owner.cancel(own.id)
    own.state = "cancelled"
    owner.finish(own)
    await until_entry(reader, own.id, lambda found: found is not None and found.state == "cancelled")
    assert not await reader.cancel(own.id)
    assert not await reader.cancel("unknown")
    assert heard == [own.id]


async def test_a_cancel_whose_message_got_lost_is_found_with_the_next_beat(
    server: ValkeyServer, owner: Store, reader: Store
) -> None:
    own = entry(owner)
    heard: list[str] = []
    owner.on_cancel = heard.append
    await owner.create(own)
    await server.ask("SADD", keys.cancels_key(owner.replica), own.id)
    await until(lambda: bool(heard))
    assert await server.ask("EXISTS", keys.cancels_key(owner.replica)) in (b":0\r\n", b":1\r\n")


async def test_a_mistake_in_a_callback_ends_nothing(
    owner: Store, reader: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(entry_id: str) -> None:
        raise RuntimeError

    own = entry(owner)
    owner.on_cancel = fails
    await owner.create(own)
    await asyncio.sleep(0.05)
    await reader.cancel(own.id)
    await until(lambda: "a callback of the store failed" in caplog.text)
    owner.append(own.id, b"still there")
    await until_entry(reader, own.id, lambda found: found is not None and found.size == 11)


async def test_a_repeated_request_finds_the_running_one(owner: Store, reader: Store) -> None:
    own = entry(owner, fingerprint="print")
    await owner.create(own)
    assert await reader.find("print") == own.id
    own.state = "done"
    owner.finish(own)
    await until_entry(reader, own.id, lambda found: found is not None and found.state == "done")
    assert await reader.find("print") is None
    assert await reader.find("another") is None
    assert await reader.find("") is None


KILLED = """
import asyncio, sys
from gateway import config
from gateway.store import Entry, make_store

async def main():
    store = make_store(sys.argv[1], config.Pending())
    await store.open()
    await store.create(Entry("b" * 32, "", store.replica, "pending", 1))
    store.append("b" * 32, b"half an ans")
    await asyncio.sleep(1.2)
    print(store.replica, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_requests_of_a_killed_replica_fail_within_five_seconds_and_for_good(
    server: ValkeyServer, reader: Store
) -> None:
    """C122, C119."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, server.address, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    replica = (await process.stdout.readline()).decode().strip()
    assert replica
    process.kill()
    await process.wait()
    started = time.perf_counter()
    await reader.wait("b" * 32, 100, 30)
    found = await reader.get("b" * 32)
    assert time.perf_counter() - started < 5.0
    assert found is not None
    assert found.error is not None
    assert (found.state, found.error["reason"], found.size) == ("failed", "replica_lost", 11)
    await server.ask("SET", keys.lease_key(replica), "1")
    again = await reader.get("b" * 32)
    assert again is not None
    assert again.state == "failed"


async def test_a_replica_that_leaves_writes_what_it_has_and_gives_its_lease_back(
    server: ValkeyServer, opener: Opener, reader: Store
) -> None:
    """C129."""
    leaving = await opener()
    ended, running = entry(leaving, "e"), entry(leaving, "r")
    for own in (ended, running):
        await leaving.create(own)
    leaving.append("e", b"whole")
    ended.state = "done"
    leaving.finish(ended)
    await leaving.close()
    found = [await reader.get(name) for name in ("e", "r")]
    assert [each and each.state for each in found] == ["done", "failed"]
    assert await reader.read("e", 0, 99) == b"whole"


async def test_an_end_that_was_told_stays_although_the_owner_lives(
    server: ValkeyServer, owner: Store, reader: Store
) -> None:
    """C126. A replica cut off from the store for long looks dead to the others."""
    own = entry(owner)
    await owner.create(own)
    lost = entry(owner, state="failed", error={"reason": "replica_lost"})
    await server.ask("HSET", keys.entry_key(own.id), "end", await encoded(lost))
    owner.append(own.id, b"late")
    own.state = "done"
    owner.finish(own)
    await asyncio.sleep(0.2)
    found = await reader.get(own.id)
    assert found is not None
    assert found.state == "failed"


async def encoded(value: Entry) -> bytes:
    from gateway.store.entry import encode

    return encode(value)


@pytest.mark.parametrize("scheme", ["valkey", "redis"])
async def test_a_store_that_is_down_at_start_is_told_once_and_used_when_it_comes(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """G1."""
    server = ValkeyServer(tmp_path)
    store = make_store(server.address.replace("valkey", scheme), LIMITS)
    states: list[bool] = []
    store.on_state = states.append
    await store.open()
    try:
        assert not store.is_up
        assert await usual_ms(lambda: store.create(entry(store))) <= 1  # G2
        assert await usual_ms(lambda: store.get("a")) <= 1
        await until(lambda: "the store is down" in caplog.text)
        await server.start()
        await until(lambda: store.is_up)
        await store.create(entry(store))
        assert states == [False, True]
        assert caplog.text.count("the store is down") == 1
        assert "127.0.0.1" not in caplog.text
    finally:
        await store.close()
        await server.stop()


async def test_a_store_that_was_killed_and_lost_all_is_filled_again_by_the_owner(
    server: ValkeyServer, owner: Store, reader: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """G2, C122."""
    caplog.set_level(logging.INFO)
    running, done = entry(owner, "r"), entry(owner, "d")
    recorded = {"r": b"first ", "d": b"all of it"}
    entries = {"r": running, "d": done}
    owner.on_damaged = lambda name: owner.restore(entries[name], recorded[name])
    for own in (running, done):
        await owner.create(own)
        owner.append(own.id, recorded[own.id])
    done.state = "done"
    owner.finish(done)
    await until_entry(reader, "d", lambda found: found is not None and found.state == "done")

    await server.stop()
    with pytest.raises(StoreDown):
        await reader.get("r")
    assert await usual_ms(lambda: reader.get("r")) <= 1  # G2
    owner.append("r", b"second ")
    recorded["r"] += b"second "
    await server.start()
    await until_entry(reader, "r", lambda found: found is not None and found.size == 13)
    owner.append("r", b"third")
    recorded["r"] += b"third"
    running.state = "done"
    owner.finish(running)
    await until_entry(reader, "r", lambda found: found is not None and found.state == "done")
    assert await read_all(reader, "r") == b"first second third"
    await until_entry(reader, "d", lambda found: found is not None and found.state == "done")
    assert await read_all(reader, "d") == b"all of it"
    assert "the store answers again" in caplog.text


async def test_a_store_that_was_flushed_is_filled_again(server: ValkeyServer, owner: Store, reader: Store) -> None:
    """G6."""
    own = entry(owner)
    owner.on_damaged = lambda name: owner.restore(own, b"hello")
    await owner.create(own)
    owner.append(own.id, b"hello")
    await until_entry(reader, own.id, lambda found: found is not None and found.size == 5)
    await server.ask("FLUSHALL")
    await until_entry(reader, own.id, lambda found: found is not None and found.size == 5)


async def test_an_answer_that_nobody_can_restore_fails_clearly(
    server: ValkeyServer, owner: Store, reader: Store
) -> None:
    own = entry(owner)
    await owner.create(own)
    owner.append(own.id, b"hello")
    await until_entry(reader, own.id, lambda found: found is not None and found.size == 5)
    await server.ask("FLUSHALL")
    found = await until_entry(reader, own.id, lambda found: found is not None and found.state == "failed")
    assert found is not None
    assert found.error is not None
    assert found.error["reason"] == "store_lost"


async def test_an_answer_that_the_server_dropped_fails_clearly(
    server: ValkeyServer, owner: Store, reader: Store
) -> None:
    """G6: evicted for want of memory."""
    own = entry(owner)
    await owner.create(own)
    owner.append(own.id, b"hello")
    own.state = "done"
    owner.finish(own)
    await until_entry(reader, own.id, lambda found: found is not None and found.state == "done")
    await server.ask("DEL", keys.data_key(own.id))
    found = await reader.get(own.id)
    assert found is not None
    assert found.error is not None
    assert (found.state, found.error["reason"]) == ("failed", "store_lost")


@pytest.mark.slow
async def test_a_paused_store_costs_fifty_milliseconds_once_and_nothing_is_lost(
    server: ValkeyServer, owner: Store, reader: Store
) -> None:
    """C120, G4: it accepts and never answers; late replies belong to nobody."""
    own, other = entry(owner), entry(owner, "o", info={"other": True})
    for each in (own, other):
        await owner.create(each)
    owner.append(own.id, b"before ")
    await until_entry(reader, own.id, lambda found: found is not None and found.size == 7)
    server.pause()
    try:
        first = await took_ms(reader.get(other.id))
        assert 30 < first < 250  # 50 ms, and some for a busy machine
        assert await usual_ms(lambda: reader.get(own.id)) <= 1
        assert await took_ms(owner.create(entry(owner, "new", fingerprint="print"))) < 250
        owner.append(own.id, b"meanwhile")
        await asyncio.sleep(4.2)  # all leases end
    finally:
        server.resume()
    await until(lambda: reader.is_up)
    for _ in range(20):
        found = await reader.get(own.id)
        assert found is not None
        assert (found.id, found.state, found.info) == (own.id, "pending", {})
        await asyncio.sleep(0.01)
    await until_entry(reader, own.id, lambda found: found is not None and found.size == 16)
    assert await read_all(reader, own.id) == b"before meanwhile"
    assert await reader.find("print") is None


async def test_one_hiccup_is_no_outage(server: ValkeyServer, reader: Store, caplog: pytest.LogCaptureFixture) -> None:
    server.pause()
    await took_ms(reader.get("a"))
    server.resume()
    await until(lambda: reader.is_up)
    assert await reader.get("a") is None
    assert not caplog.records


async def test_an_announcement_that_was_given_up_is_never_found_running(
    server: ValkeyServer, owner: Store, reader: Store
) -> None:
    """The write may arrive after its caller has stopped waiting, and a retry must not join what nobody runs."""
    server.pause()
    await took_ms(owner.create(entry(owner, fingerprint="print")))
    server.resume()
    await until(lambda: owner.is_up and reader.is_up)
    await until_entry(reader, "a" * 32, lambda found: found is not None and found.state == "failed")
    assert await reader.find("print") is None


@pytest.mark.parametrize(
    "spoil, heal",
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        (("ACL", "SETUSER", "default", "-eval", "-set"), ("ACL", "SETUSER", "default", "+@all")),
    ],
    ids=["READONLY", "OOM", "NOPERM"],
)
async def test_a_store_that_refuses_writes_counts_as_down_until_it_takes_them(
    spoil: tuple[str, ...], heal: tuple[str, ...], server: ValkeyServer, owner: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """C120, G5, G6."""
    assert await server.ask(*spoil) == b"+OK\r\n"
    with pytest.raises(StoreDown):
        await owner.create(entry(owner))
    assert not owner.is_up
    assert await usual_ms(lambda: owner.get("a")) <= 1
    await until(lambda: "the store is down" in caplog.text)
    await server.ask(*heal)
    await until(lambda: owner.is_up)
    await owner.create(entry(owner, "b"))
    assert caplog.text.count("the store is down") == 1


@asynccontextmanager
async def scripted(answer: bytes, delay_s: float = 0.0) -> AsyncIterator[str]:
    """A server that greets and then gives one answer to everything, late if asked for."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if b"PING" in data:
                    writer.write(b"+PONG\r\n")
                    continue
                await asyncio.sleep(delay_s)
                writer.write(answer)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"valkey://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    "answer, delay_s",
    [
        (b"+OK\r\n", 0.2),
        (b"-LOADING the dataset is in memory\r\n", 0),
        (b"-MASTERDOWN Link with MASTER is down\r\n", 0),
        (b"-MOVED 1 10.0.0.1:6379\r\n", 0),
        (b"-ERR unknown command\r\n", 0),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 0),
        (b"$-7\r\n:x\r\n*\r\n", 0),
        (b"*1\r\n$5\r\nab", 0),
    ],
    ids=["slow", "LOADING", "MASTERDOWN", "MOVED", "ERR", "another protocol", "nonsense", "half a reply"],
)
async def test_a_server_that_answers_late_or_wrongly_counts_as_down(answer: bytes, delay_s: float) -> None:
    """C120, G3, G5, G7."""
    async with scripted(answer, delay_s) as address:
        store = make_store(address, LIMITS)
        await store.open()
        try:
            assert not store.is_up
            assert await usual_ms(lambda: store.find("print")) <= 1
        finally:
            await store.close()


async def test_foreign_values_under_our_keys_are_absent_and_overwritten(
    server: ValkeyServer, owner: Store, reader: Store
) -> None:
    """G7."""
    own = entry(owner, fingerprint="print")
    await server.ask("SET", keys.entry_key(own.id), "garbage")
    await server.ask("SADD", keys.data_key(own.id), "garbage")
    await server.ask("SADD", keys.same_key("print"), "garbage")
    assert await reader.get(own.id) is None
    assert await reader.read(own.id, 0, 10) == b""
    assert await reader.find("print") is None
    assert not await reader.cancel(own.id)
    await owner.create(own)
    owner.append(own.id, b"hello")
    found = await until_entry(reader, own.id, lambda found: found is not None and found.size == 5)
    assert found is not None
    assert await reader.find("print") == own.id
    await server.ask("SET", keys.same_key("print"), b"\xff\x00")
    assert await reader.find("print") is None
    assert owner.is_up
    assert reader.is_up


@pytest.mark.parametrize(
    "value",
    [
        b"\x80\x04\x95pickled",
        b"[]",
        b"{}",
        b'{"id":"a"}',
        b'{"id":"a","owner_key":"","replica":"r","state":"odd","created_ms":1,"headers":[]}',
        b'{"id":"a","owner_key":"","replica":"r","state":"done","created_ms":"1","headers":[]}',
        b'{"id":"b","owner_key":"","replica":"r","state":"done","created_ms":1,"headers":[]}',
        b'{"id":"a","owner_key":"","replica":"r","state":"done","created_ms":1,"headers":[[1,2]]}',
        b'{"id":"a","owner_key":"","replica":"r","state":"done","created_ms":1,"headers":[["\xe4\xb8\xad","x"]]}',
        b'{"id":"a","owner_key":"","replica":"r","state":"done","created_ms":1,"headers":[],"more":1}',
    ],
)
async def test_a_record_that_is_not_one_is_absent(value: bytes, server: ValkeyServer, reader: Store) -> None:
    """G7."""
    await server.ask("HSET", keys.entry_key("a"), "record", value)
    assert await reader.get("a") is None
    assert reader.is_up


async def test_everything_in_the_store_has_a_time_to_live(server: ValkeyServer, owner: Store, reader: Store) -> None:
    """G6."""
    for name in ("running", "done"):
        await owner.create(entry(owner, name, fingerprint=name))
        owner.append(name, b"x")
    owner.finish(entry(owner, "done", state="done"))
    await until_entry(reader, "done", lambda found: found is not None and found.state == "done")
    await reader.cancel("running")
    script = "local n = 0 for _, k in ipairs(redis.call('KEYS', '*')) do if redis.call('PTTL', k) < 0 then n = n + 1 end end return n"
    assert await server.ask("EVAL", script, "0") == b":0\r\n"


async def test_a_result_is_gone_after_its_time_to_live(opener: Opener, reader: Store) -> None:
    owner = await opener(config.Pending(ttl_s=0.2))
    own = entry(owner)
    await owner.create(own)
    own.state = "done"
    owner.finish(own)
    await until_entry(reader, own.id, lambda found: found is None)
    assert await reader.read(own.id, 0, 10) == b""


async def test_a_result_over_the_bound_is_cut_and_says_so(opener: Opener, reader: Store) -> None:
    owner = await opener(config.Pending(max_result_mb=0.001))
    own = entry(owner)
    await owner.create(own)
    for _ in range(4):
        owner.append(own.id, b"x" * 400)
    own.state = "done"
    owner.finish(own)
    found = await until_entry(reader, own.id, lambda found: found is not None and found.state == "done")
    assert found is not None
    assert (found.is_whole, found.size, await read_all(reader, own.id)) == (False, 800, b"x" * 800)


async def test_a_large_answer_arrives_whole(owner: Store, reader: Store) -> None:
    own = entry(owner)
    body = bytes(range(256)) * 8192  # 2 MiB
    await owner.create(own)
    owner.append(own.id, body)
    own.state = "done"
    owner.finish(own)
    await until_entry(reader, own.id, lambda found: found is not None and found.state == "done")
    assert await read_all(reader, own.id) == body
    assert await reader.read(own.id, 0, 0) == b""


async def test_a_caller_that_leaves_in_the_middle_of_a_command_disturbs_nobody(owner: Store, reader: Store) -> None:
    own = entry(owner)
    await owner.create(own)
    for _ in range(30):
        leaving = [asyncio.ensure_future(reader.get("other")) for _ in range(3)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        found = await reader.get(own.id)
        assert found is not None
        assert found.id == own.id
        await asyncio.gather(*leaving, return_exceptions=True)
    assert reader.is_up


def test_a_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkey.asyncio.connection", None)
    with pytest.raises(StoreUnusable, match=r"pip install 'firsttoken\[valkey\]'"):
        make_store("valkey://127.0.0.1", LIMITS)


@pytest.mark.parametrize("address", ["valkey://127.0.0.1:port", "valkey://127.0.0.1?db=x", "valkey://127.0.0.1?odd=1"])
def test_an_address_that_cannot_work_is_told_at_start_without_repeating_it(address: str) -> None:
    with pytest.raises(StoreUnusable, match="no address") as caught:
        make_store(address.replace("//", "//user:secret@"), LIMITS)
    assert "secret" not in str(caught.value)


def test_the_state_of_a_store_reads_in_a_line() -> None:
    text = repr(ValkeyStore("valkey://:secret@127.0.0.1", LIMITS))
    assert "down" in text
    assert "secret" not in text

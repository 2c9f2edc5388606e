"""What is queued for the store and what is not, against a store of a few lines that loses replies and its memory."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import config
from gateway.store import Entry, keys
from gateway.store.link import Command
from gateway.store.mirror import BATCH_BYTES, BATCH_COMMANDS, Mirror

SMALL = config.Pending(max_result_mb=0.001, max_total_mb=0.002, ttl_s=10)  # 1,048 bytes a result, 2,097 queued


def entry(name: str = "a", **values: object) -> Entry:
    return Entry(**{"id": name, "owner_key": "k", "replica": "r", "state": "pending", "created_ms": 1, **values})  # type: ignore[arg-type]


class PretendStore:
    """The script of `keys`, in Python."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, bytes]] = {}
        self.data: dict[str, bytes] = {}

    def write(self, command: Command) -> int:
        _, _, _, record_key, data_key, record, offset, chunk, end, _, _, afresh = command
        assert isinstance(record_key, str)
        assert isinstance(data_key, str)
        assert isinstance(record, bytes)
        assert isinstance(offset, int)
        assert isinstance(chunk, bytes)
        assert isinstance(end, bytes)
        if "end" in self.records.get(record_key, {}):
            return keys.ENDED
        if afresh:
            self.records.pop(record_key, None)
            self.data.pop(data_key, None)
        have = self.data.get(data_key, b"")
        if len(have) < offset or (not record and record_key not in self.records):
            return keys.GONE
        if record:
            self.records.setdefault(record_key, {})["record"] = record
        self.data[data_key] = have + chunk[len(have) - offset :]
        if end:
            self.records[record_key]["end"] = end
        return offset + len(chunk)

    def bytes_of(self, name: str) -> bytes:
        return self.data.get(keys.data_key(name), b"")

    def end_of(self, name: str) -> dict[str, object]:
        found: dict[str, object] = orjson.loads(self.records[keys.entry_key(name)]["end"])
        return found


def flush(mirror: Mirror, store: PretendStore, now: float = 1.0) -> None:
    for _ in range(50):
        batch = mirror.batch()
        if not batch.commands:
            return
        mirror.acknowledge(batch, [store.write(command) for command in batch.commands], now)
    raise AssertionError("it never ends")


def opened(limits: config.Pending = SMALL) -> tuple[Mirror, PretendStore, Entry]:
    mirror, store, own = Mirror(limits), PretendStore(), entry()
    assert store.write(mirror.add(own)) == 0
    mirror.created("a")
    return mirror, store, own


def test_many_chunks_become_one_write() -> None:
    mirror, store, own = opened()
    for word in (b"one ", b"two ", b"three"):
        assert mirror.append("a", word)
    batch = mirror.batch()
    assert len(batch.commands) == 1
    mirror.acknowledge(batch, [store.write(batch.commands[0])], 1.0)
    assert (store.bytes_of("a"), own.size, mirror.queued, mirror.is_written) == (b"one two three", 13, 0, True)


def test_what_comes_while_the_announcement_is_under_way_is_written_after_it() -> None:
    mirror, store, own = Mirror(SMALL), PretendStore(), entry()
    announcement = mirror.add(own)
    mirror.append("a", b"early")
    own.state = "done"
    mirror.finish(own)
    assert mirror.batch().commands == []
    store.write(announcement)
    mirror.created("a")
    flush(mirror, store)
    assert store.bytes_of("a") == b"early"
    assert store.end_of("a")["state"] == "done"


def test_a_write_whose_reply_was_lost_is_repeated_without_harm() -> None:
    mirror, store, _ = opened()
    mirror.append("a", b"hello")
    batch = mirror.batch()
    store.write(batch.commands[0])
    mirror.refuse(batch)
    mirror.append("a", b" world")
    flush(mirror, store)
    assert store.bytes_of("a") == b"hello world"


def test_an_answer_over_the_bound_is_cut_and_says_so() -> None:
    mirror, store, own = opened()
    mirror.append("a", b"x" * 1000)
    mirror.append("a", b"y" * 100)
    mirror.append("a", b"z")
    own.state = "done"
    mirror.finish(own)
    flush(mirror, store)
    assert store.bytes_of("a") == b"x" * 1000
    assert (store.end_of("a")["is_whole"], store.end_of("a")["size"]) == (False, 1000)


def test_a_full_queue_damages_the_entry_that_does_not_fit_and_no_other() -> None:
    limits = config.Pending(max_result_mb=1, max_total_mb=0.002)
    mirror, store, own = opened(limits)
    other = entry("b")
    store.write(mirror.add(other))
    mirror.created("b")
    mirror.append("b", b"kept")
    assert mirror.append("a", b"x" * 2000)
    assert not mirror.append("a", b"x" * 2000)
    assert mirror.next_damaged() == "a"
    assert mirror.next_damaged() is None
    flush(mirror, store)
    assert (store.bytes_of("b"), store.bytes_of("a")) == (b"kept", b"")
    mirror.restore(own, b"x" * 4000)
    assert mirror.queued == 4000
    flush(mirror, store)
    assert (store.bytes_of("a"), mirror.queued) == (b"x" * 4000, 0)


def test_a_large_piece_goes_out_in_several_writes() -> None:
    mirror, store, _ = opened(config.Pending())
    mirror.append("a", b"x" * (BATCH_BYTES * 2 + 1))
    mirror.append("a", b"y")
    sizes = []
    while (batch := mirror.batch()).commands:
        sizes.append(sum(part.size for part in batch.parts))
        mirror.acknowledge(batch, [store.write(command) for command in batch.commands], 1.0)
    assert max(sizes) <= BATCH_BYTES
    assert store.bytes_of("a") == b"x" * (BATCH_BYTES * 2 + 1) + b"y"


def test_many_entries_take_turns_and_no_round_trip_grows_too_long() -> None:
    mirror, store = Mirror(config.Pending()), PretendStore()
    names = [f"entry {number}" for number in range(BATCH_COMMANDS * 2 + 1)]
    for name in names:
        store.write(mirror.add(entry(name)))
        mirror.created(name)
        mirror.append(name, b"x")
    assert len(mirror.batch().commands) == BATCH_COMMANDS
    flush(mirror, store)
    assert {store.bytes_of(name) for name in names} == {b"x"}


def test_a_store_that_forgot_everything_is_told_again_by_the_owner() -> None:
    mirror, _, own = opened()
    mirror.append("a", b"hello")
    own.state = "done"
    mirror.finish(own)
    empty = PretendStore()
    mirror.forgotten()
    assert mirror.next_damaged() == "a"
    mirror.restore(own, b"hello")
    flush(mirror, empty)
    assert (empty.bytes_of("a"), empty.end_of("a")["state"]) == (b"hello", "done")


def test_an_entry_without_a_byte_needs_no_owner_to_be_told_again() -> None:
    mirror, _, _ = opened()
    empty = PretendStore()
    mirror.forgotten()
    assert mirror.next_damaged() is None
    flush(mirror, empty)
    assert keys.entry_key("a") in empty.records


@pytest.mark.parametrize("is_restored", [True, False], ids=["the owner has nothing", "nobody to ask"])
def test_what_nobody_can_restore_ends_as_failed_not_as_half_an_answer(is_restored: bool) -> None:
    mirror, _, own = opened()
    mirror.append("a", b"hello")
    empty = PretendStore()
    mirror.forgotten()
    assert mirror.next_damaged() == "a"
    if is_restored:
        mirror.restore(own, None)
    else:
        mirror.give_up("a")
    own.state = "done"
    assert not mirror.finish(own)
    flush(mirror, empty)
    end = empty.end_of("a")
    assert (end["state"], empty.bytes_of("a")) == ("failed", b"")
    assert isinstance(end["error"], dict)
    assert end["error"]["reason"] == "store_lost"


def test_an_owner_that_did_not_restore_is_asked_once_more_at_the_end_and_then_forgotten() -> None:
    mirror, store, own = opened()
    mirror.append("a", b"hello")
    mirror.forgotten()
    assert mirror.next_damaged() == "a"
    own.state = "done"
    assert mirror.finish(own)
    assert mirror.next_damaged() == "a"
    flush(mirror, store)
    mirror.expire(5.0)
    mirror.expire(14.0)
    assert "1 entries" in repr(mirror)
    mirror.expire(15.1)
    assert "0 entries" in repr(mirror)


def test_the_first_end_stays() -> None:
    """C126."""
    mirror, store, own = opened()
    own.state = "cancelled"
    mirror.finish(own)
    own.state = "done"
    assert not mirror.finish(own)
    assert not mirror.update(own)
    assert not mirror.append("a", b"late")
    flush(mirror, store)
    assert store.end_of("a")["state"] == "cancelled"


def test_an_end_that_a_reader_wrote_is_respected() -> None:
    mirror, store, own = opened()
    store.records[keys.entry_key("a")]["end"] = b'{"state":"failed"}'
    mirror.append("a", b"hello")
    own.state = "done"
    mirror.finish(own)
    flush(mirror, store)
    assert store.end_of("a") == {"state": "failed"}
    assert (list(mirror.running()), mirror.queued) == ([], 0)


def test_an_announcement_that_failed_leaves_an_entry_that_nobody_waits_for() -> None:
    mirror, store, own = Mirror(SMALL), PretendStore(), entry()
    store.write(mirror.add(own))  # it arrived, but its reply did not
    mirror.append("a", b"more")
    mirror.abandon("a")
    flush(mirror, store)
    assert store.end_of("a")["state"] == "failed"
    assert own.state == "pending"


def test_unknown_ids_are_ignored() -> None:
    mirror = Mirror(SMALL)
    stranger = entry("z")
    assert not mirror.append("z", b"x")
    assert not mirror.update(stranger)
    assert not mirror.finish(stranger)
    assert not mirror.cancelled("z")
    mirror.restore(stranger, b"x")
    assert mirror.is_written


def test_entries_are_forgotten_after_their_time_to_live() -> None:
    mirror, store, own = opened()
    own.state = "done"
    mirror.finish(own)
    flush(mirror, store, now=5.0)
    mirror.expire(14.0)
    assert "1 entries" in repr(mirror)
    mirror.expire(15.1)
    assert "0 entries" in repr(mirror)


def test_running_entries_are_written_again_before_they_expire() -> None:
    mirror, store, _ = opened()
    flush(mirror, store)
    mirror.renew()
    assert len(mirror.batch().commands) == 1


def test_a_wish_to_stop_is_heard_once_and_only_while_it_runs() -> None:
    mirror, _, own = opened()
    assert [mirror.cancelled("a"), mirror.cancelled("a")] == [True, False]
    own.state = "done"
    mirror.finish(own)
    assert not mirror.cancelled("a")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.binary(min_size=1, max_size=700)),
        st.tuples(st.sampled_from(["flush", "no request", "no reply", "forget", "restore", "update"]), st.just(b"")),
    ),
    max_size=40,
)


@given(STEPS)
def test_whatever_is_lost_on_the_way_the_answer_in_the_store_is_the_answer_or_a_failure(
    steps: list[tuple[str, bytes]],
) -> None:
    mirror, store, own = opened(config.Pending(max_result_mb=1, max_total_mb=0.002))
    recorded = b""
    for step, data in steps:
        batch = mirror.batch() if step in ("flush", "no request", "no reply") else None
        if step == "append":
            recorded += data
            mirror.append("a", data)
        elif batch is not None:
            replies: list[object] = [] if step == "no request" else [store.write(each) for each in batch.commands]
            if step == "flush":
                mirror.acknowledge(batch, replies, 1.0)
            else:
                mirror.refuse(batch)
        elif step == "forget":
            store.records.clear()
            store.data.clear()
        elif step == "update":
            mirror.update(own)
        elif (damaged := mirror.next_damaged()) is not None:
            mirror.restore(own, recorded)
            assert damaged == "a"
        assert recorded.startswith(store.bytes_of("a"))
    own.state = "done"
    mirror.finish(own)
    for _ in range(3):
        flush(mirror, store)
        if mirror.next_damaged() is not None:
            mirror.restore(own, recorded)
    assert (store.end_of("a")["state"], store.bytes_of("a"), mirror.queued) == ("done", recorded, 0)

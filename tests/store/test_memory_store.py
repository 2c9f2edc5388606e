"""The store of one process: it shares nothing, promises nothing and is never in the way."""

from __future__ import annotations

from gateway import config
from gateway.store import Entry, Store, make_store


async def test_one_process_has_nothing_to_share() -> None:
    store: Store = make_store("memory", config.Pending())
    entry = Entry("a", "", store.replica, "pending", 1, fingerprint="f")
    await store.open()
    await store.create(entry)
    store.append("a", b"x")
    store.update(entry)
    store.finish(entry)
    store.restore(entry, b"x")
    assert (store.is_shared, store.is_up) == (False, True)
    assert await store.get("a") is None
    assert await store.read("a", 0, 10) == b""
    assert await store.find("f") is None
    assert not await store.cancel("a")
    await store.wait("a", 0, 60)
    await store.close()


def test_every_process_has_a_name_of_its_own() -> None:
    names = {make_store("memory", config.Pending()).replica for _ in range(3)}
    assert len(names) == 3

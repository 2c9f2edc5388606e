"""State that replicas share: pending requests, and nothing that a request needs to succeed."""

from __future__ import annotations

from gateway import config
from gateway.store.entry import Entry, State, Store, StoreDown, StoreUnusable
from gateway.store.memory import MemoryStore

__all__ = ["Entry", "State", "Store", "StoreDown", "StoreUnusable", "make_store"]


def make_store(address: str, limits: config.Pending) -> Store:
    """The store of the setting `store`: `memory`, or an address such as valkey://host:6379/0.

    Raises:
        StoreUnusable: the package is missing, or the address cannot be one.
    """
    if address == "memory":
        return MemoryStore()
    from gateway.store.valkey import ValkeyStore

    return ValkeyStore(address, limits)

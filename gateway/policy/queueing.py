"""Who waits for a free slot of an upstream, who goes first, and who is told at once that waiting is of no use. Pure.

First come, first served while the queue is short. From half full on, the newest goes first: under overload all waits
are long, and the oldest caller is the nearest to its limit, so serving in order would serve only the nearly lost
(fault-catalogue 3.4). Those at the back run into their limit and are refused; the bound keeps them few.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class WaitQueue(Generic[T]):
    """At most `limit` different items."""

    __slots__ = ("_items", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._items: OrderedDict[T, None] = OrderedDict()  # O(1) at both ends and for whoever leaves

    def __repr__(self) -> str:
        return f"<WaitQueue {len(self._items)} of {self.limit}>"

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: T) -> bool:
        """Puts it last; False when the queue is full."""
        if len(self._items) >= self.limit:
            return False
        self._items[item] = None
        return True

    def take(self) -> T | None:
        """The next to be served, None when nobody waits."""
        if not self._items:
            return None
        is_newest_first = 2 * len(self._items) >= self.limit
        return self._items.popitem(last=is_newest_first)[0]

    def remove(self, item: T) -> bool:
        """Lets one go that waits no longer; False when it did not wait."""
        if item not in self._items:
            return False
        del self._items[item]
        return True


def refuse_at_door(deadline_left_s: float | None, estimated_wait_s: float | None) -> bool:
    """Whether a request should be refused now, because its deadline would pass before its turn came.

    None: no deadline, or no estimate. Without an estimate only a deadline that has passed already refuses.
    """
    if deadline_left_s is None:
        return False
    return deadline_left_s <= 0 or (estimated_wait_s is not None and estimated_wait_s > deadline_left_s)

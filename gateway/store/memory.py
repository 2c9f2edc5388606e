"""The store of a gateway that is one process: nobody else asks, so there is nothing to tell.

The recording of every request of this process is in memory already, with its bounds; a second copy here would
double them. Whoever asks has looked there before, so every answer of this store is "there is none".
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from gateway.store.entry import Entry


class MemoryStore:
    """Satisfies `Store` without sharing anything."""

    is_shared = False
    is_up = True

    def __init__(self) -> None:
        self.replica = secrets.token_hex(8)
        self.on_cancel: Callable[[str], None] | None = None
        self.on_state: Callable[[bool], None] | None = None
        self.on_damaged: Callable[[str], None] | None = None

    async def open(self) -> None:
        """Nothing to reach."""

    async def close(self) -> None:
        """Nothing to give back."""

    async def create(self, entry: Entry) -> None:
        """Nobody to tell."""

    def append(self, entry_id: str, data: bytes) -> None:
        """The owner has it."""

    def update(self, entry: Entry) -> None:
        """The owner has it."""

    def finish(self, entry: Entry) -> None:
        """The owner has it."""

    def restore(self, entry: Entry, data: bytes | None) -> None:
        """Nothing was lost."""

    async def get(self, entry_id: str) -> Entry | None:  # noqa: ARG002
        """None: an id that this process does not know exists nowhere."""
        return None

    async def read(self, entry_id: str, offset: int, limit: int) -> bytes:  # noqa: ARG002
        """Nothing."""
        return b""

    async def wait(self, entry_id: str, size: int, timeout_s: float) -> None:
        """Returns at once: the entry is not running."""

    async def cancel(self, entry_id: str) -> bool:  # noqa: ARG002
        """False: nothing of that id runs elsewhere."""
        return False

    async def find(self, fingerprint: str) -> str | None:  # noqa: ARG002
        """None: the process has looked among its own."""
        return None

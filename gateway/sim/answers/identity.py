"""Names and dates that an answer carries."""

from __future__ import annotations

import random
import zlib
from datetime import UTC, datetime

from gateway.sim.profiles import Profile


class Identity:
    """Ids of one request: the caller's `x-request-id` where it gave one, else seeded ones."""

    __slots__ = ("_rng", "created", "request_id")

    def __init__(self, rng: random.Random, request_id: str | None = None) -> None:
        self._rng = rng
        self.request_id = request_id or self.hex()
        self.created = int(datetime.now(UTC).timestamp())

    def hex(self) -> str:
        """Sixteen hexadecimal digits, new ones on every call."""
        return f"{self._rng.getrandbits(64):016x}"


def fingerprint(profile: Profile) -> str:
    """`system_fingerprint`: changes with the version and with the configuration, not with a restart."""
    if profile.engine == "llamacpp":
        return f"{profile.version}-{zlib.crc32(profile.name.encode()):08x}"
    return f"vllm-{profile.version}-{zlib.crc32(repr(profile).encode()):08x}"

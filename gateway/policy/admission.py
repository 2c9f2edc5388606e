"""Who is calling: the key in a request's headers, found without telling anything about the keys that exist.

A token is compared as the SHA-256 of its bytes with every key, always all of them, so that the time taken depends
neither on how much of a token is right nor on which key it is. Tokens are bytes: text that is not ASCII is a wrong
key like any other, never an error. A token is never kept, shown or put into a message.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from gateway.config import Key

_BEARER = b"bearer"
_BLANKS = b" \t"  # what HTTP allows around a field's value; not part of it


class KeyRing:
    """The keys that open routes. Keeps their digests only."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = tuple((key.digest(), _without_secret(key)) for key in keys)

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(key.name for _, key in self._keys) or 'open'})"

    @property
    def is_open(self) -> bool:
        """True when there are no keys: everybody may use everything."""
        return not self._keys

    def find(self, headers: Iterable[tuple[bytes, bytes]]) -> Key | None:
        """The key that the request holds, in `Authorization: Bearer` or `x-api-key`; None: none that is ours.

        Header names are in lower case. One of these headers given twice, with the same value or not, counts as no
        key: the two ends of a chain of proxies could each read another one. Never raises.
        """
        bearers: list[bytes] = []
        plain: list[bytes] = []
        for name, value in headers:
            if name == b"authorization":
                bearers.append(value)
            elif name == b"x-api-key":
                plain.append(value)
        if len(bearers) > 1 or len(plain) > 1:
            return None
        found = self._owner(_bearer_token(bearers[0])) if bearers else None
        other = self._owner(plain[0].strip(_BLANKS)) if plain else None
        return found or other

    def _owner(self, token: bytes) -> Key | None:
        digest = hashlib.sha256(token).digest()
        owner = None
        for known, key in self._keys:
            if hmac.compare_digest(known, digest):
                owner = key
        return owner if token else None


def _bearer_token(value: bytes) -> bytes:
    """What follows `Bearer`; empty when the scheme is another one or nothing follows."""
    scheme, _, token = value.strip(_BLANKS).partition(b" ")
    return token.strip(_BLANKS) if scheme.lower() == _BEARER else b""


def _without_secret(key: Key) -> Key:
    """The key with its digest in place of its text, so that no dump of memory or log line can hold it."""
    return key.model_copy(update={"key": None, "sha256": key.digest().hex()})

"""Who is calling, by the key in the headers."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from gateway.config import Key
from gateway.policy import admission
from gateway.policy.admission import KeyRing

RING = KeyRing(
    [
        Key(name="dify", key=SecretStr("sk-dify")),
        Key(name="editor", sha256=hashlib.sha256(b"sk-editor").hexdigest().upper()),
        Key(name="accent", key=SecretStr("clé")),
    ]
)


def owner(*headers: tuple[bytes, bytes]) -> str | None:
    key = RING.find(headers)
    return None if key is None else key.name


@pytest.mark.parametrize(
    "value, expected",
    [
        (b"Bearer sk-dify", "dify"),
        (b"bearer sk-dify", "dify"),
        (b"BEARER   sk-dify", "dify"),
        (b"Bearer sk-editor", "editor"),
        (b"Bearer sk-dify \t", "dify"),
        ("Bearer clé".encode(), "accent"),
        (b"Bearer caf\xe9", None),
        (b"Bearer cl\xe9", None),
        ("Bearer “sk-dify”".encode(), None),
        (b"Bearer \xef\xbb\xbfsk-dify", None),
        (b"\xef\xbb\xbfBearer sk-dify", None),
        (b"Bearer \xff\xfe\x00", None),
        (b"Bearer sk-dify\n", None),
        (b"Bearer sk-Dify", None),
        (b"Bearer sk-dify sk-dify", None),
        (b"Bearer sk-dif", None),
        (b"Bearer sk-dify, Bearer x", None),
        (b"Bearer", None),
        (b"Bearer ", None),
        (b"", None),
        (b"sk-dify", None),
        (b"Basic c2stZGlmeQ==", None),
        (b"Basic sk-dify", None),
        (b"Bearersk-dify", None),
    ],
)
def test_a_bearer_token_opens_or_is_refused_and_never_breaks_anything(value: bytes, expected: str | None) -> None:
    """C142: a token that is not ASCII is a wrong key, not an error; the scheme's case does not matter."""
    assert owner((b"host", b"x"), (b"authorization", value)) == expected


@pytest.mark.parametrize(
    "value, expected",
    [(b"sk-dify", "dify"), (b" sk-dify ", "dify"), (b"Bearer sk-dify", None), (b"", None), (b"\xe9", None)],
)
def test_the_header_of_anthropic_clients_opens_too(value: bytes, expected: str | None) -> None:
    assert owner((b"x-api-key", value)) == expected


def test_two_headers_of_one_kind_are_refused_even_when_they_agree() -> None:
    """C142: two readers could each take another one."""
    assert owner((b"authorization", b"Bearer sk-dify"), (b"authorization", b"Bearer sk-dify")) is None
    assert owner((b"authorization", b"Bearer sk-dify"), (b"authorization", b"Basic x")) is None
    assert owner((b"x-api-key", b"sk-dify"), (b"x-api-key", b"sk-editor")) is None


def test_one_good_key_is_enough_when_a_client_fills_both_headers() -> None:
    """Some clients send a placeholder in the header that they do not use."""
    assert owner((b"authorization", b"Bearer sk-dify"), (b"x-api-key", b"placeholder")) == "dify"
    assert owner((b"authorization", b"Bearer EMPTY"), (b"x-api-key", b"sk-editor")) == "editor"
    assert owner((b"authorization", b"Bearer sk-dify"), (b"x-api-key", b"sk-editor")) == "dify"


def test_without_headers_there_is_no_key_and_without_keys_the_ring_is_open() -> None:
    assert owner() is None
    assert not RING.is_open
    assert KeyRing([]).is_open
    assert KeyRing([]).find([(b"authorization", b"Bearer x")]) is None
    assert repr(KeyRing([])) == "KeyRing(open)"


def test_the_hash_of_nothing_opens_nothing() -> None:
    """A key whose digest is that of no bytes would otherwise let everybody in who sends an empty token."""
    ring = KeyRing([Key(name="void", sha256=hashlib.sha256(b"").hexdigest())])
    assert ring.find([(b"authorization", b"Bearer ")]) is None
    assert ring.find([(b"x-api-key", b"")]) is None


def test_a_found_key_keeps_its_rights_but_not_its_text() -> None:
    key = KeyRing([Key(name="k", key=SecretStr("sk-secret"), routes=("fast",), admin=True)]).find(
        [(b"authorization", b"Bearer sk-secret")]
    )
    assert key is not None
    assert (key.routes, key.admin, key.key) == (("fast",), True, None)
    assert "sk-secret" not in repr(key) + repr(RING)


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """C142: the time taken does not tell which key it was."""
    compared = []

    class Counting:
        @staticmethod
        def compare_digest(one: bytes, other: bytes) -> bool:
            compared.append(one)
            return hmac.compare_digest(one, other)

    monkeypatch.setattr(admission, "hmac", Counting)
    for token in (b"sk-dify", b"sk-editor", b"wrong"):
        compared.clear()
        RING.find([(b"authorization", b"Bearer " + token)])
        assert len(compared) == 3


@given(
    st.lists(
        st.tuples(st.sampled_from([b"authorization", b"x-api-key", b"cookie"]), st.binary(max_size=40)), max_size=4
    )
)
def test_no_bytes_of_a_stranger_open_or_raise(headers: list[tuple[bytes, bytes]]) -> None:
    assert RING.find(headers) is None

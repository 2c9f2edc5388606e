"""The model named in a body that is relayed unread."""

from __future__ import annotations

import time

import pytest

from gateway.errors import BadRequest
from gateway.wire.opaque import MAX_NAME, model_in


def form(*parts: bytes, boundary: bytes = b"xYz") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"


def field(name: bytes, value: bytes, head: bytes = b"") -> bytes:
    return b'Content-Disposition: form-data; name="%b"\r\n%b\r\n%b' % (name, head, value)


FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'


@pytest.mark.parametrize(
    "raw, model",
    [
        (b'{"model":"m","input":[1]}', "m"),
        (b'\n {"input":{"model":"inner"},"model":"m"}', "m"),
        (b'\xef\xbb\xbf{"model":"m"}', "m"),
        (b'{"mod\\u0065l":"m"}', "m"),
        (b'{"model":"\\ud83d"}', "\ud83d"),
        (b'{"model":7}', None),
        (b'{"input":1}', None),
        (b'{"model":"m"', None),
        (b'{"model":', None),
        (b"{}", None),
        (b"", None),
        (b"\x00\x01", None),
        (b"[1]", None),
        (form(field(b"model", b"whisper")), "whisper"),
        (form(FILE + b"\x00\xff--\r\n", field(b"model", b"whisper")), "whisper"),
        (form(field(b"model", "模型".encode(), b"Content-Type: text/plain; charset=utf-8\r\n")), "模型"),
        (form(b"content-disposition: form-data; name=model\r\n\r\nm"), "m"),
        (b"\r\n" + form(field(b"model", b"m")), "m"),
        (form(field(b"model", b"x" * (MAX_NAME + 1))), None),
        (form(field(b"model_name", b"m")), None),
        (form(b'Content-Disposition: form-data; name="model"; filename="m.txt"\r\n\r\nm'), None),
        (form(FILE), None),
        (b"--xYz\r\nContent-Disposition: form-data", None),
        (b"--" + b"b" * 300 + b"\r\n", None),
        (b"--xYz\r\n--xYz--\r\n", None),
    ],
)
def test_finds_the_model(raw: bytes, model: str | None) -> None:
    assert model_in(raw) == model


def test_a_file_that_looks_like_a_field_is_not_one() -> None:
    """C078: what a file holds must not choose the route."""
    content = b"\r\n--other\r\n" + field(b"model", b"expensive") + b"\r\n--other--"
    assert model_in(form(FILE + content, field(b"model", b"cheap"))) == "cheap"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"cheap","model":"expensive"}',
        b'{"model":"cheap","mod\\u0065l":"expensive"}',
        form(field(b"model", b"cheap"), field(b"model", b"expensive")),
    ],
)
def test_a_model_named_twice_is_refused(raw: bytes) -> None:
    """C051."""
    with pytest.raises(BadRequest) as caught:
        model_in(raw)
    assert caught.value.code == "duplicate_key"


@pytest.mark.parametrize(
    "raw",
    [
        form(b"Content-Disposition: form-data;" + b" name=model" * 100_000 + b"\r\n" + b"a\r\n" * 300_000),
        form(*[b"a: b\r\n\r\nx"] * 200_000),
        b'{"a":' + b'"model",' * 100_000,
        b"--a\r\n" + b"\r\n--" * 500_000,
    ],
    ids=["names", "parts", "no-end", "dashes"],
)
def test_is_linear(raw: bytes) -> None:
    """C070: the look-up must not be the denial of service."""
    began = time.perf_counter()
    model_in(raw)
    assert time.perf_counter() - began < 2

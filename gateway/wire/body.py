"""A request's body: JSON, an object, in UTF-8, not too deep, and saying once what the gateway decides on.

orjson reads it; only what orjson refuses is read again by `json`, which takes half a surrogate pair and numbers
beyond a double. Such a body is the upstream's to judge, not ours (C045, C048).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Final, NoReturn

import orjson

from gateway.errors import BadRequest
from gateway.wire.spans import NotJsonError, has_escaped_letters, loads_leniently, members
from gateway.wire.splice import Document

MAX_DEPTH: Final = 1000
_ORJSON_DEPTH: Final = 1024  # orjson's own limit; the tests would notice another
_PADDING: Final = _ORJSON_DEPTH - MAX_DEPTH

# Keys that decide what the gateway does. Said twice, one parser takes the first and another the last (C051).
DECISIVE: Final = frozenset({
    "model", "messages", "prompt", "input", "system", "stream", "stream_options", "n", "logprobs", "max_tokens",
    "max_completion_tokens", "max_output_tokens", "chat_template_kwargs", "reasoning_effort", "reasoning", "thinking",
    "output_config",
})  # fmt: skip

_NEEDLES: Final = {key: b'"%b"' % key.encode() for key in DECISIVE}

_UTF8_MARK: Final = b"\xef\xbb\xbf"
_ENCODING_MARKS: Final = (  # UTF-32 before UTF-16, whose mark it begins with
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_ENCODING_NAMES: Final = {"utf-16": "UTF-16", "utf-32": "UTF-32"}
_KINDS: Final = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
_TOKEN: Final = re.compile(rb'[\[{]|[\]}]|"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

# What `json` reports, in words of ours: text of libraries does not reach clients.
_REASONS: Final = (
    ("Expecting value", "a value is missing"),
    ("Expecting ','", "a comma or a closing bracket is missing"),
    ("Expecting ':'", "a colon is missing after a key"),
    ("Expecting property name", "a key in double quotes is missing"),
    ("Illegal trailing comma", "a comma stands before a closing bracket"),
    ("Unterminated string", "a string that begins here has no end"),
    ("Invalid control character", "a control character in a string is not escaped"),
    ("Invalid", "a backslash in a string begins no valid escape"),
    ("Extra data", "something follows after the end of the object"),
)


class RequestBody:
    """`raw`: the bytes as they came, without a byte-order mark; `data`: the same, parsed."""

    __slots__ = ("data", "raw")

    def __init__(self, raw: bytes, data: dict[str, object]) -> None:
        self.raw = raw
        self.data = data

    def document(self) -> Document:
        """The body for edits."""
        return Document(self.raw, self.data)


def read_object(raw: bytes, decisive: frozenset[str] = DECISIVE) -> RequestBody:
    """The body of a request. Raises BadRequest: invalid_json, json_too_deep, or duplicate_key for a `decisive` key."""
    raw = raw.removeprefix(_UTF8_MARK)
    try:
        data = _parse(raw)
    except orjson.JSONDecodeError:
        data = _parse_refused(raw)
    if not isinstance(data, dict):
        kind = _KINDS.get(type(data), "null")
        raise BadRequest(f"The request body is {kind}. It must be a JSON object: `{{…}}`.", code="invalid_json")
    _check_duplicates(raw, data, decisive)
    return RequestBody(raw, data)


def _parse(raw: bytes) -> object:
    """As orjson reads it, but with our limit: inside `_PADDING` arrays its own limit of levels becomes ours."""
    if len(raw) <= 2 * MAX_DEPTH or raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        value: object = orjson.loads(raw)
        return value
    value = orjson.loads(b"%b%b%b" % (b"[" * _PADDING, raw, b"]" * _PADDING))
    for _ in range(_PADDING):
        if not isinstance(value, list) or len(value) != 1:  # `{},{}` is valid in there and nowhere else
            return orjson.loads(raw)  # raises
        (value,) = value
    return value


def _parse_refused(raw: bytes) -> object:
    """What orjson refused, read by `json`. Raises BadRequest with a sentence that says what is wrong."""
    if not raw.strip():
        raise BadRequest("The request body is empty. Send a JSON object.", code="invalid_json")
    encoding = _foreign_encoding(raw)
    if encoding is not None:
        raise BadRequest(f"The request body is {encoding}. JSON must be sent as UTF-8.", code="invalid_json")
    if _is_too_deep(raw):
        _refuse_depth()
    try:
        return loads_leniently(raw)
    except json.JSONDecodeError as error:
        _refuse_json(f"{_reason(error.msg)} at line {error.lineno}, column {error.colno}")
    except UnicodeDecodeError as error:
        _refuse_json(f"the text is not UTF-8 at byte {error.start}")
    except NotJsonError as error:
        _refuse_json(f"`{error}` is no number in JSON; send null or leave the field out")
    except RecursionError:  # several hundred levels, in a text that only `json` reads
        _refuse_depth()


def _check_duplicates(raw: bytes, data: dict[str, object], decisive: frozenset[str]) -> None:
    """Raises BadRequest for a decisive key that stands twice at the top level, however it is spelled.

    Nearly always each key's spelling is in the text once and letters are not escaped; only else are members scanned.
    """
    for key in data:
        if key in decisive and raw.count(_NEEDLES.get(key) or b'"%b"' % key.encode()) > 1:
            break
    else:
        if not has_escaped_letters(raw):
            return
    counts = Counter(member.key for member in members(raw))
    for key in counts:
        if counts[key] > 1 and key in decisive:
            raise BadRequest(
                f"`{key}` stands {counts[key]} times in the request body, and programs differ in which one they take. "
                "Send it once.",
                code="duplicate_key",
            )


def _foreign_encoding(raw: bytes) -> str | None:
    """The name of an encoding that is not UTF-8, by its mark or by where the zeros of its first characters are."""
    for mark, name in _ENCODING_MARKS:
        if raw.startswith(mark):
            return name
    if 0 in raw[:4]:
        return _ENCODING_NAMES.get(json.detect_encoding(raw)[:6])
    return None


def _is_too_deep(raw: bytes) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for token in _TOKEN.finditer(raw):
        byte = raw[token.start()]
        if byte in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif byte in b"]}":
            depth -= 1
    return False


def _reason(message: str) -> str:
    return next((reason for start, reason in _REASONS if message.startswith(start)), "it cannot be read")


def _refuse_json(what: str) -> NoReturn:
    raise BadRequest(f"The request body is not valid JSON: {what}.", code="invalid_json") from None


def _refuse_depth() -> NoReturn:
    message = f"The request body is nested more than {MAX_DEPTH} levels deep, which nothing needs. Flatten it."
    raise BadRequest(message, code="json_too_deep") from None

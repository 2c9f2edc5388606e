"""What a caller says about its own patience: time limits and `Prefer`. Pure; called for each request.

Limits (fault-catalogue 3.10), first usable one of:

    x-request-timeout-ms              ms, 1 to 8 digits
    grpc-timeout                      1 to 8 digits and H, M, S, m, u or n
    x-envoy-expected-rq-timeout-ms    ms, set by an Envoy in front of us
    x-stainless-read-timeout          s, what the OpenAI and Anthropic libraries for Python bear *between two bytes*

Values that are of no use (0, negative, too long, text) are ignored and counted. The last one is no limit of the whole:
a heartbeat satisfies it (client-contract §8), so the answer says where the figure came from.
"""

from __future__ import annotations

import re
from math import ceil
from typing import Final, NamedTuple

from gateway.wire.headers import Headers


class CallerLimits(NamedTuple):
    """How long a caller waits.

    `deadline_ms`: from the request's arrival, None for no word of it. `is_silence`: it came from the library's read
    timeout and only limits silence. `read_timeout_ms`: that timeout, whatever the deadline came from (the header of the
    Python libraries, else `x-stainless-timeout` of the JavaScript ones). `unusable`: values that were ignored.
    """

    deadline_ms: int | None = None
    is_silence: bool = False
    read_timeout_ms: int | None = None
    unusable: int = 0


class Preference(NamedTuple):
    """What `Prefer` (RFC 7240) and `x-gateway-pending` ask for."""

    respond_async: bool = False
    wait_s: float | None = None  # the caller's own budget, with or without `respond-async`
    allows_pending: bool = False  # `x-gateway-pending: allow`

    @property
    def accepts_pending(self) -> bool:
        """202 may be the answer, in either way of saying so."""
        return self.respond_async or self.allows_pending


NO_LIMITS: Final = CallerLimits()
NO_PREFERENCE: Final = Preference()

_UNIT_MS: Final = {b"H": 3_600_000.0, b"M": 60_000.0, b"S": 1000.0, b"m": 1.0, b"u": 1e-3, b"n": 1e-6}
_MS: Final = re.compile(rb"([0-9]{1,8})")
_GRPC: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS: Final = re.compile(rb"([0-9]{1,8}(?:\.[0-9]{1,20})?)")
_READ_TIMEOUT: Final = b"x-stainless-read-timeout"
_TIMEOUT: Final = b"x-stainless-timeout"  # of the whole call, but it names no limit of ours: see `read_timeout_ms`
_FORMS: Final = {
    b"x-request-timeout-ms": (_MS, 1.0),
    b"grpc-timeout": (_GRPC, 0.0),  # the unit is in the value
    b"x-envoy-expected-rq-timeout-ms": (_MS, 1.0),
    _READ_TIMEOUT: (_SECONDS, 1000.0),
    _TIMEOUT: (_SECONDS, 1000.0),
}
_DEADLINES: Final = (b"x-request-timeout-ms", b"grpc-timeout", b"x-envoy-expected-rq-timeout-ms")
_PREFERENCE_NAMES: Final = frozenset((b"prefer", b"x-gateway-pending"))


def caller_limits(headers: Headers) -> CallerLimits:
    """The caller's limits; names in lower case. `NO_LIMITS` itself where no header says anything."""
    found = [field for field in headers if field[0] in _FORMS]
    if not found:
        return NO_LIMITS
    usable: dict[bytes, int] = {}
    unusable = 0
    for name, value in found:
        limit = _milliseconds(value, *_FORMS[name])
        if limit is None:
            unusable += 1
        else:
            usable.setdefault(name, limit)
    silence = usable.get(_READ_TIMEOUT)
    read_timeout = usable.get(_TIMEOUT) if silence is None else silence
    for name in _DEADLINES:
        if name in usable:
            return CallerLimits(usable[name], False, read_timeout, unusable)
    return CallerLimits(silence, silence is not None, read_timeout, unusable)


def _milliseconds(value: bytes, form: re.Pattern[bytes], unit_ms: float) -> int | None:
    """The value in whole ms, rounded up, or None. A limit of nothing is no limit."""
    match = form.fullmatch(value)
    if match is None:
        return None
    return ceil(round(float(match[1]) * (unit_ms or _UNIT_MS[match[2]]), 6)) or None


# Prefer. preference = token [ "=" word ] *( ";" [ parameter ] ), several in a field by commas, fields as if joined.

MAX_FIELD: Final = 1024  # bytes of one field that are looked at
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED: Final = rb'"((?:[^"\\]|\\.)*+)"'
_ELEMENT: Final = re.compile(rb'(?:[^,"]|"(?:[^"\\]|\\.)*+")*+(?:,|\Z)')
_ITEM: Final = re.compile(
    rb"[ \t]*(" + _TOKEN + rb")[ \t]*(?:=[ \t]*(?:" + _QUOTED + rb"|(" + _TOKEN + rb"))?[ \t]*)?(?:;|\Z)", re.DOTALL
)
_WAIT: Final = re.compile(rb"[0-9]{1,8}(?:\.[0-9]{1,3})?")  # RFC 7240 has whole seconds; a fraction is meant as such


def preference(headers: Headers) -> Preference:
    """What the caller prefers; `NO_PREFERENCE` itself where it says nothing. What is not understood is ignored."""
    found = [field for field in headers if field[0] in _PREFERENCE_NAMES]
    if not found:
        return NO_PREFERENCE
    named: dict[bytes, bytes] = {}
    allows_pending = False
    for name, value in found:
        if name == b"prefer":
            _read(value[:MAX_FIELD], named)
        else:
            allows_pending = allows_pending or value.strip().lower() == b"allow"
    wait = named.get(b"wait", b"")
    return Preference(
        respond_async=named.get(b"respond-async") == b"",
        wait_s=float(wait) if _WAIT.fullmatch(wait) else None,
        allows_pending=allows_pending,
    )


def _read(field: bytes, named: dict[bytes, bytes]) -> None:
    """Adds the preferences of one field. Of one that is named twice the first counts (RFC 7240 §2)."""
    at = 0
    while at < len(field):
        element = _ELEMENT.match(field, at)
        if element is None:  # a quote that never ends: nothing after it can be told
            return
        at = element.end()
        item = _ITEM.match(field[element.start() : at].removesuffix(b",").rstrip(b" \t"))
        if item is not None:
            quoted = item[2]
            value = re.sub(rb"\\(.)", rb"\1", quoted, flags=re.DOTALL) if quoted else item[3]
            named.setdefault(item[1].lower(), value or b"")

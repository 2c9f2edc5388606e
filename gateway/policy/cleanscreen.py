"""A look at a body's raw bytes that tells whether cleaning could change anything.

Most prompts are clean, and then this is all that cleaning costs: well under a microsecond for each of its rules on a
chat turn, some milliseconds on a megabyte. It is wrong in one direction only: a body that cleaning would change is
always found, a found body may turn out to need nothing.

JSON can spell one character in several ways (`—`, `\\u2014`; `/`, `\\/`), so each rule knows all spellings. A long run
of one character repeats with a period that divides 12 bytes whatever its spelling is, so it is found by comparing
neighbouring pieces at few places; a run in *mixed* spelling has a place where two spellings of it meet.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.config import MAX_ALLOWED_RUN, Clean
from gateway.policy.cleantext import LENGTHENERS

# A backslash that is not itself escaped, then one of these letters. Only such escapes matter here.
_NOTABLE_ESCAPE: Final = re.compile(rb"\\(?<!\\\\)(?:\\\\)*+[ubf/]")

_SHORT_CONTROL: Final = re.compile(rb"\\(?<!\\\\)(?:\\\\)*+[bf]")
_ESCAPED_CONTROL: Final = re.compile(rb"\\u00(?:0[0-8bBcCeEfF]|1[0-9a-fA-F]|7[fF]|8[0-46-9a-fA-F]|9[0-9a-fA-F])")
_RAW_C1: Final = re.compile(rb"\xc2[\x80-\x84\x86-\x9f]")
# A half that does not stand beside its other half. Of a pair behind one more backslash nothing is sure.
_LONE_SURROGATE: Final = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F][0-9a-fA-F]{2}(?<![^\\]\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)

_RAW_DASH: Final = rb"\xe2(?:\x80[\x93-\x95]|\xb8[\xba\xbb])"
_SMALL_DASH: Final = "\ufe58".encode()
_ESCAPED_DASH: Final = rb"\\u(?:201[345]|2[eE]3[aAbB]|[fF][eE]58)"
# Written out three times: a pattern that begins with a plain byte is searched for fifty times faster.
_RAW_DASHES: Final = re.compile(_RAW_DASH * 3)
_ESCAPED_DASHES: Final = re.compile(_ESCAPED_DASH * 3)
_MIXED_DASHES: Final = re.compile(rb"(?:%b|%b|%b){3}" % (_RAW_DASH, _SMALL_DASH, _ESCAPED_DASH))

_PERIOD: Final = 12  # bytes; least common multiple of 1–4 (UTF-8), 2 (`\n`), 6 (`\u2014`) and 12 (a pair of those)
_SIZES: Final = (1, 2, 3, 4, 6, 12)  # bytes that one character may take
_STRIDE: Final = 240
_REPEATS: Final = re.compile(rb"(.{12})\1*+", re.DOTALL)
_ASCII_ESCAPE: Final = re.compile(rb"\\u(00[0-7][0-9a-f])")
_ANY_ESCAPE: Final = re.compile(rb"\\u([0-9a-f]{4})")
_MOST_ESCAPES: Final = 32  # different ones to look at one by one; a body that mixes more is cleaned without asking
_SHORT_ESCAPES: Final = {
    0x08: b"\\b", 0x09: b"\\t", 0x0A: b"\\n", 0x0C: b"\\f", 0x0D: b"\\r", 0x22: b'\\"', 0x2F: b"\\/", 0x5C: b"\\\\",
}  # fmt: skip

_UNUSUAL_ROLE: Final = re.compile(
    rb'"role"[ \t\r\n]*+:[ \t\r\n]*+"'
    rb'(?!(?:user|assistant|system|tool|developer|function)")'
    rb'(?i:human|ai|bot|user|assistant|system|tool|developer|function)"'
)
_ESCAPED_LETTER: Final = re.compile(rb"\\u00[4-7]")

_SPACE: Final = rb"(?: |\\u0020)"
_WIDE_SPACE: Final = rb"(?:\xe3\x80\x80|\\u3000)"
_LINE_FEED: Final = rb"\\(?:n|u000[aA])"
_BLANK: Final = rb"(?: |\\[tr]|\\u0020|\\u0009|\\u000[dD])"
_SPARE_SPACE: Final = re.compile(
    rb'%b{2}|%b{2}|(?:"|%b)(?:%b*+%b){2}' % (_SPACE, _WIDE_SPACE, _LINE_FEED, _BLANK, _LINE_FEED)
)


def may_need_cleaning(raw: bytes, rules: Clean) -> bool:
    """False if `clean_body` would change nothing in this JSON body, whatever its kind; True if it might."""
    is_ascii = raw.isascii()
    has_escapes = b"\\" in raw and _NOTABLE_ESCAPE.search(raw) is not None
    is_escaped = has_escapes and b"\\u" in raw
    return (
        (rules.control and _may_hold_control(raw, is_ascii, has_escapes, is_escaped))
        or (rules.dashes and _may_hold_dashes(raw, is_ascii, is_escaped))
        or (
            rules.long_runs
            and len(raw) > MAX_ALLOWED_RUN
            and _may_hold_long_run(raw, is_ascii, has_escapes, is_escaped)
        )
        or (rules.roles and _may_hold_role(raw, is_escaped))
        or (rules.whitespace == "collapse" and (b"  " in raw or _SPARE_SPACE.search(raw) is not None))
    )


def _may_hold_control(raw: bytes, is_ascii: bool, has_escapes: bool, is_escaped: bool) -> bool:
    """Characters that may not stand raw in JSON have to be escapes; DEL and C1 may be raw."""
    if b"\x7f" in raw or (not is_ascii and _RAW_C1.search(raw) is not None):
        return True
    if not has_escapes:
        return False
    if (b"\\b" in raw or b"\\f" in raw) and _SHORT_CONTROL.search(raw) is not None:
        return True
    return is_escaped and (_ESCAPED_CONTROL.search(raw) is not None or _LONE_SURROGATE.search(raw) is not None)


def _may_hold_dashes(raw: bytes, is_ascii: bool, is_escaped: bool) -> bool:
    if is_ascii:
        return is_escaped and _ESCAPED_DASHES.search(raw) is not None
    if _RAW_DASHES.search(raw) is not None:
        return True
    return (is_escaped or _SMALL_DASH in raw) and _MIXED_DASHES.search(raw) is not None


def _may_hold_role(raw: bytes, is_escaped: bool) -> bool:
    """A role that would be renamed; or letters spelled as escapes, which may be any role under any key."""
    return _UNUSUAL_ROLE.search(raw) is not None or (is_escaped and _ESCAPED_LETTER.search(raw) is not None)


def _may_hold_long_run(raw: bytes, is_ascii: bool, has_escapes: bool, is_escaped: bool) -> bool:
    if is_escaped:
        raw = raw.lower()  # hexadecimal digits of an escape may be of either case, even within one run
    places = range(_PERIOD // 2, len(raw) - 2 * _PERIOD + 1, _STRIDE)
    repeating = [at for at in places if raw[at : at + 12] == raw[at + 12 : at + 24]]
    if repeating and any(_is_long_run(raw, at) for at in repeating):
        return True
    return has_escapes and _may_mix_spellings(raw, is_ascii, is_escaped)


def _is_long_run(raw: bytes, at: int) -> bool:
    """True if what repeats here goes on for so long that it may be a run beyond the limit that began a stride ago."""
    unit = raw[at : at + _PERIOD]
    if unit.isalnum():
        return False  # letters and digits are never cut; base64 is full of `AAAA`, and each place of it comes here
    repeats = _REPEATS.match(raw, at)
    assert repeats is not None  # there are 24 bytes
    size = next(size for size in _SIZES if unit == unit[:size] * (_PERIOD // size))
    return repeats.end() - at > MAX_ALLOWED_RUN * size - _STRIDE - 2 * _PERIOD


def _may_mix_spellings(raw: bytes, is_ascii: bool, is_escaped: bool) -> bool:
    """True if two spellings of a character that could be cut stand side by side. `raw` is in lower case.

    A slash spelled in two ways is left to the comparison unless the escaped one comes first or two plain ones do:
    otherwise all but one of the run are spelled alike.
    """
    if b"\\//" in raw or b"//\\/" in raw:
        return True
    if not is_escaped:
        return False
    codes = set((_ASCII_ESCAPE if is_ascii else _ANY_ESCAPE).findall(raw))
    return len(codes) > _MOST_ESCAPES or any(_meets_itself(raw, b"\\u" + code, int(code, 16)) for code in codes)


def _meets_itself(raw: bytes, escape: bytes, code: int) -> bool:
    if 0xD800 <= code <= 0xDFFF:
        return b"\xf0" in raw  # a pair spells a character of four bytes, and such are here too
    character = chr(code)
    if character.isalnum() and character not in LENGTHENERS:
        return False
    spellings = [character.encode(), *([_SHORT_ESCAPES[code]] if code in _SHORT_ESCAPES else [])]
    return any(spelling + escape in raw or escape + spelling in raw for spelling in spellings)

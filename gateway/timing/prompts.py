"""How long a prompt is and which of it an upstream has seen before, from the bytes of a request's body.

Nothing is decoded or parsed: a body is counted by C code, in about a microsecond for a chat turn and 1–3 ms for a
megabyte. It counts the whole JSON text, so that tools and templates are in it; what the framing adds is learned with
the factor κ of each upstream (latency-methods §2.1).

Blocks are 512 bytes of the text from the value of `messages`, `prompt` or `input` on, each hashed together with all
before it, so equal hashes mean equal beginnings. Settings that stand before that value do not matter; those behind it
only touch the last block, and an incomplete last block is never counted as known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Self

BLOCK: Final = 512  # bytes; latency-methods §2.1
MAX_BLOCKS: Final = 4096  # hashed per prompt: 2 MiB of text, which no context window holds
INDEX_BLOCKS: Final = (
    16_384  # per upstream: 8 MiB of text is about the 2 M tokens that the caches of large servers hold
)

_LEAST_BLOCKS: Final = 256
_SLACK, _STEP = 0.15, 0.02

TOKENS_PER_CJK: Final = 0.7
TOKENS_PER_OTHER: Final = 0.25
_IMAGE_CHARACTERS: Final = 4000  # an inline image costs about 1,000 tokens, however many bytes it has

_KEYS: Final = (b'"messages"', b'"prompt"', b'"input"')  # inside a string the quotes would be escaped
_NOT_LEAD: Final = bytes(range(0xC0))
# Lead bytes of U+3000–U+DFFF and U+F000–U+FFFF (ideographs, kana, Hangul, full-width forms) and of the planes above
# (rarer ideographs; emoji, of which each costs a token too).
_NOT_CJK_LEAD: Final = bytes(set(range(256)) - {*range(0xE3, 0xEE), 0xEF, *range(0xF0, 0xF5)})
_NOT_THREE: Final = bytes(set(range(256)) - set(range(0xE0, 0xF0)))
_NOT_FOUR: Final = bytes(set(range(256)) - set(range(0xF0, 0xF8)))
# The first digit of `\uXXXX`: 0, 1, 2 and e are not CJK.
_DIGITS: Final = bytes.maketrans(b"12eED", b"0000d")
_SMALL_BASE64: Final = 4096  # bytes of a body that are not worth looking through for images
_PIECES, _PIECE = 8, 16_384  # how many bytes of a long body tell of what kind its `\uXXXX` are


class Prompt:
    """Characters of a request's body and the chained hashes of its blocks, which are made when first asked for."""

    __slots__ = ("_block_share", "_blocks", "_body", "cjk", "other", "tokens")

    def __init__(
        self, cjk: int, other: int, blocks: Sequence[int] = (), block_share: float = 0.0, body: bytes | None = None
    ) -> None:
        """`block_share`: of the prompt, per block. A `body` is kept until its blocks were asked for."""
        self.cjk = cjk
        self.other = other
        self.tokens = max(1.0, TOKENS_PER_CJK * cjk + TOKENS_PER_OTHER * other)
        """Estimate before any factor of an upstream."""
        self._blocks = blocks if body is None else None
        self._block_share = block_share
        self._body = body

    def __repr__(self) -> str:
        return f"Prompt({self.cjk} CJK and {self.other} other characters, about {self.tokens:.0f} tokens)"

    @classmethod
    def of_tokens(cls, tokens: float, blocks: Sequence[int] = (), tokens_per_block: int = 512) -> Self:
        """A prompt known by its length and block ids only, as traces of other people are."""
        return cls(0, round(tokens / TOKENS_PER_OTHER), blocks, min(1.0, tokens_per_block / max(1.0, tokens)))

    @property
    def blocks(self) -> Sequence[int]:
        if self._blocks is None:
            assert self._body is not None
            self._blocks, self._block_share = _chain(self._body)
            self._body = None
        return self._blocks

    def share_of(self, blocks: int) -> float:
        """How much of the prompt its first so many blocks are, 0 … 1."""
        return min(1.0, blocks * self._block_share)


class PrefixIndex:
    """The blocks that were sent to one upstream lately; `salt` keeps its models apart.

    The blocks of a prompt are touched last to first. So a block is never older than those that build on it, what is
    known of a prompt is always a beginning of it, and its end is found by halving.
    """

    __slots__ = ("_bound", "_known", "_most")

    def __init__(self, bound: int = INDEX_BLOCKS) -> None:
        self._bound = bound
        self._most = bound
        self._known: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self._known)} of {self._bound} blocks)"

    def __len__(self) -> int:
        return len(self._known)

    def cached_share(self, prompt: Prompt, salt: int = 0) -> float:
        """The share of the prompt whose blocks are known, 0 … 1."""
        blocks, known = prompt.blocks, self._known
        if not blocks or blocks[0] ^ salt not in known:
            return 0.0
        low, high = 1, len(blocks)
        while low < high:
            half = (low + high + 1) // 2
            if blocks[half - 1] ^ salt in known:
                low = half
            else:
                high = half - 1
        return prompt.share_of(low)

    def add(self, prompt: Prompt, salt: int = 0) -> None:
        known = self._known
        for block in reversed(prompt.blocks[: self._bound]):
            known[block ^ salt] = None
            known.move_to_end(block ^ salt)
        while len(known) > self._bound:
            known.popitem(last=False)

    def learn(self, expected_tokens: float, cached_tokens: float) -> None:
        """What a server had in its cache, where this index expected so much: it remembers less, or more, than we do."""
        if cached_tokens < expected_tokens * (1 - _SLACK):
            self._bound = max(_LEAST_BLOCKS, int(self._bound * (1 - _STEP)))
        elif cached_tokens > expected_tokens * (1 + _SLACK):
            self._bound = min(self._most, int(self._bound * (1 + _STEP)) + 1)

    def clear(self) -> None:
        """The upstream was restarted: its cache is empty."""
        self._known.clear()


def measure(raw: bytes) -> Prompt:
    """Counts the characters of a JSON body as its reader would see them: an escape is one character.

    Exact up to pathological text (a literal backslash right before an escape); above 128 KiB the kinds of `\\uXXXX`
    are taken from a sample.
    """
    image_bytes, images = _images(raw) if len(raw) > _SMALL_BASE64 else (0, 0)
    characters, cjk = (len(raw), 0) if raw.isascii() else _wide(raw)
    slashes = raw.count(b"\\")
    if slashes:
        characters -= slashes - raw.count(b"\\\\")  # one each: `\n` is a character, `\\` is two slashes and one
        escapes = raw.count(b"\\u")
        if escapes:
            spared, wide = _escaped(raw, escapes)
            characters -= spared
            cjk += wide
    other = characters - cjk - image_bytes + images * _IMAGE_CHARACTERS
    return Prompt(cjk, max(0, other), body=raw)


def _wide(raw: bytes) -> tuple[int, int]:
    """Characters, and those of them that are CJK, in UTF-8."""
    leads = raw.translate(None, _NOT_LEAD)
    fours = len(leads.translate(None, _NOT_FOUR))
    threes = len(leads.translate(None, _NOT_THREE))
    continuations = len(leads) + threes + 2 * fours  # one each, one more of three, two more of four
    return len(raw) - continuations, len(leads.translate(None, _NOT_CJK_LEAD))


def _escaped(raw: bytes, escapes: int) -> tuple[int, int]:
    """Of a text with so many `\\u`: the bytes by which `\\uXXXX` are longer than `\\n` would be, and the CJK ones."""
    sample = raw
    if len(raw) > _PIECES * _PIECE:
        step = (len(raw) - _PIECE) // (_PIECES - 1)
        sample = b"".join([raw[at : at + _PIECE] for at in range(0, step * _PIECES, step)])
    found = escapes if sample is raw else sample.count(b"\\u")
    if not found:
        return 4 * escapes, 0
    digits = sample.translate(_DIGITS)
    literal = digits.count(b"\\\\u")  # a backslash, then the letter u
    narrow = digits.count(b"\\u0") - digits.count(b"\\\\u0")
    pairs = digits.count(b"\\ud8")  # the halves of one character; ud8 leads all pairs below U+50000
    whole = found - literal
    scale = escapes / found
    return round((4 * whole + pairs) * scale), round(max(0, whole - narrow - pairs) * scale)


def _images(raw: bytes) -> tuple[int, int]:
    """Bytes of base64 in data URIs, and how many there are."""
    length = number = 0
    at = raw.find(b";base64,")
    while at >= 0:
        end = raw.find(b'"', at)
        if end < 0:
            break
        length += end - at
        number += 1
        at = raw.find(b";base64,", end)
    return length, number


def _start(raw: bytes) -> int:
    for key in _KEYS:
        at = raw.find(key)
        if at >= 0:
            return at + len(key)
    return 0


def _chain(raw: bytes) -> tuple[list[int], float]:
    start = _start(raw)
    length = len(raw) - start
    blocks: list[int] = []
    chained = 0
    for at in range(start, start + min(length // BLOCK, MAX_BLOCKS) * BLOCK, BLOCK):
        chained = hash((chained, raw[at : at + BLOCK]))
        blocks.append(chained)
    return blocks, BLOCK / max(1, length)

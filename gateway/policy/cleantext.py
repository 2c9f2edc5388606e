"""Text rules of prompt cleaning (spec.md §5): what is cut, and where nothing may be touched.

One text in, one text out; the bodies that hold texts are `clean.py`'s business. First the control characters go,
character by character. All other steps only *propose* edits; one walk from left to right then drops the proposals
that lie in code, front matter or a diff, and applies the rest at once.

Cleaning twice gives what cleaning once gave, because no edit can move the border of a protected place:

- a protected place is never edited, its marks included;
- an edit never removes the last of a kind of character, nor a line, nor the beginning of a line;
- a cut run keeps `KEPT_RUN` characters, and every mark of structure is shorter than that (`_MARK`, `_INDENT`).

Linear on any input: patterns are possessive or bounded, each line is looked at once, runs are found by sampling.

Decisions a reader may question:

- Letters and digits are never cut, however long the run (spec.md, against case C069): a run of `A` is base64, DNA or
  a checksum, and losing part of it is worse than a slow tokenizer. `ー` and `ｰ` are letters to Unicode but written
  like a rule when they run on, so they are cut, and only beyond the limit.
- A line indented by four columns or more is code, even in the middle of a paragraph, unless it is a list item.
- A code fence that never closes reaches to the end of the text. A fence may also begin behind words (`Fix:```py`).
- Inline code ends on its line. Sixteen or more backticks or tildes in a row are decoration, not a mark.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Literal, TypeAlias

import regex

from gateway.config import MAX_ALLOWED_RUN, Clean

Step = Literal["control", "dashes", "long_runs", "whitespace"]
_STEPS: Final[tuple[Step, ...]] = ("dashes", "whitespace", "long_runs")  # of two that begin alike, the first wins

KEPT_RUN = 64  # characters left of a run that was too long (spec.md §5)
CJK_DASH = "——"  # the Chinese dash is two em dashes
DASHES = "\u2014\u2013\u2015\u2e3a\u2e3b\ufe58"  # — – ― ⸺ ⸻ ﹘
SHOWN = 12  # characters on each side of a change
_grapheme = regex.compile(r"\X")  # what `re` cannot: extended grapheme clusters (UAX 29)
DESCRIBED_CHANGES = 200  # more than a person reads; the counts of `clean_text` stay exact

# C0 without tab, LF, CR; DEL; C1 without NEL. Never Cf: joiners and direction marks carry meaning (C063, C064).
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x84\x86-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LONE_SURROGATE = re.compile("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")

_DASH_RUN = re.compile(f"[{DASHES}]{{3,}}")
_SPACE_RUN = re.compile(" {2,}|\u3000{2,}")  # of one kind only, so that no kind ever disappears
_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*+\n){2,}+")

LENGTHENERS = "\u30fc\uff70"  # ー ｰ
_STRIDE = MAX_ALLOWED_RUN // 2  # a run beyond the limit fills at least one stretch between two samples

# Everything below looks at a text with one line feed put before it, so that every line begins behind one.
_MARK = r"(?P<mark>`{3,15}(?!`)|~{3,15}(?!~))"
_INDENT = r"[ \t]{0,63}+"
_LINE_END = r"[ \t\r]*+(?=\n|\Z)"
_CLOSING = r"[ \t>]*+(?P=mark)[`~]*+" + _LINE_END
_FENCE_AT_START = (
    _INDENT + r"(?:>[ \t>]*+)?+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?+" + _MARK + r"(?:(?<=`)[^`\n]*+|(?<=~).*+)(?=\n|\Z)"
)
_FENCE_BEHIND_WORDS = r"[^`\n]*+(?:`{1,2}+(?!`)[^`\n]*+)*+(?P<late>`{3,15}(?!`))[ \t]*+[\w+#.-]*+" + _LINE_END
_HUNK = r"@@ ++-\d++(?:,\d++)?+ ++\+\d++(?:,\d++)?+ ++@@.*+(?:\n[-+ \\@].*+)*+"


def _fence(opening: str, mark: str) -> str:
    """Pattern of a fenced block: its opening line, lines that do not close it, the closing line or the end."""
    closing = _CLOSING.replace("(?P=mark)", f"(?P={mark})")
    return rf"{opening}(?:\n(?!{closing}).*+)*+(?:\n{closing})?+"


_BLOCK = re.compile(rf"\n(?:{_fence(_FENCE_AT_START, 'mark')}|{_fence(_FENCE_BEHIND_WORDS, 'late')}|{_HUNK})")
_FRONT_MATTER_END = r"(?:---|\.\.\.)" + _LINE_END
_FRONT_MATTER = re.compile(rf"\n---[ \t\r]*+\n(?![ \t\r]*+\n)(?:(?!{_FRONT_MATTER_END}).*+\n)*+{_FRONT_MATTER_END}")
_INLINE_CODE = re.compile(r"(?<!`)(`{1,15})(?!`)[^`\n]*+(?:(?!\1(?!`))`++[^`\n]*+)*+\1(?!`)")
_LEADING = re.compile(r"[ \t]*+")
_LIST_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])[ \t]")
_CELL_WINDOW = 512  # characters of padding looked at beside a dash that may fill a table cell


# Plain tuples: a megabyte can hold 300,000 of them.
_Edit: TypeAlias = tuple[int, int, str, Step]  # characters from start to end become the text
_Proposal: TypeAlias = tuple[int, int, int]  # start, end, index in `_STEPS`: an edit, unless the place is protected


@dataclass(frozen=True, slots=True)
class Change:
    """One change for people to look at. `line` counts from 1, `offset` in characters from 0, both in the given text.

    `before` and `after` are short, with some text around; characters that do not print are spelled as escapes.
    `removed` is by how many characters the text became shorter.
    """

    line: int
    offset: int
    step: Step
    before: str
    after: str
    removed: int


def clean_text(text: str, rules: Clean) -> tuple[str, dict[str, int]]:
    """The cleaned text, and how often each step acted (steps that did not are absent).

    `control` counts characters, the others count runs. Never raises; `roles` is no matter of text. With nothing to
    do the same object comes back.
    """
    counts: dict[str, int] = {}
    if rules.control:
        text, dropped = _without_control(text)
        if dropped:
            counts["control"] = dropped
    padded = "\n" + text
    edits = _edits(padded, rules)
    for _, _, _, step in edits:
        counts[step] = counts.get(step, 0) + 1
    return (_apply(padded, edits)[1:] if edits else text), counts


def describe(text: str, rules: Clean, limit: int = DESCRIBED_CHANGES) -> list[Change]:
    """What `clean_text` would change, in the order of the text; the first `limit` changes only."""
    found: list[tuple[int, int, str, Step]] = []  # start and end in the text given
    cleaned, dropped = text, list[int]()
    if rules.control:
        text = _joined(text)
        found += [(m.start(), m.end(), "\ufffd", "control") for m in _LONE_SURROGATE.finditer(text)]
        dropped = [m.start() for m in _CONTROL.finditer(text)]
        found += [(at, at + 1, "", "control") for at in dropped]
        cleaned, _ = _without_control(text)
    kept_before = [at - index for index, at in enumerate(dropped)]  # how many kept characters stand before each
    for padded_start, padded_end, after, step in _edits("\n" + cleaned, rules):
        # An edit that takes the line feed put before the text puts it back.
        start, last = max(0, padded_start - 1), padded_end - 2
        after = after if padded_start else after[1:]
        found.append(
            (start + bisect_right(kept_before, start), last + bisect_right(kept_before, last) + 1, after, step)
        )
    found.sort(key=itemgetter(0))
    changes: list[Change] = []
    line, seen = 1, 0
    for start, end, after, step in found[:limit]:
        line, seen = line + text.count("\n", seen, start), start
        changes.append(_change(text, (start, end), after, step, line))
    return changes


def _change(text: str, span: tuple[int, int], after: str, step: Step, line: int) -> Change:
    start, end = span
    left, right = (
        _last_characters(text[max(0, start - 2 * SHOWN) : start]),
        _first_characters(text[end : end + 2 * SHOWN]),
    )
    before = _visible(left) + _shortened(text[start:end]) + _visible(right)
    return Change(
        line, start, step, before, _visible(left) + _shortened(after) + _visible(right), end - start - len(after)
    )


def _first_characters(text: str) -> str:
    """The beginning of a text in what a reader takes for characters: no emoji family, flag or accent is torn apart."""
    shown = ""
    for cluster in _grapheme.findall(text):
        if shown and len(shown) + len(cluster) > SHOWN:
            break
        shown += cluster
    return shown


def _last_characters(text: str) -> str:
    shown = ""
    for cluster in reversed(_grapheme.findall(text)):
        if shown and len(shown) + len(cluster) > SHOWN:
            break
        shown = cluster + shown
    return shown


def _shortened(text: str) -> str:
    if len(text) <= 24:
        return _visible(text)
    return f"{_visible(text[:8])}…({len(text)} characters)"


def _visible(text: str) -> str:
    """The text with characters that do not print (and could steer a terminal) as Python escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# --- control ---


def _without_control(text: str) -> tuple[str, int]:
    """The text without control characters and lone surrogates, and how many there were."""
    lone = 0
    if _SURROGATE.search(text) is not None:
        text, lone = _LONE_SURROGATE.subn("\ufffd", text)
        text = _joined(text)
    if _CONTROL.search(text) is None:
        return text, lone
    text, dropped = _CONTROL.subn("", text)
    return text, lone + dropped


def _joined(text: str) -> str:
    """The two halves of a pair become the one character that they spell (C049); lone halves stay."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


# --- edits ---


def _apply(text: str, edits: list[_Edit]) -> str:
    pieces: list[str] = []
    done = 0
    for start, end, replacement, _ in edits:
        pieces.append(text[done:start])
        pieces.append(replacement)
        done = end
    pieces.append(text[done:])
    return "".join(pieces)


def _edits(text: str, rules: Clean) -> list[_Edit]:
    """What dashes, long runs and whitespace change in the padded `text`, in order and without overlaps."""
    proposals: list[_Proposal] = []
    if rules.dashes and not text.isascii():
        proposals += [(*match.span(), 0) for match in _DASH_RUN.finditer(text)]
    if rules.whitespace == "collapse":
        proposals += [(*match.span(), 1) for match in _SPACE_RUN.finditer(text)]
        proposals += [(*match.span(), 1) for match in _BLANK_LINES.finditer(text)]
    if rules.long_runs:
        proposals += [(start, end, 2) for start, end in _long_runs(text)]
    return list(_unprotected(text, sorted(proposals, key=_by_position))) if proposals else []


def _by_position(proposal: _Proposal) -> tuple[int, int]:
    return proposal[0], proposal[2]


def _unprotected(text: str, proposals: list[_Proposal]) -> Iterator[_Edit]:
    """The proposals that stay clear of protected places and of each other, with the text that each puts there."""
    places = _Places(text)
    done = 0
    for start, end, index in proposals:
        if start < done or (start >= places.free_until and places.protect(start)):
            continue
        step = _STEPS[index]
        if step == "dashes":
            after = None if _fills_cell(text, start, end) else CJK_DASH
        elif step == "whitespace":
            after = _collapsed(text, start, end)
        else:
            after = text[start] * KEPT_RUN
        if after is not None:
            yield start, end, after, step
            done = end


def _long_runs(text: str) -> Iterator[tuple[int, int]]:
    """Runs of one character, not a letter or a digit, that are longer than the limit; from the second character on."""
    done = 1
    for index, (first, last) in enumerate(zip(text[1::_STRIDE], text[_STRIDE::_STRIDE], strict=False)):
        start = 1 + index * _STRIDE
        if first != last or start < done or (first.isalnum() and first not in LENGTHENERS):
            continue
        stretch = first * _STRIDE
        end = start + _STRIDE
        if text[start:end] != stretch:
            continue
        while text.startswith(stretch, end):
            end += _STRIDE
        rest = text[end : end + _STRIDE]
        end += len(rest) - len(rest.lstrip(first))
        ahead = text[max(done, start - _STRIDE) : start]
        start -= len(ahead) - len(ahead.rstrip(first))
        if end - start > MAX_ALLOWED_RUN:
            yield start, end
        done = end


def _fills_cell(text: str, start: int, end: int) -> bool:
    """True for dashes that are all there is in a table cell, or the rule between a table's head and body."""
    left, right = text[start - 1], text[end : end + 1]
    if left not in " \t:|+\n" or right not in " \t:|+\r\n":
        return False
    before = text[max(0, start - _CELL_WINDOW) : start].rstrip(" \t:")[-1:]
    after = text[end : end + _CELL_WINDOW].lstrip(" \t:")[:1]
    if (not before and start > _CELL_WINDOW) or (not after and end + _CELL_WINDOW < len(text)):
        return False  # more padding than a table has
    is_left = before == "|" or left == "+"
    is_right = after == "|" or right == "+"
    return (is_left and (is_right or after in "\r\n")) or (is_right and before == "\n")


def _collapsed(text: str, start: int, end: int) -> str | None:
    """What a run of spaces or of blank lines becomes; None where it stays as it is."""
    if text[start] == "\n":
        if text.startswith(("    ", "\t"), end):  # blank lines inside or before indented code
            return None
        return "\n\r\n" if text[end - 2] == "\r" else "\n\n"
    if text[start - 1] in "\n\t>":  # indentation, a column after a tab, indentation inside a quotation
        return None
    if text[start] == " " and (end == len(text) or text[end] in "\r\n"):
        return "  " if end - start > 2 else None  # two spaces at the end of a line are a Markdown line break
    return text[start]


class _Places:
    """Where a padded text must not be touched. Asked with rising positions, so that each line is read once."""

    __slots__ = ("_block", "_blocks", "_is_indented", "_line_end", "_span", "_spans", "_text", "free_until")

    def __init__(self, text: str) -> None:
        self._text = text
        self._blocks = _blocks(text)
        self._block = next(self._blocks, None)
        self._line_end = 0
        self._is_indented = False
        self._spans: Iterator[re.Match[str]] = iter(())
        self._span: re.Match[str] | None = None
        self.free_until = 0  # before it nothing is protected, of what comes after the position asked last

    def protect(self, position: int) -> bool:
        """True in fenced, indented and inline code, front matter and diffs. A line's end is not part of the line."""
        while self._block is not None and self._block[1] <= position:
            self._block = next(self._blocks, None)
        if self._block is not None and self._block[0] <= position:
            return True
        if self._text[position] == "\n":
            return False
        if position >= self._line_end:
            self._enter_line(position)
        if self._is_indented:
            return True
        while self._span is not None and self._span.end() <= position:
            self._span = next(self._spans, None)
        if self._span is None:
            self.free_until = self._line_end
            return False
        return self._span.start() <= position

    def _enter_line(self, position: int) -> None:
        text = self._text
        start = text.rfind("\n", self._line_end, position) + 1
        self._line_end = end = len(text) if (found := text.find("\n", position)) < 0 else found
        self._is_indented = text[start] in " \t" and _is_indented_code(text, start, end)
        self._spans = _INLINE_CODE.finditer(text, start, end) if text.find("`", start, end) >= 0 else iter(())
        self._span = next(self._spans, None)


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Spans of front matter, fenced code and diff hunks, without the line feeds around them."""
    start = 0
    if text.startswith("\n---") and (front := _FRONT_MATTER.match(text)) is not None:
        start = front.end()
        yield 1, start
    if "```" in text or "~~~" in text or "\n@@ " in text:
        for block in _BLOCK.finditer(text, start):
            yield block.start() + 1, block.end()


def _is_indented_code(text: str, start: int, end: int) -> bool:
    """True for a line indented by four columns or more that is neither blank nor a list item."""
    leading = _LEADING.match(text, start, end)
    assert leading is not None  # it matches the empty string
    first = leading.end()
    if first - start > MAX_ALLOWED_RUN or first == end or text[first] == "\r":
        return False
    indent = text[start : min(first, start + 4)]
    return (len(indent) == 4 or "\t" in indent) and _LIST_ITEM.match(text, first) is None

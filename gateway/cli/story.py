"""The story of `firsttoken demo`: from the gateway's records to a table with bars, and three sentences of advice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gateway.cli.phrases import PHRASES, SECONDS, Language, Phrases

if TYPE_CHECKING:
    from gateway.cli.scenes import Take

SHOWN: Final = ("thinking", "off", "burnt", "cold", "queued", "repeated", "pending")  # `rescued` is in the advice
ADVICE: Final = (
    "thinking: off",
    "max_tokens: {floor: 2048}\nrescue: true",
    "budget: {ttft_ms: 2000, on_exceed: heartbeat, heartbeat_ms: 10000}",
)
STYLES: Final = ("yellow", "magenta", "green")  # wait, thinking, answering
GLYPHS: Final = ("░", "▒", "█")  # told apart without colours, too
ASCII_GLYPHS: Final = (".", "=", "#")
# What stays together at the end of a line: a word, or one wide character; with the marks that may not begin a line.
_PIECES: Final = re.compile(r"\s*(?:\d+\.\d+ (?:s|秒)[!-~]*|[!-~]+|[^!-~\s])[，。；：、）？！]*\s*")
NOTABLE: Final = 0.05  # part of a wait from which its cause is worth a line
SPEED_OF_PROFILE: Final = 10  # the profile `demo` is so many times as fast as the seed experiment


@dataclass(frozen=True, slots=True)
class Row:
    """One call in the terms of the table. Times in ms; the four parts add up to the total."""

    name: str
    gateway_ms: float  # upload, gateway, connect
    wait_ms: float
    reasoning_ms: float
    answer_ms: float  # with its tail: the end mark is a token, too
    total_ms: float
    causes: Mapping[str, float]  # of the wait, as far as the server told
    prompt_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    completion_tokens: int
    verdict: str
    heartbeats: int

    @property
    def answer_tokens(self) -> int:
        return self.completion_tokens - self.reasoning_tokens


@dataclass(frozen=True, slots=True)
class Finding:
    """What was slow, and what to write into a route."""

    text: str
    yaml: str


def row_of(take: Take) -> Row:
    """The gateway's record as a row."""
    record = take.record
    causes = record.get("wait_causes")
    return Row(
        name=take.name,
        gateway_ms=sum(_number(record, name) for name in ("upload_ms", "gateway_ms", "connect_ms")),
        wait_ms=_number(record, "wait_ms"),
        reasoning_ms=_number(record, "reasoning_ms"),
        answer_ms=_number(record, "decode_ms") + _number(record, "tail_ms"),
        total_ms=_number(record, "e2e_ms"),
        causes={name.removesuffix("_ms"): ms for name, ms in causes.items()} if isinstance(causes, dict) else {},
        prompt_tokens=int(_number(record, "prompt_tokens")),
        cached_tokens=int(_number(record, "cached_tokens")),
        reasoning_tokens=int(_number(record, "reasoning_tokens")),
        completion_tokens=int(_number(record, "completion_tokens")),
        verdict=str(record.get("verdict") or "ok"),
        heartbeats=take.heartbeats,
    )


def _number(record: Mapping[str, object], name: str) -> float:
    value = record.get(name)
    return value if isinstance(value, int | float) else 0


def findings(takes: Sequence[Take], language: Language) -> list[Finding]:
    """Three sentences, each with its lines."""
    rows = {take.name: row_of(take) for take in takes}
    thinking, off, burnt, queued = rows["thinking"], rows["off"], rows["burnt"], rows["queued"]
    seconds = partial(_seconds, language)
    told = {
        "reasoning_tokens": f"{thinking.reasoning_tokens:,}",
        "completion_tokens": f"{thinking.completion_tokens:,}",
        "reasoning_s": seconds(thinking.reasoning_ms),
        "total_s": seconds(thinking.total_ms),
        "off_s": seconds(off.total_ms),
        "ratio": f"{thinking.total_ms / off.total_ms:.0f}",
        "small": f"{burnt.completion_tokens:,}",
        "rescued_s": seconds(rows["rescued"].total_ms),
        "cold_s": seconds(rows["cold"].wait_ms),
        "queue_s": seconds(queued.causes.get("queue", 0)),
        "queued_s": seconds(queued.wait_ms),
        "repeated_s": seconds(rows["repeated"].wait_ms),
    }
    texts = PHRASES[language].findings
    return [Finding(text.format(**told), yaml) for text, yaml in zip(texts, ADVICE, strict=True)]


def _seconds(language: Language, ms: float) -> str:
    return SECONDS[language].format(f"{ms / 1000:.2f}")


def told_to(take: Take, language: Language, direct: str) -> list[str]:
    """What the caller that came back was told, a line for each time. `direct`: the text of a direct call's answer."""
    back = take.comeback
    if back is None:
        return []
    phrases, seconds = PHRASES[language], partial(_seconds, language)
    lines = []
    for note in back.notes:
        after, left = seconds(note.after_ms), note.left_ms
        estimate = phrases.no_estimate if left is None else phrases.estimate.format(left=seconds(left))
        phase = phrases.phases.get(note.phase or "", note.phase)
        promised = phrases.promised.format(after=after, estimate=estimate, phase=phase)
        answered = phrases.answered.format(after=after, size=f"{back.answer_bytes:,}")
        lines.append(promised if note.status == 202 else answered)
    if back.stream_bytes is not None:
        lines.append(phrases.followed.format(size=f"{back.stream_bytes:,}"))
    if take.answer == direct:
        lines.append(phrases.same_words)
    return lines


def story(takes: Sequence[Take], language: Language, speed: float) -> Group:
    """Everything that is printed."""
    phrases = PHRASES[language]
    parts: list[RenderableType] = [
        Paragraph(phrases.intro.format(times=f"{SPEED_OF_PROFILE * speed:g}")),
        Text(),
        _table([row_of(take) for take in takes if take.name in SHOWN], phrases),
        Text(),
        _Legend(phrases.legend),
        Text(),
        *_comeback(takes, language),
        Text(phrases.advice, style="bold"),
    ]
    for number, finding in enumerate(findings(takes, language), 1):
        parts.append(Text())
        parts.append(Paragraph(f"{number}. {finding.text}"))
        parts += [Text(f"    {line}", style="cyan") for line in finding.yaml.splitlines()]
    parts.append(Text())
    parts.append(Text(phrases.ending, style="bold"))
    return Group(*parts)


def _comeback(takes: Sequence[Take], language: Language) -> Iterator[RenderableType]:
    """The caller that came back, as it saw the gateway."""
    by_name = {take.name: take for take in takes}
    last, direct = by_name["pending"], by_name["repeated"].answer
    if last.comeback is not None:
        yield Paragraph(PHRASES[language].comeback.format(wait=f"{last.comeback.wait_s:g}"))
        yield from (Text(f"    {line}", style="dim") for line in told_to(last, language, direct))
        yield Text()


def _table(rows: Sequence[Row], phrases: Phrases) -> Table:
    table = Table(
        title=phrases.title, title_justify="left", title_style="bold", box=None, expand=True, padding=(0, 0, 0, 1),
        pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    table.add_column("", ratio=1)
    for name in phrases.columns:
        table.add_column(Text(name, justify="right"), justify="right", no_wrap=True, vertical="top")
    longest = max(row.total_ms for row in rows)
    for number, row in enumerate(rows, 1):
        table.add_row(
            _case(number, row, longest, phrases),
            Text(milliseconds(row.gateway_ms)),
            _with_lines(milliseconds(row.wait_ms), list(_causes(row, phrases))),
            _with_lines(milliseconds(row.reasoning_ms), _tokens(row.reasoning_tokens, phrases)),
            _with_lines(milliseconds(row.answer_ms), _tokens(row.answer_tokens, phrases)),
            Text(milliseconds(row.total_ms), style="bold"),
        )
        if number < len(rows):
            table.add_row()
    return table


def _case(number: int, row: Row, longest_ms: float, phrases: Phrases) -> Group:
    """Name, bar, and what is remarkable about it."""
    lines: list[RenderableType] = [Text(f"{number} {phrases.scenes[row.name]}", style="bold"), Bar(row, longest_ms)]
    if row.name == "cold":
        lines.append(Text(f"  {phrases.compiling}", style="dim"))
    if row.verdict == "burnt_by_thinking":
        lines.append(Text(f"  {phrases.burnt}", style="red"))
    if row.heartbeats:
        lines.append(Text("  " + phrases.heartbeats.format(count=row.heartbeats), style="dim"))
    if row.name == "repeated":
        cached = phrases.cached.format(cached=f"{row.cached_tokens:,}", prompt=f"{row.prompt_tokens:,}")
        lines.append(Text(f"  {cached}", style="dim"))
    return Group(*lines)


def _causes(row: Row, phrases: Phrases) -> Iterator[str]:
    for cause, ms in row.causes.items():
        if ms >= row.wait_ms * NOTABLE:
            yield f"{phrases.causes[cause]} {milliseconds(ms)}"


def _tokens(count: int, phrases: Phrases) -> list[str]:
    return [phrases.tokens.format(count=f"{count:,}")] if count else []


def _with_lines(value: str, lines: Sequence[str]) -> Text:
    text = Text(value)
    for line in lines:
        text.append(f"\n{line}", style="dim")
    return text


def milliseconds(ms: float) -> str:
    """As many digits as somebody can use: `4,518`, `67`, `0.7`."""
    return f"{ms:.1f}" if 0.05 <= ms < 9.95 else f"{ms:,.0f}"


class Bar:
    """A call's time as one stacked bar, as long as its part of the longest call's."""

    def __init__(self, row: Row, longest_ms: float) -> None:
        self._parts = (row.gateway_ms + row.wait_ms, row.reasoning_ms, row.answer_ms)
        self._longest_ms = longest_ms

    def cells(self, width: int) -> list[int]:
        """The lengths of the three parts. What took time at all is seen: it gets one cell at least."""
        lengths = [max(1, round(width * ms / self._longest_ms)) if ms > 0 else 0 for ms in self._parts]
        while sum(lengths) > width:
            lengths[lengths.index(max(lengths))] -= 1
        return lengths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = ASCII_GLYPHS if options.ascii_only else GLYPHS
        yield Segment("  ")
        for length, glyph, style in zip(self.cells(options.max_width - 2), glyphs, STYLES, strict=True):
            yield Segment(glyph * length, Style.parse(style))
        yield Segment.line()


class Paragraph:
    """Text broken into lines at spaces, and between Chinese characters, which have none."""

    def __init__(self, text: str) -> None:
        self._text = text

    def lines(self, width: int) -> list[str]:
        """The lines, none wider than `width` cells unless a single word is."""
        lines = [""]
        for piece in _PIECES.findall(self._text):
            if cell_len(lines[-1] + piece.rstrip()) > width and lines[-1]:
                lines.append("")
            lines[-1] += piece if lines[-1] else piece.lstrip()
        return [line.rstrip() for line in lines]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(options.max_width):
            yield Segment(line)
            yield Segment.line()


class _Legend:
    """Which part of a bar means what."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = ASCII_GLYPHS if options.ascii_only else GLYPHS
        for name, glyph, style in zip(self._names, glyphs, STYLES, strict=True):
            yield Segment("  ")
            yield Segment(glyph * 2, Style.parse(style))
            yield Segment(f" {name}")
        yield Segment.line()

"""`firsttoken demo`: a simulated thinking model, the gateway in front of it, and a table of where the time goes."""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from gateway import __version__
from gateway.cli import CommandError
from gateway.cli.phrases import LANGUAGES, PHRASES, Language, language_of
from gateway.cli.story import SPEED_OF_PROFILE, findings, story

if TYPE_CHECKING:
    from gateway.cli.scenes import Take

WIDEST: Final = 120  # longer bars say no more
PICTURE_WIDTH: Final = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--lang", choices=LANGUAGES, help="language (default: the locale's, Chinese or English)")
    parser.add_argument("--speed", type=float, default=1.0, metavar="FACTOR", help="so many times as fast (default: 1)")
    parser.add_argument("--json", action="store_true", help="the gateway's records and the advice as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the table as a picture")


def run(args: argparse.Namespace) -> int:
    """Plays the demo and prints its story; returns 0. Raises CommandError, OSError."""
    language: Language = args.lang or language_of(os.environ)
    if not 0 < args.speed <= 100:
        raise CommandError("`--speed` must be above 0 and at most 100")
    if args.svg is not None:
        args.svg.open("a").close()  # a file that cannot be written is told now, not after fifteen seconds
    logging.getLogger().addHandler(logging.NullHandler())  # what goes wrong is told by the calls themselves
    takes = _played(args.speed, language)
    if args.svg is not None:
        args.svg.write_text(picture(takes, language, args.speed), encoding="utf-8")
    if args.json:
        sys.stdout.write(as_json(takes, language, args.speed))
    else:
        console = Console(highlight=False)
        console.print(story(takes, language, args.speed), width=min(console.width, WIDEST))
    return 0


def _played(speed: float, language: Language) -> list[Take]:
    from gateway.cli.scenes import STEPS, play  # brings the server along, which `--help` has no use for

    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr, highlight=False),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        task: TaskID = progress.add_task("", total=STEPS)

        def on_step(number: int) -> None:
            progress.update(
                task, completed=number, description=f"{number + 1}/{STEPS} {PHRASES[language].steps[number]}"
            )

        return uvloop.run(play(speed, language, on_step))


def as_json(takes: Sequence[Take], language: Language, speed: float) -> str:
    """For scripts: what each call was, the gateway's record of it, and the advice."""
    scenes = [
        {"name": take.name, "heartbeats": take.heartbeats, "answer": take.answer, "record": take.record}
        | ({"comeback": take.comeback} if take.comeback is not None else {})
        for take in takes
    ]
    advice = [{"text": finding.text, "yaml": finding.yaml} for finding in findings(takes, language)]
    whole = {"version": __version__, "times_as_fast": SPEED_OF_PROFILE * speed, "scenes": scenes, "findings": advice}
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()


def picture(takes: Sequence[Take], language: Language, speed: float) -> str:
    """The story as an SVG that needs nothing from elsewhere."""
    console = Console(record=True, width=PICTURE_WIDTH, file=io.StringIO(), highlight=False, color_system="truecolor")
    console.print(story(takes, language, speed))
    drawn = console.export_svg(title="firsttoken demo", unique_id="firsttoken")
    # rich names a font on somebody else's server, and asks for wide letters that not every browser keeps in line.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    return drawn.replace("font-variant-east-asian: full-width;", "").replace("Fira Code, monospace", "monospace")

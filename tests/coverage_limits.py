"""Holds coverage to its limits: 95 % of the branches of each pure package, 85 % of the lines of all the rest.

    python tests/coverage_limits.py build/coverage.json

Reads coverage's JSON report. Exit code 1 when a limit is not met, with the files that lack most.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypedDict

PURE = ("wire", "policy", "timing")
MIN_BRANCHES = 95.0
MIN_LINES = 85.0
SHOWN_FILES = 5


class Summary(TypedDict):
    """What coverage says of a file."""

    num_statements: int
    covered_lines: int
    num_branches: int
    covered_branches: int


class Part(NamedTuple):
    """What one limit speaks of: how much of `total` is covered, and the same by file."""

    name: str
    unit: str
    limit: float
    covered: int
    total: int
    missing: tuple[tuple[int, str], ...]  # how much is missing and where, most first

    @property
    def percent(self) -> float:
        """A part with nothing in it is covered."""
        return 100.0 * self.covered / self.total if self.total else 100.0

    @property
    def is_met(self) -> bool:
        return self.percent >= self.limit


def parts_of(files: dict[str, Summary]) -> list[Part]:
    """One part for each pure package, one for the rest."""
    packages = {name: PurePosixPath(name.replace("\\", "/")).parts[1:-1] for name in files}
    parts = []
    for package in PURE:
        chosen = {name: files[name] for name, folders in packages.items() if folders[:1] == (package,)}
        branches = {name: (summary["covered_branches"], summary["num_branches"]) for name, summary in chosen.items()}
        parts.append(_part(package, "branches", MIN_BRANCHES, branches))
    rest = {name: files[name] for name, folders in packages.items() if folders[:1] not in [(p,) for p in PURE]}
    lines = {name: (summary["covered_lines"], summary["num_statements"]) for name, summary in rest.items()}
    parts.append(_part("the rest", "lines", MIN_LINES, lines))
    return parts


def _part(name: str, unit: str, limit: float, counts: dict[str, tuple[int, int]]) -> Part:
    missing = sorted(
        ((total - covered, file) for file, (covered, total) in counts.items() if covered < total), reverse=True
    )
    covered, total = (sum(pair[index] for pair in counts.values()) for index in (0, 1))
    return Part(name, unit, limit, covered, total, tuple(missing))


def main(arguments: list[str]) -> int:
    report = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    parts = parts_of({name: file["summary"] for name, file in report["files"].items()})
    for part in parts:
        word = "ok" if part.is_met else "TOO LOW"
        print(f"{part.name:>8}: {part.percent:5.1f} % of {part.total} {part.unit} (limit {part.limit:.0f} %) {word}")
        for count, file in () if part.is_met else part.missing[:SHOWN_FILES]:
            print(f"          {file}: {count} {part.unit} missing")
    return 0 if all(part.is_met for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

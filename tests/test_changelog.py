"""The changelog is for the person who upgrades: its newest version is the one of the package."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from itertools import pairwise
from pathlib import Path

from gateway import __version__

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASES = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", TEXT, flags=re.MULTILINE)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_newest_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert RELEASES[0][0] == __version__ == project["version"]


def test_every_heading_is_a_version_with_its_date_or_what_is_not_released() -> None:
    headings = re.findall(r"^## (.+)$", TEXT, flags=re.MULTILINE)
    assert headings == ["[Unreleased]", *(f"[{version}] - {day}" for version, day in RELEASES)]


def test_versions_and_dates_fall_from_the_newest_to_the_oldest() -> None:
    keys = [(tuple(map(int, version.split("."))), date.fromisoformat(day)) for version, day in RELEASES]
    assert all(newer[0] > older[0] and newer[1] >= older[1] for newer, older in pairwise(keys))


def test_changes_are_sorted_by_their_kind() -> None:
    assert set(re.findall(r"^### (.+)$", TEXT, flags=re.MULTILINE)) <= KINDS

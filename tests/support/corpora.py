"""Test vectors of the project's reference folder; absent on a bare clone, and the tests that use them skip then."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

SHARED = Path(__file__).parents[2] / os.environ.get("FIRSTTOKEN_SHARED", "../shared")


def rows(name: str) -> list[ParameterSet]:
    """The rows of a corpus as parameters; one skipped row where the corpus is absent."""
    path = SHARED / "data" / "corpora" / name
    if not path.exists():
        skip = pytest.mark.skip(reason=f"{name} is not here; FIRSTTOKEN_SHARED names the folder that holds data/")
        return [pytest.param({}, id="absent", marks=skip)]
    found: list[dict[str, Any]] = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    return [pytest.param(row, id=row["id"]) for row in found]

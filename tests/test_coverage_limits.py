"""The script that holds coverage to its limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.coverage_limits import main


def summary(lines: tuple[int, int], branches: tuple[int, int]) -> dict[str, dict[str, int]]:
    return {
        "summary": {
            "covered_lines": lines[0],
            "num_statements": lines[1],
            "covered_branches": branches[0],
            "num_branches": branches[1],
        }
    }


@pytest.mark.parametrize(
    "wire, rest, code, word",
    [
        (summary((1, 100), (95, 100)), summary((85, 100), (0, 50)), 0, "ok"),
        (summary((100, 100), (94, 100)), summary((100, 100), (50, 50)), 1, "gateway/wire/sse.py: 6 branches missing"),
        (summary((100, 100), (100, 100)), summary((84, 100), (50, 50)), 1, "gateway/cli/serve.py: 16 lines missing"),
    ],
)
def test_pure_packages_are_held_to_branches_and_the_rest_to_lines(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wire: dict[str, dict[str, int]],
    rest: dict[str, dict[str, int]],
    code: int,
    word: str,
) -> None:
    report = tmp_path / "coverage.json"
    report.write_text(json.dumps({"files": {"gateway/wire/sse.py": wire, "gateway/cli/serve.py": rest}}))
    assert main([str(report)]) == code
    assert word in capsys.readouterr().out

"""Environments of the targets from PyPI, one each under build/bench-venvs, made on first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.processes import ROOT

VENVS = ROOT / "build" / "bench-venvs"
INSTALL_LIMIT_S = 600


class Absent(Exception):
    """A target that cannot be had here, and why."""


def ensure(name: str, requirements: tuple[str, ...]) -> Path:
    """The environment's folder of programs. Raises Absent when it cannot be installed in ten minutes."""
    folder = VENVS / name
    stamp = folder / ".installed"
    wanted = "\n".join(requirements)
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"installing {', '.join(requirements)} into {folder.relative_to(ROOT)} …", file=sys.stderr)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        _run([*pip, "install", "--quiet", *requirements])
        stamp.write_text(wanted)
    return folder / "bin"


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Absent(f"installing took longer than {INSTALL_LIMIT_S} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or error.stderr.splitlines()
        raise Absent(f"could not be installed: {lines[-1] if lines else 'pip said nothing'}") from None


def version_of(name: str, distribution: str) -> str:
    """The installed version of a distribution."""
    code = f"import importlib.metadata; print(importlib.metadata.version({distribution!r}))"
    command = [str(VENVS / name / "bin" / "python"), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()

"""The two programs in C, compiled on first use: the simulated upstream and the load generator.

Without a compiler their Python versions stand in. These cost more, so latencies are less exact and the workloads with
thousands of connections are left out; CPU time of the targets is still comparable.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import BUILD

SOURCES = Path(__file__).resolve().parent / "native"
COMPILE_LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class Programs:
    """Commands to start them with; arguments follow."""

    upstream: tuple[str, ...]
    load: tuple[str, ...]
    are_native: bool


def programs() -> Programs:
    """The programs in C, or in Python where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        python = (sys.executable, "-m")
        return Programs((*python, "benchmarks.upstream"), (*python, "benchmarks.load"), are_native=False)
    return Programs((str(_compiled(compiler, "upstream")),), (str(_compiled(compiler, "load")),), are_native=True)


def _compiled(compiler: str, name: str) -> Path:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    program = BUILD / f"{name}-{digest.hexdigest()[:12]}"
    if not program.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        partial = program.with_suffix(".partial")
        command = [compiler, "-O2", "-Wall", "-Wextra", "-o", str(partial), str(SOURCES / f"{name}.c")]
        subprocess.run(command, check=True, timeout=COMPILE_LIMIT_S)
        partial.rename(program)
    return program

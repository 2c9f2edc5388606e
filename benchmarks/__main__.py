"""`python -m benchmarks`: every workload on every target, as JSON and a Markdown table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.processes import BUILD
from benchmarks.report import as_json, as_markdown
from benchmarks.runner import run
from benchmarks.targets import TARGETS, Target
from benchmarks.workloads import WORKLOADS, Workload

QUICK_TARGETS = "nginx,vllm-router,ours"
QUICK_WORKLOADS, QUICK_SCALE = "abcde", 0.25


def chosen_targets(names: str, *, with_optional: bool) -> list[Target]:
    """Targets by name; all that are not optional when no names are given. Raises SystemExit."""
    if not names:
        return [target for target in TARGETS if with_optional or not target.is_optional]
    wanted = [name.strip() for name in names.split(",") if name.strip() not in ("", "direct")]
    known = {target.name for target in TARGETS}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no target is called {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    return [target for target in TARGETS if target.name in wanted]


def chosen_workloads(letters: str, scale: float) -> list[Workload]:
    """Workloads by letter; all when no letters are given. Raises SystemExit."""
    wanted = set(letters.replace(",", "").replace(" ", "")) or {work.letter for work in WORKLOADS}
    unknown = wanted - {work.letter for work in WORKLOADS}
    if unknown:
        raise SystemExit(f"no workload is called {', '.join(sorted(unknown))}; they are a to {WORKLOADS[-1].letter}")
    return [work.scaled(scale) for work in WORKLOADS if work.letter in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="", metavar="a,b", help="workloads (default: all)")
    parser.add_argument("--targets", default="", metavar="nginx,ours", help="targets; `direct` is always there")
    parser.add_argument("--litellm", action="store_true", help="LiteLLM too: slow to install, and to run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: shorter, and fewer connections in e and g")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_TARGETS}; {QUICK_WORKLOADS} at scale {QUICK_SCALE}"
    )
    parser.add_argument("--out", type=Path, default=BUILD / "report", help="path of the reports, without .json and .md")
    args = parser.parse_args()
    names = args.targets or (QUICK_TARGETS if args.quick else "")
    letters = args.only or (QUICK_WORKLOADS if args.quick else "")
    scale = min(args.scale, QUICK_SCALE) if args.quick else args.scale
    chosen = chosen_targets(names, with_optional=args.litellm)
    results = run(chosen, chosen_workloads(letters, scale), max(1, args.rounds))
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = as_markdown(results, command, args.rounds)
    args.out.with_suffix(".md").write_text(report)
    args.out.with_suffix(".json").write_text(json.dumps(as_json(results, command, args.rounds), indent=1))
    print(report)
    print(f"written: {args.out.with_suffix('.md')} and .json", file=sys.stderr)


if __name__ == "__main__":
    main()

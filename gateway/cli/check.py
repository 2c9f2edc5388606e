"""`firsttoken check`: every problem of a configuration at once, or what it means, route by route.

Shows names, numbers and switches. Never shown, because they may be secrets: keys, the values of `defaults`,
`override` and header conditions.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import orjson
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.cli import CommandError, config_path
from gateway.config import Clean, MaxTokens, Route, Settings, Upstream
from gateway.configfile import ConfigProblems, Loaded, Problem, load
from gateway.errors import BadRequest
from gateway.policy.clean import clean_body
from gateway.policy.cleantext import describe
from gateway.wire.body import read_object
from gateway.wire.kinds import Kind

_PIPE_WIDTH: Final = 2000  # columns where there is no terminal to ask: one route stays one line


# The member that tells which kind of request a body is, and that kind in `clean_body`'s words.
_KINDS: Final[tuple[tuple[str, Kind], ...]] = (
    ("messages", "messages"),
    ("prompt", "completions"),
    ("input", "responses"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="file to check (default: $FIRSTTOKEN_CONFIG, else ./gateway.yaml)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--prompt", metavar="FILE", help="show what cleaning would change in the text of a file")
    parser.add_argument("--route", metavar="NAME", help="whose cleaning `--prompt` uses (default: the first route)")


def run(args: argparse.Namespace) -> int:
    """0 when the file can be used, 1 when it has problems. With `--prompt`: 0 when the text could be looked at."""
    path, chosen_by = config_path(args.config, os.environ)
    if args.prompt is not None and chosen_by == "default" and not path.exists():
        return _show_cleaning(Clean(), args)
    messages = _console(stderr=True)
    try:
        loaded = load(path, os.environ)
    except ConfigProblems as error:
        _show_problems(messages, "error", error.problems, path)
        if args.json:
            _print_json({"file": str(path), "ok": False, "problems": _as_json(error.problems)})
        return 1
    if args.prompt is not None:
        return _show_cleaning(_cleaning_of(loaded.settings, args.route), args)
    _show_problems(messages, "warning", loaded.warnings, path)
    if args.json:
        _print_json(_report(loaded))
    else:
        messages.print(Text(f"{path} can be used" + (f" (chosen by {chosen_by})" if chosen_by != "argument" else "")))
        _show_settings(_console(stderr=False), loaded.settings)
    return 0


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False, soft_wrap=stderr)


def _show_problems(console: Console, word: str, problems: Iterable[Problem], path: Path) -> None:
    colour = "bold red" if word == "error" else "bold yellow"
    for problem in problems:
        console.print(Text.assemble((word, colour), f": {path}: {problem}"))
        if problem.hint:
            console.print(Text.assemble("  ", ("hint", "cyan"), f": {problem.hint}"))


# -- what a configuration means, as tables ---------------------------------------------------------------------------


def _show_settings(console: Console, settings: Settings) -> None:
    upstreams = _table("upstream", "url", "engine", "family", "api key", "used by")
    for name, upstream in settings.upstreams.items():
        users = ", ".join(_users_of(name, settings))
        has_key = "set" if upstream.api_key is not None else "–"
        _add_row(upstreams, name, upstream.url, upstream.engine, upstream.family, has_key, users or "–")
    routes = _table("route", "match", "upstreams", "model", "thinking", "max_tokens", "clean", "budget")
    for route in settings.routes:
        _add_row(
            routes,
            route.name,
            _match_text(route),
            _upstreams_text(route),
            route.model or "as asked",
            route.thinking,
            _max_tokens_text(route.max_tokens),
            _clean_text(route.clean),
            _budget_text(route),
        )
    console.print(upstreams)
    console.print(routes)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add_row(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))  # Text: a name with [brackets] is not markup


def _match_text(route: Route) -> str:
    match = route.match
    parts = [f"prefix {match.prefix}"] if match.prefix else []
    for word, values in (
        ("model", match.models),
        ("path", match.paths),
        ("header", match.headers),
        ("key", match.keys),
    ):
        if values:
            parts.append(f"{word} {', '.join(values)}")
    return "; ".join(parts) or "everything"


def _users_of(upstream: str, settings: Settings) -> Iterator[str]:
    """The routes that ask an upstream; a fallback that is another route's name is that route's business."""
    names = [route.name for route in settings.routes]
    for route in settings.routes:
        if upstream in route.upstreams:
            yield route.name
        elif route.budget.fallback == upstream and upstream not in names:
            yield f"{route.name} (fallback)"


def _upstreams_text(route: Route) -> str:
    """Names; how one of them is chosen, where there is a choice."""
    names = ", ".join(route.upstreams)
    return f"{names} ({route.balance})" if len(route.upstreams) > 1 else names


def _max_tokens_text(rules: MaxTokens) -> str:
    given = rules.model_dump(exclude_none=True)
    return ", ".join(f"{name} {value}" for name, value in given.items()) or "as asked"


def _clean_text(clean: Clean) -> str:
    steps = [name for name, value in clean.model_dump().items() if value is True]
    if clean.whitespace == "collapse":
        steps.append("whitespace")
    return ", ".join(steps) or "off"


def _budget_text(route: Route) -> str:
    """Limits and what happens at them; then what holds besides, where it is not the default."""
    budget = route.budget
    limits = [
        f"{name.removesuffix('_ms')} {value} ms" for name in ("ttft_ms", "ttfv_ms") if (value := getattr(budget, name))
    ]
    parts = [f"{', '.join(limits)}: {budget.on_exceed}" if limits else "none"]
    if budget.fallback is not None and limits and budget.on_exceed == "fallback":
        parts[0] += f" {budget.fallback}"
    elif budget.fallback is not None:
        parts.append(f"fallback {budget.fallback}")
    if route.pending != "allow":
        parts.append(f"pending {route.pending}")
    if route.stream_upstream:
        parts.append("plain calls as streams")
    return "; ".join(parts)


# -- the same as JSON ------------------------------------------------------------------------------------------------


def _report(loaded: Loaded) -> dict[str, object]:
    settings = loaded.settings
    return {
        "file": str(loaded.source),
        "ok": True,
        "problems": [],
        "warnings": _as_json(loaded.warnings),
        "upstreams": {name: _upstream_json(upstream) for name, upstream in settings.upstreams.items()},
        "routes": [_route_json(route) for route in settings.routes],
    }


def _upstream_json(upstream: Upstream) -> dict[str, object]:
    shown = upstream.model_dump(mode="json", exclude={"api_key"})
    return {**shown, "has_api_key": upstream.api_key is not None}


def _route_json(route: Route) -> dict[str, object]:
    shown = route.model_dump(mode="json", exclude={"defaults", "override"})
    shown["match"]["headers"] = list(route.match.headers)
    return {**shown, "defaults": list(route.defaults), "override": list(route.override)}


def _as_json(problems: Iterable[Problem]) -> list[dict[str, object]]:
    return [
        {"path": problem.path, "line": problem.line, "message": problem.message, "hint": problem.hint}
        for problem in problems
    ]


def _print_json(value: object) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


# -- cleaning --------------------------------------------------------------------------------------------------------


def _cleaning_of(settings: Settings, route_name: str | None) -> Clean:
    names = [route.name for route in settings.routes]
    if route_name is None:
        return settings.routes[0].clean
    if route_name not in names:
        raise CommandError(f"no route is called `{route_name}`", f"there are: {', '.join(names)}")
    return settings.routes[names.index(route_name)].clean


def _show_cleaning(rules: Clean, args: argparse.Namespace) -> int:
    """What the rules would change in a file: a text, or a request body as a client sends it."""
    found = _changes_in(_prompt(args.prompt), rules)
    if args.json:
        _print_json(found)
        return 0
    console = _console(stderr=False)
    for change in found:
        where = f"{change['place']}, line {change['line']}" if change["place"] else f"line {change['line']}"
        edit = Text.assemble((str(change["before"]), "red"), " → ", (str(change["after"]), "green"))
        console.print(Text.assemble(f"{where}: ", (str(change["step"]), "bold"), ": ", edit))
    summary = f"{len(found)} change(s)" if found else "nothing to clean"
    _console(stderr=True).print(Text(f"{args.prompt}: {summary}"))
    return 0


def _prompt(name: str) -> str:
    """The text of a file, or of standard input for `-`."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise CommandError(f"`{name}` is not UTF-8 text", "save it as UTF-8") from None


def _changes_in(content: str, rules: Clean) -> list[dict[str, object]]:
    """The changes, each with the place of its text in a request body (empty for a plain text)."""
    try:
        body = read_object(content.encode())
    except BadRequest:
        return [{"place": "", **asdict(change)} for change in describe(content, rules)]
    kind = next((kind for member, kind in _KINDS if member in body.data), None)
    if kind is None:
        return [{"place": "", **asdict(change)} for change in describe(content, rules)]
    document = body.document()
    clean_body(document, body.data, rules, kind)
    differences = _differences(body.data, orjson.loads(document.apply()), "")
    return [change for place, before, after in differences for change in _changes_at(place, before, after, rules)]


def _changes_at(place: str, before: str, after: str, rules: Clean) -> Iterator[dict[str, object]]:
    if place.endswith(".role"):
        yield {"place": place, "line": 1, "offset": 0, "step": "roles", "before": before, "after": after, "removed": 0}
        return
    for change in describe(before, rules):
        yield {"place": place, **asdict(change)}


def _differences(before: object, after: object, place: str) -> Iterator[tuple[str, str, str]]:
    """Where two bodies of the same shape hold other strings: place, old, new."""
    if isinstance(before, str) and isinstance(after, str):
        if before != after:
            yield place, before, after
    elif isinstance(before, list) and isinstance(after, list):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences(old, new, f"{place}[{index}]")
    elif isinstance(before, dict) and isinstance(after, dict):
        for name, old in before.items():
            yield from _differences(old, after[name], f"{place}.{name}" if place else name)

"""From a YAML file to `config.Settings`: reads, resolves the environment, validates, explains every mistake.

All mistakes of a file are found in one go: those of the YAML text, unset variables, unknown keys, wrong values and
names that do not agree. Each comes with its path, its line and, where one can be guessed, what would be right
(`mistakes.py` finds the words, `document.py` the lines).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, get_origin

from pydantic import ValidationError

from gateway.config import Match, Settings
from gateway.document import Document, Location, Problem, path_of, read
from gateway.mistakes import mistakes_of, model_in

__all__ = ["ConfigProblems", "Loaded", "Problem", "fingerprint", "for_upstream", "from_mapping", "load"]

MAX_FILE_BYTES: Final = 1024 * 1024  # a thousand routes take less than half of it


class ConfigProblems(Exception):
    """Why there are no settings. `problems` has every mistake, in the order of the file."""

    def __init__(self, problems: Iterable[Problem], source: Path | None = None) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.line is None, problem.line or 0)))
        self.source = source
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        """One line per problem, each followed by its hint."""
        lines = []
        for problem in self.problems:
            lines.append(f"{self.source}: {problem}" if self.source is not None else str(problem))
            if problem.hint:
                lines.append(f"  hint: {problem.hint}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings that may be used, with what somebody should know about them."""

    settings: Settings
    warnings: tuple[Problem, ...]
    source: Path
    fingerprint: str  # of the bytes that were read; compare with `fingerprint(source)` to see a change


def load(
    path: Path,
    environ: Mapping[str, str],
    *,
    listen: Mapping[str, object] | None = None,
    auth: str | None = None,
) -> Loaded:
    """The settings in a file. `listen` goes before keys of its `listen` section (`--host`), `auth` before its `auth`.

    Raises ConfigProblems for everything that is wrong with the file, including that it cannot be read.
    """
    content = _content(path)
    document = read(_text(content, path), environ)
    if not document.is_readable:
        raise ConfigProblems(document.problems, path)
    settings, problems = _validated(document, listen, auth)
    if settings is None or problems:
        raise ConfigProblems(problems, path)
    return Loaded(settings, tuple(_warnings(settings, document)), path, hashlib.sha256(content).hexdigest())


def from_mapping(data: Mapping[str, object]) -> Settings:
    """The settings in plain values, without a file and without environment references. Raises ConfigProblems."""
    settings, problems = _validated(Document(value=dict(data)))
    if settings is None:
        raise ConfigProblems(problems)
    return settings


def for_upstream(
    url: str,
    *,
    listen: Mapping[str, object] | None = None,
    api_key: str | None = None,
    auth: str | None = None,
) -> Settings:
    """The settings of `serve --upstream URL`: one upstream, one route that takes everything. Raises ConfigProblems."""
    upstream: dict[str, object] = {"url": url} if api_key is None else {"url": url, "api_key": api_key}
    return from_mapping({"listen": dict(listen or {}), "auth": auth, "upstreams": {"upstream": upstream}})


def fingerprint(path: Path) -> str | None:
    """A word for the file's content, to see whether it changed; None when it cannot be read.

    The content, not the modification time: a touched file needs no reload, and two writes can share a time.
    """
    try:
        return hashlib.sha256(_content(path)).hexdigest()
    except ConfigProblems:
        return None


# -- reading the file ----------------------------------------------------------------------------------------------


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigProblems([_unreadable(error)], path) from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigProblems([Problem("", None, f"the file is larger than {MAX_FILE_BYTES // 1024} KiB")], path)
    return content


def _unreadable(error: OSError | ValueError) -> Problem:
    if isinstance(error, FileNotFoundError):
        hint = "name another file, or start without one: `firsttoken serve --upstream URL`"
        return Problem("", None, "there is no such file", hint)
    if isinstance(error, IsADirectoryError):
        return Problem("", None, "this is a directory, not a file", "name the file in it")
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return Problem("", None, f"the file cannot be read: {reason}")


def _text(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = "the file is not UTF-8 text: wrong bytes begin on this line"
        raise ConfigProblems([Problem("", line, message, "save it as UTF-8")], path) from None


# -- validation ----------------------------------------------------------------------------------------------------


def _validated(
    document: Document, listen: Mapping[str, object] | None = None, auth: str | None = None
) -> tuple[Settings | None, list[Problem]]:
    """The settings, or None, and every problem of document and values together."""
    data = document.value
    if not isinstance(data, dict):
        message = "the file must hold settings, as `key: value` lines"
        return None, [*document.problems, Problem("", document.lines.get(()), message)]
    try:
        document.value = _without_empty(_with_arguments(data, listen or {}, auth), Settings)
        settings = Settings.model_validate(document.value)
    except ValidationError as error:
        return None, [*document.problems, *mistakes_of(error, document)]
    return settings, list(document.problems)


def _with_arguments(data: dict[str, object], listen: Mapping[str, object], auth: str | None) -> dict[str, object]:
    """The data with what the command line says instead."""
    given = {name: value for name, value in listen.items() if value is not None}
    section = data.get("listen") or {}
    if given and isinstance(section, dict):
        data = {**data, "listen": {**section, **given}}
    return data if auth is None else {**data, "auth": auth}


def _without_empty(value: object, annotation: Any) -> object:
    """The values without settings that were left empty (`keys:` and nothing after it): they keep their default."""
    model = model_in(annotation)
    if model is None:
        return value
    if get_origin(annotation) is tuple:
        return [_without_empty(item, model) for item in value] if isinstance(value, list) else value
    if not isinstance(value, dict):
        return value
    if get_origin(annotation) is dict:
        return {name: _without_empty(item, model) for name, item in value.items()}
    fields = model.model_fields
    return {
        name: _without_empty(item, fields[name].annotation if name in fields else None)
        for name, item in value.items()
        if item is not None or name not in fields
    }


# -- warnings ------------------------------------------------------------------------------------------------------

_Warning: TypeAlias = tuple[Location, str, str | None]  # where, what, hint

_NOT_ENFORCED: Final = "is read, but this version does not act on it yet"


def _warnings(settings: Settings, document: Document) -> Iterator[Problem]:
    """What is allowed and yet probably not meant."""
    for location, message, hint in (*_key_warnings(settings), *_upstream_warnings(settings), *_unreached(settings)):
        is_from_environment = location[-1] == "key" and location in document.from_environment
        if not is_from_environment:
            yield Problem(path_of(location), document.line_of(location), message, hint)


def _key_warnings(settings: Settings) -> Iterator[_Warning]:
    for index, key in enumerate(settings.keys):
        for name in ("requests_per_minute", "concurrent"):
            if getattr(key, name) is not None:
                yield ("keys", index, name), _NOT_ENFORCED, None
        if key.key is not None:
            hint = "take it from the environment (`${NAME}`), or give its `sha256` instead"
            yield ("keys", index, "key"), "the key stands in the file", hint


def _upstream_warnings(settings: Settings) -> Iterator[_Warning]:
    used = {name for route in settings.routes for name in (*route.upstreams, route.budget.fallback)}
    for name, upstream in settings.upstreams.items():
        if upstream.is_tls and not upstream.tls.verify:
            yield ("upstreams", name, "tls", "verify"), "the server's certificate is not checked", None
        if name not in used:
            yield ("upstreams", name), "no route uses this upstream", None


def _unreached(settings: Settings) -> Iterator[_Warning]:
    """Routes behind one that takes everything. A route with a prefix is found by its prefix, wherever it stands."""
    taken: dict[str | None, str] = {}
    for index, route in enumerate(settings.routes):
        prefix = route.match.prefix
        if prefix in taken:
            hint = f"`{taken[prefix]}` before it takes all its requests; put the more particular route first"
            yield ("routes", index), f"route `{route.name}` is never reached", hint
        elif route.match == Match(prefix=prefix):
            taken[prefix] = route.name

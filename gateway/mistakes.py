"""What is wrong with settings, in words: pydantic's errors as problems with path, line and hint.

No message holds the value of a setting, because any of them may be a secret in the wrong place.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gateway.config import DEFAULT_ROUTE_NAME, Settings
from gateway.document import Document, Location, Problem, path_of

_STEPS: Final[dict[object, str]] = {tuple: "[]", dict: ".NAME"}


def settings_tree(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting as (path, field): `listen.port`, `upstreams.NAME.url`, `routes[].match.prefix`."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        inner = model_in(field.annotation)
        if inner is not None:
            yield from settings_tree(inner, f"{prefix}{name}{_STEPS.get(get_origin(field.annotation), '')}.")


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The settings object that an annotation holds, alone, in a list or under names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for model in map(model_in, get_args(annotation)) if model is not None), None)


def is_secret(field: FieldInfo) -> bool:
    """True for a setting whose value must never be shown."""
    return field.annotation is SecretStr or SecretStr in get_args(field.annotation)


def mistakes_of(error: ValidationError, document: Document) -> Iterator[Problem]:
    """Every mistake of values and names. Those of values that could not be had are known already and left out."""
    details = error.errors(include_url=False, include_input=False)
    for detail in details:
        if detail["loc"] and detail["loc"] not in document.broken:
            yield _problem(detail, detail["loc"], document)
    if not document.broken:  # a name that could not be had agrees with nothing: no news
        yield from _disagreements(_about_names(details, document), document)


def _about_names(details: list[ErrorDetails], document: Document) -> list[ErrorDetails]:
    """What `Settings` says about names that do not agree, which it looks at only when all values are right."""
    found = [detail for detail in details if not detail["loc"]]
    if found or not isinstance(document.value, dict):
        return found
    try:
        Settings.model_validate(_names_only(document.value))
    except ValidationError as error:
        return [detail for detail in error.errors(include_url=False, include_input=False) if not detail["loc"]]
    return []


def _names_only(data: Mapping[str, object]) -> dict[str, object]:
    """The same names with values that are right."""
    upstreams = data.get("upstreams")
    names = [str(name) for name in upstreams] if isinstance(upstreams, dict) else []
    listen, auth = data.get("listen"), data.get("auth")
    return {
        "listen": {"host": str(listen.get("host", "localhost")) if isinstance(listen, dict) else "localhost"},
        "auth": auth if auth in ("keys", "none") else None,
        "upstreams": {name: {"url": "http://localhost"} for name in names},
        "keys": [
            {"name": str(key.get("name")), "sha256": "0" * 64, "routes": _words(key.get("routes"))}
            for key in _entries(data, "keys")
        ],
        "routes": [
            {
                "name": str(route.get("name", DEFAULT_ROUTE_NAME)),
                "upstreams": _words(route.get("upstreams")) or names,
                "match": {
                    "keys": _words(match.get("keys")) or [] if isinstance(match := route.get("match"), dict) else []
                },
            }
            for route in _entries(data, "routes")
        ],
    }


def _entries(data: Mapping[str, object], section: str) -> list[dict[str, object]]:
    entries = data.get(section)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _words(value: object) -> list[str] | None:
    """A list of names, or the one name that may stand for it; None for anything else."""
    if isinstance(value, str):
        return [value]
    return [str(item) for item in value] if isinstance(value, list) else None


def _problem(error: ErrorDetails, location: Location, document: Document) -> Problem:
    line = document.line_of(location)
    if error["type"] == "extra_forbidden":
        return _unknown_key(location, line)
    message, hint = _sentence(error, location)
    return Problem(path_of(location), line, message, hint)


def _unknown_key(location: Location, line: int | None) -> Problem:
    *around, key = location
    known = dict(settings_tree())
    parent = _declared(around)
    start = f"{parent}." if parent else ""
    siblings = [path.removeprefix(start) for path in known if path.startswith(start)]
    siblings = [name for name in siblings if "." not in name and "[" not in name]
    close = difflib.get_close_matches(str(key).lower().replace("-", "_"), siblings, n=1, cutoff=0.6)
    elsewhere = [path for path in known if path.rpartition(".")[2] == key]
    path = path_of(tuple(around))
    if close:
        return Problem(path, line, f"unknown key `{key}`", f"did you mean `{close[0]}`?")
    if elsewhere:
        return Problem(path, line, f"unknown key `{key}`", f"there is such a setting elsewhere: `{elsewhere[0]}`")
    hint = f"known here: {', '.join(f'`{name}`' for name in siblings)}"
    if parent == "keys[]":  # what stands here may be the key itself
        return Problem(path, line, "unknown key", hint)
    return Problem(path, line, f"unknown key `{key}`", hint)


def _declared(location: Iterable[str | int]) -> str:
    """The path of a place as `settings_tree` writes it: `("upstreams", "thor")` is `upstreams.NAME`."""
    path = ""
    model: type[BaseModel] | None = Settings
    annotation: Any = None
    for step in location:
        if model is not None and isinstance(step, str) and step in model.model_fields:
            annotation = model.model_fields[step].annotation
            path += f".{step}" if path else step
            model = None if get_origin(annotation) in (tuple, dict) else model_in(annotation)
        else:
            path += "[]" if isinstance(step, int) else ".NAME"
            model = model_in(annotation)
    return path


_WHOLE: Final = "must be a whole number"
_NUMBER: Final = "must be a number"
_SWITCH: Final = "must be `true` or `false`"
_TEXT: Final = "must be text"
_SENTENCES: Final = {
    "int_type": _WHOLE, "int_parsing": _WHOLE, "int_from_float": _WHOLE, "int_parsing_size": _WHOLE,
    "float_type": _NUMBER, "float_parsing": _NUMBER, "finite_number": "must be a finite number",
    "bool_type": _SWITCH, "bool_parsing": _SWITCH, "string_type": _TEXT,
    "greater_than": "must be above {gt:g}", "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}", "less_than_equal": "must be at most {le:g}",
    "string_too_long": "must be at most {max_length} characters long", "string_too_short": "must not be empty",
    "too_short": "must not be empty", "tuple_type": "must be a list",
    "dict_type": "must be `key: value` lines", "model_type": "must be `key: value` lines",
    "model_attributes_type": "must be `key: value` lines",
}  # fmt: skip


def _sentence(error: ErrorDetails, location: Location) -> tuple[str, str | None]:
    """What is wrong, and a hint. pydantic's own text is used where it quotes nothing and we have no better."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "is missing", _HINTS.get(_declared(location))
    if kind == "value_error":
        return str(context.get("error") or error["msg"]), None
    if kind == "literal_error":
        return "must be " + str(context["expected"]).replace("'", "`"), None
    if kind == "string_pattern_mismatch" and location[-1] == "sha256":
        return "must be the 64 hexadecimal digits of a SHA-256", '`printf %s "$KEY" | sha256sum` prints them'
    if kind in _SENTENCES:
        return _SENTENCES[kind].format(**context), _HINTS.get(_declared(location))
    return error["msg"][:1].lower() + error["msg"][1:], None


_HINTS: Final = {
    "upstreams": "name at least one model server: `upstreams: {main: {url: http://127.0.0.1:8000}}`",
    "upstreams.NAME": "`NAME: {url: http://host:port}`",
    "upstreams.NAME.url": "like `http://127.0.0.1:8000`",
    "routes[].upstreams": "the names of one or more `upstreams`, like `[main]`",
    "keys[].key": "put quotes around a key that consists of digits",
    "upstreams.NAME.api_key": "put quotes around a key that consists of digits",
}

_ABOUT: Final = re.compile(r"(route|key) `(.*?)`: (.*)", re.DOTALL)
_TWICE: Final = re.compile(r"two (route|key)s are called `(.*)`", re.DOTALL)
_NOT_CALLED: Final = re.compile(r"no (upstream|route|key) is called `(.*)`", re.DOTALL)


def _disagreements(details: list[ErrorDetails], document: Document) -> Iterator[Problem]:
    """One problem for each finding, with the place it speaks of."""
    data = document.value if isinstance(document.value, dict) else {}
    sentences = [str(detail.get("ctx", {}).get("error") or detail["msg"]) for detail in details]
    for sentence in (part for whole in sentences for part in whole.split("; ")):
        about, twice = _ABOUT.fullmatch(sentence), _TWICE.fullmatch(sentence)
        if about is not None:
            location = _named(data, f"{about[1]}s", about[2], last=False)
            yield Problem(path_of(location), document.line_of(location), about[3], _nearest_name(about[3], data))
        elif twice is not None:
            location = _named(data, f"{twice[1]}s", twice[2], last=True)
            yield Problem(path_of(location), document.line_of(location), sentence)
        else:
            place: Location = ("listen", "host") if sentence.startswith("`listen.host` ") else ("auth",)
            yield Problem(path_of(place), document.line_of(place), sentence.removeprefix("`listen.host` "))


def _named(data: Mapping[str, object], section: str, name: str, *, last: bool) -> Location:
    """Where the entry called `name` stands in a list of the file; the section itself when it has no such entry."""
    entries = data.get(section)
    found = [
        index
        for index, entry in enumerate(entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and str(entry.get("name", DEFAULT_ROUTE_NAME)).strip() == name
    ]
    return (section, found[-1 if last else 0]) if found else (section,)


def _nearest_name(sentence: str, data: Mapping[str, object]) -> str | None:
    match = _NOT_CALLED.fullmatch(sentence)
    if match is None:
        return None
    section = data.get(f"{match[1]}s")
    entries = _entries(data, f"{match[1]}s")
    names = list(section) if isinstance(section, dict) else [entry["name"] for entry in entries if "name" in entry]
    close = difflib.get_close_matches(match[2], map(str, names), n=1, cutoff=0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"there are: {', '.join(f'`{name}`' for name in names)}" if names else f"there are no `{match[1]}s`"

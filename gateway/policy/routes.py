"""Which route takes a request, and what a path means before any route is asked.

Paths are text as it came over the wire (percent-encoded, latin-1 for raw bytes, without the query). They are never
decoded: what the rules see is what goes upstream, so nothing can be spelt in a way that the two understand
differently. Odd spellings of ordinary characters (`%2e`, `%76`) are refused instead: no client has a use for them.

A prefix and models are two doors to the same route: `/fast/v1/…` leads there whatever model is named, and so does the
model's name on the plain `/v1/…`. The other conditions hold at both. The longest prefix that fits the path decides,
wherever its routes stand in the file: a route without prefix has nothing to do with `/fast/v1/…`. Among routes of one
prefix the first that also names the model wins, else the first.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote

from gateway.config import Key, Match, Route, Settings
from gateway.wire.kinds import DATA_PLANE_PATHS

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case

_GLOB_CHARACTERS: Final = re.compile(r"[*?\[]")
_FINE_PATH: Final = re.compile(r"(?:/[A-Za-z0-9_\-~:@!$&'()*+,=][A-Za-z0-9_\-~:@!$&'()*+,=.]*)+")
_ESCAPE: Final = re.compile(r"%([0-9A-Fa-f]{2})?")
_SLASHES: Final = re.compile(r"/{2,}")
_VISIBLE: Final = "".join(map(chr, range(0x21, 0x7F)))

# Escapes that a path may hold: bytes of UTF-8 beyond ASCII, the space, and visible characters that RFC 3986 reserves
# without meaning in a path. Not: letters, digits, `-._~` (never escaped by an honest client), `/ \ % ; ? #`, controls.
_FINE_ESCAPES: Final = frozenset({*range(0x80, 0x100), *b" \"<>[]^`{|}!$&'()*+,:=@"})

# What stands behind /v1 in the paths of the data plane, for hints to people whose base URL is wrong; longest first.
_ENDPOINTS: Final = tuple(
    sorted(
        ("/models", *(path.removeprefix("/v1") for path in DATA_PLANE_PATHS if path.startswith("/v1/"))),
        key=len,
        reverse=True,
    )
)


class Found(NamedTuple):
    """The route, and the path without the route's prefix: `/v1/chat/completions`."""

    route: Route
    rest: str


class RouteTable:
    """All routes, arranged for look-up. Immutable: a reload makes a new one."""

    __slots__ = ("_always", "_plain", "_prefixed", "_routes")

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = tuple(routes)
        rules = [_Rule(route) for route in routes]
        self._plain = tuple(rule for rule in rules if not rule.prefix or rule.has_models)
        self._prefixed: dict[str, tuple[_Rule, ...]] = {}  # by first segment, longest prefix first
        for rule in sorted((rule for rule in rules if rule.prefix), key=lambda rule: -len(rule.prefix)):
            segment = _first_segment(rule.prefix)
            self._prefixed[segment] = (*self._prefixed.get(segment, ()), rule)
        is_open = not self._prefixed and bool(self._plain) and self._plain[0].is_unconditional
        self._always = self._plain[0].route if is_open else None

    def __repr__(self) -> str:
        return f"RouteTable({', '.join(route.name for route in self._routes)})"

    def find(self, path: str, model: str | None, headers: Headers, key_name: str | None) -> Found | None:
        """The route for a path that `normalise_path` returned; None: no route takes it."""
        if self._always is not None:
            return Found(self._always, path)
        if self._prefixed:
            below = [(rule, rest) for rule, rest in self._below(path) if rule.takes(rest, headers, key_name)]
            for rule, rest in below:
                if rule.takes_model(model):
                    return Found(rule.route, rest)
            if below:
                return Found(below[0][0].route, below[0][1])
            if self._is_below_any(path):
                return None
        for rule in self._plain:
            if rule.takes_model(model) and rule.takes(path, headers, key_name):
                return Found(rule.route, path)
        return None

    def _below(self, path: str) -> list[tuple[_Rule, str]]:
        """The rules of the longest prefix that this path begins with, each with the rest of the path."""
        found: list[tuple[_Rule, str]] = []
        for rule in self._prefixed.get(_first_segment(path), ()):
            rest = rule.rest_of(path)
            if rest is not None and (not found or rule.prefix == found[0][0].prefix):
                found.append((rule, rest))
        return found

    def _is_below_any(self, path: str) -> bool:
        return any(rule.rest_of(path) is not None for rule in self._prefixed.get(_first_segment(path), ()))

    def model_names(self, key: Key | None = None) -> tuple[str, ...]:
        """The literal model names of all routes (those that `key` may use), in the order of the file, each once."""
        routes = (route for route in self._routes if key is None or may_use(key, route))
        return tuple(dict.fromkeys(name for route in routes for name in route.match.models if _is_literal(name)))


def compile_routes(settings: Settings) -> RouteTable:
    """The table for these settings."""
    return RouteTable(settings.routes)


def may_use(key: Key, route: Route) -> bool:
    """Whether the key opens the route. A key without a list of routes opens all."""
    return key.routes is None or route.name in key.routes


class _Rule:
    """One route's conditions, compiled."""

    __slots__ = (
        "_headers",
        "_keys",
        "_literal_models",
        "_model_globs",
        "_paths",
        "has_models",
        "is_unconditional",
        "prefix",
        "route",
    )

    def __init__(self, route: Route) -> None:
        match = route.match
        self.route = route
        self.prefix = _encoded(match.prefix or "")
        self.is_unconditional = match == Match(prefix=match.prefix)
        self.has_models = bool(match.models)
        self._literal_models = frozenset(filter(_is_literal, match.models))
        self._model_globs = _any_of([name for name in match.models if not _is_literal(name)])
        self._paths = _any_of([_encoded(glob) for glob in match.paths])
        self._headers = tuple((name.lower().encode(), _any_of([glob])) for name, glob in match.headers.items())
        self._keys = frozenset(match.keys)

    def rest_of(self, path: str) -> str | None:
        """The path after the prefix; None when the prefix is not there as whole segments."""
        prefix = self.prefix
        if not prefix:
            return path
        if not path.startswith(prefix):
            return None
        rest = path[len(prefix) :]
        if not rest:
            return "/"
        return rest if rest[0] == "/" else None

    def takes(self, rest: str, headers: Headers, key_name: str | None) -> bool:
        """Whether all conditions but the two doors, prefix and models, hold."""
        return self.is_unconditional or (
            (self._paths is None or self._paths.match(rest) is not None)
            and (not self._keys or key_name in self._keys)
            and (not self._headers or self._takes_headers(headers))
        )

    def takes_model(self, model: str | None) -> bool:
        if not self._literal_models and self._model_globs is None:
            return True
        if model is None:
            return False
        return model in self._literal_models or (
            self._model_globs is not None and self._model_globs.match(model) is not None
        )

    def _takes_headers(self, headers: Headers) -> bool:
        """Every condition is met by at least one header of its name."""
        given = [(name, value.decode("utf-8", "surrogateescape")) for name, value in headers]
        return all(
            any(name == wanted and glob is not None and glob.match(value) for name, value in given)
            for wanted, glob in self._headers
        )


def normalise_path(path: str) -> str | None:
    """The path as routes know it: one slash between segments, none at the end. None: no such path (404).

    `/v1//models/` is `/v1/models`. Case stays. None for `..`, `;`, backslashes, control characters, and escapes of
    characters that have a meaning in paths or need no escape.
    """
    if _FINE_PATH.fullmatch(path):
        return path
    if not path.startswith("/"):
        return None
    if not path.isascii():
        path = _encoded(path)
    if any(not " " < character <= "~" or character in '\\;?#"<>' for character in path):
        return None
    path = _SLASHES.sub("/", _ESCAPE.sub(lambda escape: escape[0].upper(), path))
    if not all(escape[1] and int(escape[1], 16) in _FINE_ESCAPES for escape in _ESCAPE.finditer(path)):
        return None
    if any(segment in (".", "..") for segment in path.split("/")):
        return None
    return path.rstrip("/") or "/"


def canonical_hint(path: str) -> str | None:
    """A sentence for somebody whose base URL leads to a path that does not exist; None when there is none to give.

    `path` is what was asked for, with or without a route's prefix.
    """
    path = _SLASHES.sub("/", path).rstrip("/")
    lower = path.lower()
    if "/v1/v1" in lower:
        return "The path holds /v1 twice: the client adds it by itself, so the base URL should end without /v1."
    endpoint = next((name for name in _ENDPOINTS if lower.endswith(name)), None)
    if endpoint is None:
        return None
    if not lower.endswith("/v1" + endpoint):
        return f"The path lacks /v1 before {endpoint}: the base URL should end in /v1."
    if not path.endswith("/v1" + endpoint):
        return f"Paths are case-sensitive: /v1{endpoint} in small letters."
    return None


def _first_segment(path: str) -> str:
    """`/fast` of `/fast/v1/models`."""
    end = path.find("/", 1)
    return path if end < 0 else path[:end]


def _is_literal(name: str) -> bool:
    return _GLOB_CHARACTERS.search(name) is None


def _any_of(globs: Sequence[str]) -> re.Pattern[str] | None:
    """One pattern for several globs (`*`, `?`, `[…]`, case matters); None for none."""
    return re.compile("|".join(map(fnmatch.translate, globs))) if globs else None


def _encoded(path: str) -> str:
    """Non-ASCII characters and spaces percent-encoded. Text that makes UTF-8 when read as bytes is taken for bytes."""
    if path.isascii() and " " not in path:
        return path
    try:
        raw = path.encode("latin-1")
        raw.decode("utf-8")
    except UnicodeError:
        raw = path.encode("utf-8", "replace")
    return quote(raw, safe=_VISIBLE)

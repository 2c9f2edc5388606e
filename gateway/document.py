"""A YAML document as plain values, each with the line it stands on and its environment references resolved.

Decisions a reader would question:

- Scalars follow YAML 1.2: only `true` and `false` are booleans. `thinking: off` is the word `off`, and the country
  code `no` stays text. PyYAML's own resolvers follow YAML 1.1, so they are replaced here.
- `${NAME}` is resolved after parsing, never before, so that no value of the environment can break or extend the
  file. But `{` and `}` mean something in YAML's flow style, and `{name: dify, key: ${DIFY_KEY}}` is how people write
  it: each reference is therefore exchanged for one private character, its number, and the character again before
  parsing, which keeps every line where it was.
- Nothing is raised for a mistake in the file: problems are collected, so that all of them can be shown at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import yaml

Location: TypeAlias = tuple[str | int, ...]
_Entry: TypeAlias = tuple[yaml.Node, yaml.Node]  # key and value

MAX_VALUES: Final = 100_000  # a settings file has hundreds; aliases of aliases can unfold into billions
MAX_DEPTH: Final = 64  # the settings tree is 4 deep, free-form values (`override`) somewhat more
_MAX_DIGITS: Final = 400  # of a number; Python refuses to read integers above 4300 digits

_TAG: Final = "tag:yaml.org,2002:"
_REFERENCE: Final = re.compile(r"(\$?)\$\{([^{}\n]*)\}")
_REFERENCE_PARTS: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_LITELLM_REFERENCE: Final = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)")
_PLAIN_KEY: Final = re.compile(r"[\w-]+")
_UNSET: Final = "unset"  # stands in for a value that could not be had, so that the rest can still be checked


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake (or warning): where, what, and what would be right. Holds no secret."""

    path: str  # like `routes[0].budget.ttft_ms`; empty: the whole file
    line: int | None  # counted from 1; None: not known, or not from a file
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        """One line without file name: `line 12: routes[0].thinking: must be …`."""
        where = f"line {self.line}: " if self.line is not None else ""
        return where + (f"{self.path}: " if self.path else "") + self.message


@dataclass(slots=True)
class Document:
    """What a text says. `value` is meaningful only as far as `problems` allow."""

    value: object = None
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    from_environment: set[Location] = field(default_factory=set)
    broken: set[Location] = field(default_factory=set)  # values that stand in for one that could not be had
    is_readable: bool = True  # False: no value at all came out

    def line_of(self, location: Location) -> int | None:
        """Line of the value, or of the nearest thing around it that has one."""
        for end in range(len(location), 0, -1):
            if location[:end] in self.lines:
                return self.lines[location[:end]]
        return None


def path_of(location: Location) -> str:
    """`("routes", 0, "budget")` as people write it: `routes[0].budget`."""
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{step!r}]"
    return text


def read(text: str, environ: Mapping[str, str]) -> Document:
    """The document in `text`. An empty text is an empty mapping. Never raises for what the text holds."""
    references = _References(text)
    document = Document()
    try:
        node = _compose(references.text)
        document.value = {} if node is None else _Reader(document, references, environ).value_of(node, ())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line if error.problem_mark is not None else None
        _unreadable(document, line, _syntax_message(error), references.hint_for(line))
    except yaml.reader.ReaderError as error:
        line = references.text.count("\n", 0, error.position)
        _unreadable(document, line, f"the character U+{error.character:04X} is not allowed in YAML", None)
    except RecursionError:
        _unreadable(document, None, f"nested more than {MAX_DEPTH} deep", None)
    except _TooLarge as error:
        _unreadable(document, error.line, error.message, None)
    return document


def _unreadable(document: Document, zero_based_line: int | None, message: str, hint: str | None) -> None:
    document.is_readable = False
    line = None if zero_based_line is None else zero_based_line + 1
    document.problems = [Problem("", line, message, hint)]


class _TooLarge(Exception):
    def __init__(self, message: str, node: yaml.Node) -> None:
        super().__init__(message)
        self.message = message
        self.line = node.start_mark.line


def _resolvers(*rows: tuple[str, str, str]) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's table: the first character of a plain scalar, then (tag, pattern) pairs to try in order."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, pattern, first_characters in rows:
        for character in first_characters or [""]:
            table.setdefault(character, []).append((_TAG + name, re.compile(pattern)))
    return table


_RESOLVERS: Final = _resolvers(
    ("null", r"(?:~|null|Null|NULL)\Z", "~nN"),
    ("null", r"\Z", ""),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)\Z", "tTfF"),
    ("int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z", "-+.0123456789"),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z", "-+."),
    ("merge", r"<<\Z", "<"),
)


def _plain_tag(text: str) -> str:
    """The tag of an unquoted scalar, as the loader finds it."""
    for tag, pattern in _RESOLVERS.get(text[:1], ()):
        if pattern.match(text):
            return tag
    return _TAG + "str"


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of YAML 1.2's core schema, and `<<`."""

    yaml_implicit_resolvers = _RESOLVERS


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


_SYNTAX: Final = {
    "found character '\\t' that cannot start any token": "a tab indents this line: YAML takes only spaces there",
    "but found another document": "a second document begins here (`---`): one is all there can be",
    "mapping values are not allowed here": "a second `:` on this line, or the indentation is wrong: "
    "put quotes around text that holds `: `",
    "could not find expected ':'": "the `:` after a key is missing here, or on the line before",
}


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    """One line for a syntax error. PyYAML's own words quote structure, never values."""
    problem = error.problem or "cannot be parsed"
    if problem in _SYNTAX:
        return _SYNTAX[problem]
    context = f"{error.context}: " if error.context else ""
    return f"not valid YAML: {context}{problem}".replace("\n", " ")


class _References:
    """The `${…}`s of a text, exchanged for marks that YAML reads as plain characters."""

    def __init__(self, text: str) -> None:
        private_use = map(chr, range(0xE000, 0xF900))
        self._mark = next((character for character in private_use if character not in text), "\ufffd")
        self._bodies: list[tuple[str, str]] = []
        self._original_lines = text.split("\n") if "${" in text else []
        self._pattern = re.compile(f"{self._mark}([0-9]+){self._mark}")
        self.text = _REFERENCE.sub(self._exchange, text)

    def _exchange(self, match: re.Match[str]) -> str:
        self._bodies.append((match[1], match[2]))
        return f"{self._mark}{len(self._bodies) - 1}{self._mark}"

    def is_one(self, text: str) -> bool:
        """True when the text is a single reference and nothing else."""
        return self._pattern.fullmatch(text) is not None

    def pieces_of(self, text: str) -> Iterator[tuple[str, str | None]]:
        """The text as (literal, None) and ("", body of a reference) pieces, in order."""
        end = 0
        for match in self._pattern.finditer(text):
            escape, body = self._bodies[int(match[1])]
            yield text[end : match.start()], None
            yield ("${" + body + "}", None) if escape else ("", body)
            end = match.end()
        yield text[end:], None

    def hint_for(self, zero_based_line: int | None) -> str | None:
        """A hint for a syntax error on a line that holds a `${` which is not a reference."""
        if zero_based_line is None or not 0 <= zero_based_line < len(self._original_lines):
            return None
        rest = _REFERENCE.sub("", self._original_lines[zero_based_line])
        if "${" not in rest:
            return None
        return "a reference to the environment is `${NAME}` or `${NAME:-default}`, on one line"


class _Reader:
    """Turns nodes into values; what is wrong goes into the document's problems."""

    def __init__(self, document: Document, references: _References, environ: Mapping[str, str]) -> None:
        self._document = document
        self._references = references
        self._environ = environ
        self._count = 0

    def value_of(self, node: yaml.Node, location: Location) -> object:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _TooLarge(f"more than {MAX_VALUES:,} values, with aliases unfolded", node)
        if len(location) > MAX_DEPTH:
            raise _TooLarge(f"nested more than {MAX_DEPTH} deep", node)
        self._document.lines.setdefault(location, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, location)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.value_of(item, (*location, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, location)
        return self._broken(location, f"the tag `{node.tag.removeprefix(_TAG)}` is not supported")

    def _broken(self, location: Location, message: str, hint: str | None = None) -> object:
        self._document.broken.add(location)
        self._document.problems.append(Problem(path_of(location), self._document.line_of(location), message, hint))
        return _UNSET

    # -- mappings ---------------------------------------------------------------------------------------------------

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, (key_node, value_node) in self._entries(node, location, 0).items():
            self._document.lines[*location, key] = key_node.start_mark.line + 1
            result[key] = self.value_of(value_node, (*location, key))
        return result

    def _entries(self, node: yaml.MappingNode, location: Location, depth: int) -> dict[str, _Entry]:
        """The mapping's own entries, then those that `<<: *other` or `<<: [*one, *two]` brings in and it lacks."""
        self._count += 1
        if self._count > MAX_VALUES or depth > MAX_DEPTH:
            raise _TooLarge("`<<` brings in too much, or itself", node)
        found: dict[str, _Entry] = {}
        merges: list[_Entry] = []
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                merges.append((key_node, value_node))
                continue
            key = self._key(key_node, location)
            if key in found:
                first = found[key][0].start_mark.line + 1
                self._note((*location, key), key_node, f"is given twice, first on line {first}")
            elif key is not None:
                found[key] = key_node, value_node
        for key_node, value_node in merges:
            for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                if isinstance(source, yaml.MappingNode):
                    found = self._entries(source, location, depth + 1) | found
                else:
                    self._note(location, key_node, "`<<` takes another mapping, or a list of them")
        return found

    def _key(self, node: yaml.Node, location: Location) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._note(location, node, "a key must be a word, not a list or a mapping")
            return None
        pieces = list(self._references.pieces_of(node.value))
        if any(body is not None for _, body in pieces):
            self._note(location, node, "a key cannot come from the environment")
            return None
        return "".join(literal for literal, _ in pieces)

    def _note(self, location: Location, node: yaml.Node, message: str) -> None:
        problem = Problem(path_of(location), node.start_mark.line + 1, message)
        if problem not in self._document.problems:  # a merged mapping is read once per use
            self._document.problems.append(problem)

    # -- scalars ----------------------------------------------------------------------------------------------------

    def _scalar(self, node: yaml.ScalarNode, location: Location) -> object:
        text = self._expanded(node.value, location)
        if text is None:
            return _UNSET
        if node.tag != _TAG + "str":
            return self._typed(node.tag, text, location)
        if node.style is None and self._references.is_one(node.value) and _is_free_form(location):
            return self._typed(_plain_tag(text), text, location)
        return text

    def _typed(self, tag: str, text: str, location: Location) -> object:
        kind = tag.removeprefix(_TAG)
        try:
            if kind == "str":
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int" and len(text) <= _MAX_DIGITS:
                return int(text, 0 if text[:2].lower() in ("0x", "0o") else 10)
            if kind == "float" and len(text) <= _MAX_DIGITS:
                return self._finite(float(text.lower().replace(".inf", "inf").replace(".nan", "nan")), location)
        except (ValueError, KeyError):
            return self._broken(location, f"this is not a YAML `{kind}`")
        if kind in ("int", "float"):
            return self._broken(location, f"a number of more than {_MAX_DIGITS} digits")
        return self._broken(location, f"the tag `{kind}` is not supported")

    def _finite(self, number: float, location: Location) -> object:
        if math.isfinite(number):
            return number
        return self._broken(location, "must be a finite number")

    # -- the environment --------------------------------------------------------------------------------------------

    def _expanded(self, text: str, location: Location) -> str | None:
        """The text with its references resolved; None when one could not be (the problem is noted)."""
        whole = _LITELLM_REFERENCE.fullmatch(text)
        if whole is not None:
            return self._variable(whole[1], None, location)
        if "${" in text:
            self._misspelt(location)
            return None
        parts: list[str | None] = []
        for literal, body in self._references.pieces_of(text):
            parts.append(literal if body is None else self._reference(body, location))
        if None in parts:
            return None
        return "".join(part for part in parts if part is not None)

    def _reference(self, body: str, location: Location) -> str | None:
        match = _REFERENCE_PARTS.fullmatch(body)
        if match is None:
            self._misspelt(location)
            return None
        return self._variable(match[1], match[2], location)

    def _misspelt(self, location: Location) -> None:
        """Does not quote the text: it may be a key that somebody put between the braces."""
        hint = "write `${NAME}` or `${NAME:-default}` on one line; for the characters themselves `$${NAME}`"
        self._broken(location, "a `${` here does not begin a reference to the environment", hint)

    def _variable(self, name: str, default: str | None, location: Location) -> str | None:
        """As in a shell: with `:-` an empty variable counts as unset."""
        value = self._environ.get(name)
        self._document.from_environment.add(location)
        if value is None or (not value and default is not None):
            if default is None:
                hint = f"`export {name}=…` before starting, or give a default: `${{{name}:-value}}`"
                self._broken(location, f"the environment variable `{name}` is not set", hint)
            return default
        if not _is_text(value):
            self._broken(location, f"the environment variable `{name}` is not valid UTF-8")
            return None
        return value


def _is_text(value: str) -> bool:
    """False when the operating system gave bytes that are not UTF-8: they come as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_free_form(location: Location) -> bool:
    """True inside `defaults` and `override`, where no declared type makes a number of the text `${N:-3}` gives."""
    return len(location) > 3 and location[0] == "routes" and location[2] in ("defaults", "override")

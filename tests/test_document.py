"""YAML as plain values with lines, and references to the environment."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.document import MAX_VALUES, Document, Problem, path_of, read

ENVIRON = {"KEY": "s3cret", "EMPTY": "", "ODD": "}: [x, #\n", "N": "7", "BYTES": "\udcff"}


def value(text: str) -> object:
    document = read(text, ENVIRON)
    assert document.problems == []
    return document.value


def problems(text: str) -> list[str]:
    return [str(problem) for problem in read(text, ENVIRON).problems]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("no", "no"),
        ("n", "n"),
        ("true", True),
        ("False", False),
        ("'true'", "true"),
        ("null", None),
        ("~", None),
        ("", None),
        ("12", 12),
        ("-3", -3),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.10", 1.1),
        ("=", "="),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ("12345678901234567890", 12345678901234567890),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, expected: object) -> None:
    assert value(f"a: {text}\n") == {"a": expected}
    assert type(value(f"a: {text}\n")["a"]) is type(expected)  # type: ignore[index]


def test_keys_are_words_whatever_they_look_like() -> None:
    assert value("1: a\ntrue: b\n~: c\noff: d\n") == {"1": "a", "true": "b", "~": "c", "off": "d"}


def test_an_empty_text_is_an_empty_mapping() -> None:
    assert value("") == {}
    assert value("# nothing\n") == {}


def test_every_value_has_the_line_of_its_key() -> None:
    document = read("a:\n  b: 1\n\n  c:\n    - x\n    - d: 2\n", {})
    assert document.lines == {
        (): 1, ("a",): 1, ("a", "b"): 2, ("a", "c"): 4, ("a", "c", 0): 5, ("a", "c", 1): 6, ("a", "c", 1, "d"): 6,
    }  # fmt: skip
    assert document.line_of(("a", "c", 1, "e", "f")) == 6
    assert Document().line_of(("a",)) is None


@pytest.mark.parametrize(
    "location, expected",
    [
        ((), ""),
        (("routes", 0, "budget", "ttft_ms"), "routes[0].budget.ttft_ms"),
        (("upstreams", "a.b", "url"), "upstreams['a.b'].url"),
        (("upstreams", "北京", "url"), "upstreams.北京.url"),
        ((0, 1), "[0][1]"),
    ],
)
def test_paths_read_as_people_write_them(location: tuple[str | int, ...], expected: str) -> None:
    assert path_of(location) == expected


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("${KEY}", "s3cret"),
        ("{k: ${KEY}, l: [${KEY}]}", {"k": "s3cret", "l": ["s3cret"]}),
        ("'${KEY}'", "s3cret"),
        ('"${KEY}"', "s3cret"),
        ("http://${KEY}:${N}/x", "http://s3cret:7/x"),
        ("${NOPE:-default}", "default"),
        ("${NOPE:-}", ""),
        ("${NOPE:-a: b, c}", "a: b, c"),
        ("${EMPTY:-default}", "default"),
        ("${EMPTY}", ""),
        ("${KEY:-default}", "s3cret"),
        ("$${KEY}", "${KEY}"),
        ("$KEY", "$KEY"),
        ("os.environ/KEY", "s3cret"),
        ("see os.environ/KEY", "see os.environ/KEY"),
        ("${N}", "7"),
        ("|\n  ${KEY}\n  x\n", "s3cret\nx\n"),
    ],
)
def test_references_are_resolved_in_every_style(text: str, expected: object) -> None:
    assert value(f"a: {text}\n") == {"a": expected}


def test_a_value_from_the_environment_cannot_break_or_extend_the_file() -> None:
    assert value("a: {b: ${ODD}, c: '${ODD}'}\n") == {"a": {"b": ENVIRON["ODD"], "c": ENVIRON["ODD"]}}


def test_a_reference_in_a_comment_means_nothing() -> None:
    assert value("# ${NOPE} ${\na: 1  # os.environ/NOPE ${NOPE}\n") == {"a": 1}


def test_a_number_from_the_environment_is_a_number_where_no_type_is_declared() -> None:
    """`override: {top_k: ${TOP_K:-3}}` would send text to the model server otherwise."""
    text = "routes:\n  - defaults: {n: ${N}, s: '${N}', t: ${NOPE:-0.5}, k: key-${N}, w: ${KEY}}\n    model: ${N}\n"
    assert value(text) == {
        "routes": [{"defaults": {"n": 7, "s": "7", "t": 0.5, "k": "key-7", "w": "s3cret"}, "model": "7"}]
    }


def test_all_unset_variables_are_named_at_once_with_their_lines() -> None:
    document = read("a: ${ONE}\nb:\n  - x${TWO}${THREE}\nc: os.environ/FOUR\nd: ${KEY}\n", ENVIRON)
    assert [str(problem) for problem in document.problems] == [
        "line 1: a: the environment variable `ONE` is not set",
        "line 3: b[0]: the environment variable `TWO` is not set",
        "line 3: b[0]: the environment variable `THREE` is not set",
        "line 4: c: the environment variable `FOUR` is not set",
    ]
    assert document.broken == {("a",), ("b", 0), ("c",)}
    assert ("d",) in document.from_environment
    assert "${ONE:-value}" in (document.problems[0].hint or "")


@pytest.mark.parametrize("text", ["${sk-oops}", "${}", "${ KEY }", "${KEY", "${KEY-x}", "a ${\n  KEY}"])
def test_a_reference_that_is_none_is_a_problem_and_not_quoted(text: str) -> None:
    (problem,) = read(f"a: {text}\n", ENVIRON).problems
    assert problem.line == 1
    assert "does not begin a reference" in problem.message
    assert "oops" not in f"{problem} {problem.hint}"


def test_an_unclosed_reference_in_flow_style_gets_a_hint() -> None:
    (problem,) = read("a: {key: ${KEY\n}}", ENVIRON).problems
    assert "${NAME}" in (problem.hint or "")


def test_a_variable_that_is_not_utf_8_is_a_problem() -> None:
    assert problems("a: ${BYTES}\n") == ["line 1: a: the environment variable `BYTES` is not valid UTF-8"]


def test_characters_of_the_private_use_area_do_not_confuse_references() -> None:
    assert value("a: '\ue0000\ue000 ${KEY}'\n") == {"a": "\ue0000\ue000 s3cret"}


# -- anchors, merges, mistakes -----------------------------------------------------------------------------------------


def test_anchors_and_merges_work_and_own_keys_win() -> None:
    text = "x: &a {p: 1, q: 1}\ny: &b {q: 2, r: 2}\nz: {<<: [*a, *b], r: 3}\nw:\n  <<: *a\n  p: 9\nv: *a\n"
    assert value(text) == {
        "x": {"p": 1, "q": 1},
        "y": {"q": 2, "r": 2},
        "z": {"p": 1, "q": 1, "r": 3},
        "w": {"p": 9, "q": 1},
        "v": {"p": 1, "q": 1},
    }


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a: 1\nb: 2\na: 3\n", ["line 3: a: is given twice, first on line 1"]),
        ("r:\n  - {x: 1, x: 2}\n", ["line 2: r[0].x: is given twice, first on line 2"]),
        ("a:\n\tb: 1\n", ["line 2: a tab indents this line: YAML takes only spaces there"]),
        ("a: 1\n---\nb: 2\n", ["line 2: a second document begins here (`---`): one is all there can be"]),
        ("a: b: c\n", ["line 1: a second `:` on this line, or the indentation is wrong: put quotes around text that holds `: `"]),
        ("a: 1\nbc\nd: 1\n", ["line 3: the `:` after a key is missing here, or on the line before"]),
        ("a: *nope\n", ["line 1: not valid YAML: found undefined alias 'nope'"]),
        ("a: 'x\n", ["line 2: not valid YAML: while scanning a quoted scalar: found unexpected end of stream"]),
        ("a: \x07\n", ["line 1: the character U+0007 is not allowed in YAML"]),
        ("a: 1\nb: \x00\n", ["line 2: the character U+0000 is not allowed in YAML"]),
        ("a: !!python/object:os.system x\n", ["line 1: a: the tag `python/object:os.system` is not supported"]),
        ("a: !mine {}\n", ["line 1: a: the tag `!mine` is not supported"]),
        ("a: !!binary aGk=\n", ["line 1: a: the tag `binary` is not supported"]),
        ("a: !!int x\n", ["line 1: a: this is not a YAML `int`"]),
        ("a: !!bool off\n", ["line 1: a: this is not a YAML `bool`"]),
        ("a: .nan\nb: -.inf\n", ["line 1: a: must be a finite number", "line 2: b: must be a finite number"]),
        ("a: 1e999\n", ["line 1: a: must be a finite number"]),
        ("a: " + "9" * 5000, ["line 1: a: a number of more than 400 digits"]),
        ("? [x]\n: 1\n", ["line 1: a key must be a word, not a list or a mapping"]),
        ("${KEY}: 1\n", ["line 1: a key cannot come from the environment"]),
        ("a:\n  <<: 3\n", ["line 2: a: `<<` takes another mapping, or a list of them"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_line(text: str, expected: list[str]) -> None:
    assert problems(text) == expected


def test_a_mistake_in_a_merged_mapping_is_told_once_for_each_place() -> None:
    found = problems("a: &a {x: 1, x: 2}\nb: {<<: *a}\nc: {<<: [*a, *a]}\n")
    assert found == [f"line 1: {name}.x: is given twice, first on line 1" for name in "abc"]


LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    "text, word",
    [
        (LAUGHS, f"more than {MAX_VALUES:,} values"),
        (LAUGHS.replace("[1,1,1,1,1,1,1,1,1,1]", "{x: 1}").replace("[*", "{<<: [*").replace("]", "]}"), "too much"),
        ("a: &a [*a]", "deep"),
        ("a: &a {<<: *a}", "itself"),
        ("[" * 100_000, "deep"),
        ("- " * 500, "deep"),
        ("{a: " * 100_000, "deep"),
    ],
    ids=["aliases", "merges", "own alias", "own merge", "brackets", "dashes", "braces"],
)
def test_a_file_made_to_exhaust_the_reader_is_refused(text: str, word: str) -> None:
    (problem,) = read(text, {}).problems
    assert word in problem.message
    assert "\n" not in str(problem)


@settings(max_examples=300, deadline=timedelta(seconds=2))
@given(st.text(alphabet=st.sampled_from("ab:-{}[],&*!|>'\"#%@`?~<$\t\n 01.\ue000é${KEY}"), max_size=60))
def test_no_text_makes_the_reader_raise(text: str) -> None:
    document = read(text, ENVIRON)
    assert document.is_readable or document.problems
    assert all(isinstance(problem, Problem) for problem in document.problems)

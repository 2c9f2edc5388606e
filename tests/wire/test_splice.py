"""Edits change what they name and nothing else, on any JSON text."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.spans import has_escaped_letters, loads_leniently
from gateway.wire.splice import Document, Edits, Member, SpliceError, elements, loads, members, string_literal

Pairs = list[tuple[str, bytes]]

# Spellings that a parser and a writer would not both keep.
SCALARS = (
    b"0", b"-0", b"1.10", b"1e5", b"1e400", b"12345678901234567890123", b"-9223372036854775809", b"null", b"true",
    b"false", b'""', b'"a"', b'"\\ud83d"', b'"\\u0041\\n\\/"', b'"\\\\"', b'"say \\"hi\\", {ok} [1, 2]"', b'"\\\\\\""',
    '"北京😀"'.encode(), b'"' + b"long " * 60 + b'"', b'"' + b"long \\\" " * 60 + b'"', b'"' + b"\\\\" * 300 + b'"',
    b'"' + b"x" * 200 + b'\\"' + b"y" * 200 + b'"', b'"\\"max_tokens"', b'{}', b'[]', b'{ "id" : { "model" : 1.10 } }',
)  # fmt: skip
KEYS = {
    "model": (b'"model"', b'"mod\\u0065l"'),
    "max_tokens": (b'"max_tokens"', b'"\\u006dax_tokens"'),
    "kwargs": (b'"kwargs"',),
    "stream": (b'"stream"',),
    "": (b'""',),
    'a"b': (b'"a\\"b"',),
    "键": ('"键"'.encode(), b'"\\u952e"'),
    "\ud83d": (b'"\\ud83d"',),
}
blanks = st.sampled_from([b"", b" ", b"\n  ", b"\r\n\t", b" " * 70])


@st.composite
def written_members(draw: st.DrawFn, values: st.SearchStrategy[bytes]) -> bytes:
    """An object in some spelling; keys may come twice."""
    parts = []
    for _ in range(draw(st.integers(0, 5))):
        spelling = draw(st.sampled_from(KEYS[draw(st.sampled_from(sorted(KEYS)))]))
        value = draw(values)
        parts.append(b"%b%b%b:%b%b%b" % (draw(blanks), spelling, draw(blanks), draw(blanks), value, draw(blanks)))
    return b"{%b}" % (b",".join(parts) or draw(blanks))


@st.composite
def written_list(draw: st.DrawFn, values: st.SearchStrategy[bytes]) -> bytes:
    items = draw(st.lists(st.tuples(blanks, values, blanks).map(b"".join), max_size=4))
    return b"[%b]" % (b",".join(items) or draw(blanks))


values = st.recursive(
    st.sampled_from(SCALARS), lambda inner: written_members(inner) | written_list(inner), max_leaves=12
)
objects = st.tuples(blanks, written_members(values), blanks).map(b"".join)


def pairs(text: bytes) -> Pairs:
    """An object as its keys and its values' bytes, in order: what must survive."""
    return [(member.key, text[member.start : member.end]) for member in members(text)]


def decoded(text: bytes) -> list[tuple[str, object]]:
    """The same by the standard library, with duplicates."""
    result: list[tuple[str, object]] = json.loads(text.decode(), object_pairs_hook=list)
    return result


def documents(text: bytes) -> list[Document]:
    """With and without the parsed body's keys: the quick way and the scan must agree."""
    return [Document(text), Document(text, {member.key for member in members(text)})]


# --- Spans -------------------------------------------------------------------------------------------------------


@given(objects)
def test_members_are_found_where_the_standard_library_finds_them(text: bytes) -> None:
    found = members(text)
    assert [(m.key, json.loads(text[m.start : m.end].decode(), object_pairs_hook=list)) for m in found] == decoded(text)
    for member in found:
        assert json.loads(text[member.key_start : member.key_end].decode()) == member.key


@given(st.tuples(blanks, written_list(values), blanks).map(b"".join))
def test_elements_are_found_where_the_standard_library_finds_them(text: bytes) -> None:
    assert [json.loads(text[start:end].decode()) for start, end in elements(text)] == json.loads(text.decode())


def test_members_of_an_object_inside_a_text_are_found_from_its_offset() -> None:
    text = b'{"a": {"b": 1}, "c": 2}'
    assert members(text, 5) == [Member("b", 7, 10, 12, 13)]
    assert members(text, 6) == members(text, 5)


@given(st.binary(max_size=60) | st.text('{}[]",:\\ a1u\n', max_size=60).map(str.encode))
def test_garbage_ends_in_spans_or_a_splice_error(text: bytes) -> None:
    for scan in (members, elements):
        try:
            scan(text)
        except SpliceError:
            pass


@pytest.mark.parametrize(
    "text",
    [b"", b"[", b"{", b'{"a', b'{"a"', b'{"a":', b'{"a":1', b'{"a":}', b'{"a":1 "b":2}', b"{1:2}", b'{"a":"b', b'{"a":"b\\"'
     b'{"a":[1', b'{"a":["x"', b'{"\xff":1}', b'{"a":1,}', b'{"\\x":1}'],
)  # fmt: skip
def test_a_text_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(SpliceError):
        members(text)


@pytest.mark.parametrize("text", [b"{}", b"[1 2]", b"[1,]", b"[", b"[1"])
def test_a_text_that_is_no_array_is_refused(text: bytes) -> None:
    with pytest.raises(SpliceError):
        elements(text)


@pytest.mark.parametrize(
    "value",
    [
        b'"' + b"a" * (1 << 20) + b'"',
        b'"' + b'\\"' * (1 << 19) + b'"',
        b'"' + b"\\\\" * (1 << 19) + b'"',
        b'"' + b'long enough to be sparse, so that a search pays, and again: \\"' * (1 << 14) + b'"',
        b"[" * 60_000 + b"]" * 60_000,
        b"[" + b"[]," * 200_000 + b"0]",
        b'["' + b'","' * 200_000 + b'"]',
        b"[" + b"1," * 300_000 + b"[[[]]]]",
        b'{"a":' * 20_000 + b'"' + b"x" * 300 + b'"' + b"}" * 20_000,
    ],
)
def test_huge_values_are_skipped_in_linear_time(value: bytes) -> None:
    text = b'{"a":%b,"b":1}' % value
    started = time.perf_counter()
    found = members(text)
    assert time.perf_counter() - started < 0.5  # the slowest takes 25 ms on an idle machine; quadratic would be minutes
    assert [(m.key, m.end - m.start) for m in found] == [("a", len(value)), ("b", 1)]


# --- Edits -------------------------------------------------------------------------------------------------------


@given(
    st.binary(max_size=40), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.binary(max_size=3)), max_size=8)
)
def test_edits_replace_their_spans_in_any_order(text: bytes, steps: list[tuple[int, int, bytes]]) -> None:
    planned, expected, position = [], b"", 0
    for gap, size, new in steps:
        start = position + gap + 1
        if start + size > len(text):
            break
        planned.append((start, start + size, new))
        expected += text[position:start] + new
        position = start + size
    expected += text[position:]
    random.Random(0).shuffle(planned)
    edits = Edits(text)
    for start, end, new in planned:
        edits.replace(start, end, new)
    assert edits.apply() == expected


def test_no_edit_gives_the_same_bytes_object_back() -> None:
    text = b'{"a": 1}' + b" " * 10
    document = Document(text)
    document.remove("b")
    document.remove_in(("a", "b"))
    document.remove_in(("b", "a"))
    assert document.apply() is text
    assert Edits(text).apply() is text


def test_insertions_at_one_place_keep_their_order_and_come_before_a_replacement() -> None:
    edits = Edits(b"abc")
    edits.replace(1, 2, b"-")
    edits.insert(1, b"1")
    edits.insert(1, b"2")
    assert edits.apply() == b"a12-c"


@pytest.mark.parametrize("spans", [[(0, 2), (1, 3)], [(0, 4)], [(2, 1)], [(-1, 1)], [(0, 3), (1, 1)]])
def test_edits_that_overlap_or_leave_the_text_are_refused(spans: list[tuple[int, int]]) -> None:
    edits = Edits(b"abc")
    for start, end in spans:
        edits.replace(start, end, b"x")
    with pytest.raises(SpliceError):
        edits.apply()


# --- Document ----------------------------------------------------------------------------------------------------

Step = tuple[str, tuple[str, ...], bytes]
names = st.sampled_from([*sorted(KEYS), "new", "other"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.tuples(names), values),
        st.tuples(st.just("remove"), st.tuples(names), st.just(b"")),
        st.tuples(st.just("set_in"), st.lists(names, min_size=2, max_size=3).map(tuple), values),
        st.tuples(st.just("remove_in"), st.lists(names, min_size=2, max_size=3).map(tuple), st.just(b"")),
    ),
    max_size=6,
)


class Expected:
    """What the steps should do, on lists of (key, bytes) that are re-written at every step."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def set(self, path: tuple[str, ...], value: bytes) -> None:
        self.text = self._set(self.text, path, value)

    def remove(self, path: tuple[str, ...]) -> None:
        self.text = self._remove(self.text, path)

    def _set(self, text: bytes, path: tuple[str, ...], value: bytes) -> bytes:
        key, *rest = path
        found = pairs(text)
        old = next((raw for name, raw in reversed(found) if name == key), b"null")
        if rest:
            if not old.startswith((b"{", b"null")):
                raise SpliceError
            value = self._set(b"{}" if old == b"null" else old, tuple(rest), value)
        last = max((i for i, (name, _) in enumerate(found) if name == key), default=None)
        result = [
            (name, value if i == last else raw) for i, (name, raw) in enumerate(found) if name != key or i == last
        ]
        return self._written(result if last is not None else [*result, (key, value)])

    def _remove(self, text: bytes, path: tuple[str, ...]) -> bytes:
        key, *rest = path
        found = pairs(text)
        old = next((raw for name, raw in reversed(found) if name == key), None)
        if old is None or (rest and not old.startswith(b"{")):
            return text
        if not rest:
            return self._written([pair for pair in found if pair[0] != key])
        inner = self._remove(old, tuple(rest))
        return text if inner == old else self._set(text, (key,), inner)

    @staticmethod
    def _written(found: Pairs) -> bytes:
        return b"{%b}" % b",".join(string_literal(key) + b":" + raw for key, raw in found)


def flat(text: bytes) -> object:
    """A text as nested lists of keys and scalars' bytes: equal when only blanks, key spellings and order differ."""
    text = text.strip()
    if text.startswith(b"{"):
        return sorted(((key, flat(raw)) for key, raw in pairs(text)), key=lambda pair: pair[0])
    if text.startswith(b"["):
        return ["list", *(flat(text[start:end]) for start, end in elements(text))]
    return text


def run(step: Step, document: Document) -> None:
    name, path, value = step
    calls: dict[str, Callable[[], None]] = {
        "set": lambda: document.set(path[0], value),
        "remove": lambda: document.remove(path[0]),
        "set_in": lambda: document.set_in(path, value),
        "remove_in": lambda: document.remove_in(path),
    }
    calls[name]()


@given(objects, steps)
def test_any_mix_of_edits_composes_and_keeps_every_other_value_byte_for_byte(text: bytes, planned: list[Step]) -> None:
    for document in documents(text):
        expected = Expected(text)
        for step in planned:
            try:
                if step[0].startswith("set"):
                    expected.set(step[1], step[2])
                else:
                    expected.remove(step[1])
            except SpliceError:
                with pytest.raises(SpliceError):
                    run(step, document)
            else:
                run(step, document)
        result = document.apply()
        assert flat(result) == flat(expected.text)
        named = {step[1][0] for step in planned}
        assert [pair for pair in pairs(result) if pair[0] not in named] == [p for p in pairs(text) if p[0] not in named]


@given(objects, names, st.sampled_from(SCALARS))
def test_a_set_value_stands_in_its_place_and_the_rest_of_the_text_is_untouched(
    text: bytes, key: str, value: bytes
) -> None:
    found = [member for member in members(text) if member.key == key]
    for document in documents(text):
        document.set(key, value)
        if len(found) == 1:
            assert document.apply() == text[: found[0].start] + value + text[found[0].end :]
        elif not found:
            end = members(text)[-1].end if members(text) else text.index(b"{") + 1
            comma = b"," if members(text) else b""
            assert document.apply() == text[:end] + comma + string_literal(key) + b":" + value + text[end:]


@given(objects, names, values)
def test_replaced_strings_and_set_members_go_together(text: bytes, key: str, value: bytes) -> None:
    """Cleaning edits text while a policy sets a member; a text edit inside a member that is set goes with it."""
    strings = [member for member in members(text) if text[member.start : member.start + 1] == b'"']
    for document in documents(text):
        expected = Expected(text)
        for member in strings:
            document.replace(member.start, member.end, b'"clean"')
        document.set(key, value)
        document.set_in(("fresh", "a"), b"1")
        document.set_in(("fresh", "b"), b"2")
        spans = {member.start for member in strings}
        found = [(m.key, b'"clean"' if m.start in spans else text[m.start : m.end]) for m in members(text)]
        expected.text = Expected._written(found)
        expected.set((key,), value)
        expected.set(("fresh",), b'{"a":1,"b":2}')
        assert flat(document.apply()) == flat(expected.text)


def test_an_insertion_inside_a_set_value_goes_and_one_at_its_edge_stays() -> None:
    document = Document(b'{"a":"xyz"}')
    document.set("a", b"1")
    document.replace(7, 7, b"-")
    document.replace(10, 10, b" ")
    assert document.apply() == b'{"a":1 }'


def test_two_new_keys_and_a_removed_last_one_need_one_comma() -> None:
    document = Document(b'{"a": 1, "b": 2 }')
    document.set("c", b"3")
    document.remove("b")
    document.set("d", b"4")
    assert document.apply() == b'{"a": 1,"c":3,"d":4 }'


@pytest.mark.parametrize(
    "text,removed,left",
    [
        (b'{"a":1,"b":2,"c":3}', "a", b'{"b":2,"c":3}'),
        (b'{"a":1,"b":2,"c":3}', "b", b'{"a":1,"c":3}'),
        (b'{"a":1,"b":2,"c":3}', "c", b'{"a":1,"b":2}'),
        (b'{"a":1,"b":2,"c":3}', "ab", b'{"c":3}'),
        (b'{"a":1,"b":2,"c":3}', "bc", b'{"a":1}'),
        (b'{"a":1,"b":2,"c":3}', "ac", b'{"b":2}'),
        (b'{"a":1,"b":2,"c":3}', "abc", b"{}"),
        (b'{"a":1,"b":2,"a":3}', "a", b'{"b":2}'),
        (b'{ "a" : 1 }', "a", b"{  }"),
        (b'{"a":1,"b":2,"c":3,"d":4,"e":5}', "bd", b'{"a":1,"c":3,"e":5}'),
    ],
)
def test_removal_takes_exactly_one_comma_along(text: bytes, removed: str, left: bytes) -> None:
    for document in documents(text):
        for key in removed:
            document.remove(key)
        assert document.apply() == left


def test_a_nested_object_is_merged_into_made_or_refused() -> None:
    """C087: a caller's own template arguments stay."""
    text = b'{"chat_template_kwargs": {"enable_thinking": true, "foo": 1.10}, "a": null, "b": "x"}'
    document = Document(text)
    document.set_in(("chat_template_kwargs", "enable_thinking"), b"false")
    document.set_in(("chat_template_kwargs", "thinking"), b"false")
    document.set_in(("a", "x", "y"), b"1")
    with pytest.raises(SpliceError):
        document.set_in(("b", "x"), b"1")
    assert document.apply() == (
        b'{"chat_template_kwargs": {"enable_thinking": false, "foo": 1.10,"thinking":false}, "a": {"x":{"y":1}}, "b": "x"}'
    )


def test_members_are_read_by_name_and_the_last_duplicate_wins() -> None:
    text = b'{"a": 1, "b": [1.10], "a": {"x": "\\ud83d"}, "n": null}'
    for document in documents(text):
        assert document.raw("a") == b'{"x": "\\ud83d"}'
        assert document.value("a") == {"x": "\ud83d"}
        assert document.raw("b") == b"[1.10]"
        assert document.value("n") is None
        assert document.raw("zzz") is None
        assert document.value("zzz") is None
        assert document.member("zzz") is None


def test_a_key_that_also_occurs_elsewhere_is_edited_at_the_top_level_only() -> None:
    text = b'{"tools":[{"max_tokens":1,"x":"\\"max_tokens"}],"\\u006dax_tokens":64,"messages":["max_tokens"]}'
    for document in (
        *documents(text),
        Document(text.replace(b'"max_tokens":1', b'"y":1'), {"tools", "max_tokens", "messages"}),
    ):
        document.set("max_tokens", b"256")
        assert b'"\\u006dax_tokens":256,' in document.apply()


def test_a_lone_spelling_that_is_a_value_is_not_taken_for_the_key() -> None:
    """`keys` said the key is there, the text does not have it: nothing sensible can be done, but no wrong place is edited."""
    document = Document(b'{"a":"model","b":1}', {"a", "b", "model"})
    document.set("model", b"1")
    assert document.apply() == b'{"a":"model","b":1,"model":1}'


def test_a_text_that_does_not_end_in_a_brace_is_refused() -> None:
    for text in (b"[]", b"", b"}", b'{"a":1} x'):
        document = Document(text, ())
        document.set("b", b"1")
        with pytest.raises(SpliceError):
            document.apply()


def test_nesting_of_any_depth_survives_an_edit() -> None:
    """C053: a schema nested 500 levels is forwarded as it came."""
    deep = b'{"x":' * 500 + b"1.10" + b"}" * 500
    text = b'{"tools":[%b],"max_tokens":1}' % deep
    document = Document(text, {"tools", "max_tokens"})
    document.set("max_tokens", b"9")
    assert document.apply() == b'{"tools":[%b],"max_tokens":9}' % deep


# --- Values ------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(codec=None, exclude_categories=())))
def test_a_string_literal_reads_back_as_the_same_text(text: str) -> None:
    literal = string_literal(text)
    assert json.loads(literal.decode()) == json.loads(json.dumps(text))
    assert literal.count(b"\\u") == json.dumps(text, ensure_ascii=False).count("\\u") + sum(
        0xD800 <= ord(c) < 0xE000 for c in text
    )


def test_values_that_only_the_lenient_reader_takes() -> None:
    """C045, C048."""
    assert loads(b'"\\ud83d"') == "\ud83d"
    assert loads(b"1e400") == float("inf")
    assert loads(b"9" * 5000) == float("inf")
    assert loads_leniently(b"9" * 3000) == int("9" * 3000)
    for text in (b"NaN", b"[-Infinity]", b"{", b'"\xff"', b"[" * 100_000):
        with pytest.raises(SpliceError):
            loads(text)


def test_escaped_letters_are_noticed() -> None:
    assert has_escaped_letters(b'{"mod\\u0065l":1}')
    assert not has_escaped_letters(b'{"a":"\\u001b[0m \\u00e9 \\u4f60"}')
    assert orjson.loads(b'"\\u0065"') == "e"

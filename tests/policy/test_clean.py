"""Prompt cleaning of whole bodies: only text changes, only where it must, and all other bytes stay."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.config import Clean
from gateway.policy.clean import CLEANER_VERSION, clean_body, may_need_cleaning
from gateway.policy.cleantext import clean_text
from gateway.wire.body import RequestBody, read_object
from gateway.wire.kinds import Kind
from gateway.wire.splice import Document

DEFAULT = Clean()
COLLAPSE = Clean(whitespace="collapse")
LONG = "=" * 600
FENCE = "```"


def clean(raw: bytes, kind: Kind = "chat", rules: Clean = DEFAULT) -> tuple[bytes, dict[str, int]]:
    """As a request goes through: read, screened, cleaned."""
    request = read_object(raw)
    document = request.document()
    counts = clean_body(document, request.data, rules, kind)
    cleaned = document.apply()
    assert may_need_cleaning(raw, rules) or not counts
    assert (cleaned is request.raw) == (not counts)
    return cleaned, counts


def cleaned_data(data: object, kind: Kind = "chat", rules: Clean = DEFAULT) -> dict[str, object]:
    return read_object(clean(json.dumps(data).encode(), kind, rules)[0]).data


# --- what is text ---

TEXT: dict[str, tuple[Kind, str]] = {
    "content": ("chat", '{"messages":[{"role":"user","content":%s}]}'),
    "the second of two messages": ("chat", '{"messages":[{"content":"a"},{"content":%s}]}'),
    "a text part": ("chat", '{"messages":[{"role":"user","content":[{"type":"text","text":%s}]}]}'),
    "a part beside an image": (
        "chat",
        '{"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:"}},{"type":"text","text":%s}]}]}',
    ),
    "an answer of a former turn": ("chat", '{"messages":[{"role":"assistant","content":%s}]}'),
    "a tool's answer": ("chat", '{"messages":[{"role":"tool","tool_call_id":"1","content":%s}]}'),
    "a prompt": ("completions", '{"prompt":%s}'),
    "a list of prompts": ("completions", '{"prompt":["a",%s]}'),
    "the system text of Anthropic": ("messages", '{"system":%s,"messages":[]}'),
    "system parts of Anthropic": (
        "messages",
        '{"system":[{"type":"text","text":%s,"cache_control":{"type":"ephemeral"}}]}',
    ),
    "content of Anthropic": ("messages", '{"messages":[{"role":"user","content":[{"type":"text","text":%s}]}]}'),
    "instructions": ("responses", '{"instructions":%s,"input":"a"}'),
    "input": ("responses", '{"input":%s}'),
    "an input item": ("responses", '{"input":[{"role":"user","content":%s}]}'),
    "a part of an input item": (
        "responses",
        '{"input":[{"type":"message","role":"user","content":[{"type":"input_text","text":%s}]}]}',
    ),
    "an output item handed back": (
        "responses",
        '{"input":[{"type":"message","role":"assistant","content":[{"type":"output_text","text":%s,"annotations":[]}]}]}',
    ),
    "text to embed": ("embeddings", '{"input":%s}'),
    "a list of texts to embed": ("embeddings", '{"input":["a",%s]}'),
    "a conversation to embed": ("embeddings", '{"messages":[{"role":"user","content":%s}]}'),
}


@pytest.mark.parametrize("kind, body", TEXT.values(), ids=TEXT)
def test_text_is_cleaned_wherever_an_api_has_it(kind: Kind, body: str) -> None:
    fault, right = json.dumps(f"a——— \x00 {LONG}"), f"a——  {'=' * 64}"
    raw = (body % fault).encode()
    expected = (body % json.dumps(right, ensure_ascii=False)).encode()
    assert clean(raw, kind) == (expected, {"control": 1, "dashes": 1, "long_runs": 1})


FAULT = f"———\x00{LONG}"
DATA: dict[str, tuple[Kind, object]] = {
    "arguments of a tool call": (
        "chat",
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": FAULT}}]}
            ]
        },
    ),
    "tools": ("chat", {"messages": [], "tools": [{"type": "function", "function": {"description": FAULT}}]}),
    "names": ("chat", {"messages": [{"role": "user", "name": FAULT, "content": "a"}], "user": FAULT, "stop": [FAULT]}),
    "an image": ("chat", {"messages": [{"content": [{"type": "image_url", "image_url": {"url": FAULT}}]}]}),
    "audio": ("chat", {"messages": [{"content": [{"type": "input_audio", "input_audio": {"data": FAULT}}]}]}),
    "a file": ("chat", {"messages": [{"content": [{"type": "file", "file": {"file_data": FAULT}}]}]}),
    "a part of no known type": ("chat", {"messages": [{"content": [{"type": "x", "text": FAULT}, {"text": FAULT}]}]}),
    "reasoning handed back": (
        "chat",
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": FAULT}]},
    ),
    "JSON of a tool": ("chat", {"messages": [{"role": "tool", "content": json.dumps({"a": "———", "b": LONG})}]}),
    "JSON of a function": ("chat", {"messages": [{"role": "function", "content": ' \n["———"]'}]}),
    "JSON of a tool in a part": (
        "chat",
        {"messages": [{"role": "tool", "content": [{"type": "text", "text": '{"a":"———"}'}]}]},
    ),
    "what a tool of Anthropic read": (
        "messages",
        {"messages": [{"content": [{"type": "tool_result", "content": FAULT}]}]},
    ),
    "input of a tool of Anthropic": (
        "messages",
        {"messages": [{"content": [{"type": "tool_use", "input": {"a": FAULT}}]}]},
    ),
    "a function call of Responses": ("responses", {"input": [{"type": "function_call", "arguments": FAULT}]}),
    "output of a function of Responses": ("responses", {"input": [{"type": "function_call_output", "output": FAULT}]}),
    "token ids": ("completions", {"prompt": [1, 2, 3]}),
    "lists of token ids": ("completions", {"prompt": [[1, 2], [3]]}),
    "token ids to embed": ("embeddings", {"input": [[1, 2], [3]]}),
    "a suffix": ("completions", {"prompt": "a", "suffix": FAULT}),
    "another API's place": ("chat", {"messages": [], "prompt": FAULT, "input": FAULT, "system": FAULT}),
    "documents to rank": (
        "opaque",
        {"query": FAULT, "documents": [FAULT], "input": FAULT, "messages": [{"content": FAULT}]},
    ),
}


@pytest.mark.parametrize("kind, data", DATA.values(), ids=DATA)
def test_what_is_not_text_is_never_touched(kind: Kind, data: object) -> None:
    raw = json.dumps(data).encode()
    assert clean(raw, kind) == (raw, {})


def test_a_tool_that_answers_with_words_is_cleaned_and_one_that_answers_with_json_is_not() -> None:
    for content in ('{"a": "———"', "[———]", '"———"', "见———"):
        raw = json.dumps({"messages": [{"role": "Tool", "content": content}]}).encode()
        assert clean(raw)[1] == {"roles": 1, "dashes": 1}
    raw = json.dumps({"messages": [{"role": "tool", "content": '{"a": "———"}'}, {"content": '{"a": "———"}'}]}).encode()
    assert clean(raw)[1] == {"dashes": 1}


# --- shapes ---

SHAPES: list[object] = [
    None, "", [], {}, 7, 1.5, True, [None], [[]], [[[["———"]]]], [7, None, "———"], {"content": "———"},
    [{"type": "text", "text": None}], [{"type": "text"}], [{"type": ["text"], "text": "———"}], [{"text": "———"}],
    [{"type": "text", "text": ["———"]}], [{"type": "text", "text": {"text": "———"}}], [{"role": 3, "content": 4}], [["———"]],
]  # fmt: skip
PLACES = ["messages", "prompt", "input", "system", "instructions"]


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("shape", SHAPES, ids=map(repr, SHAPES))
def test_no_shape_of_a_body_raises(kind: Kind, shape: object) -> None:
    """C073"""
    for place in PLACES:
        for value in (
            shape,
            [shape],
            [{"role": "user", "content": shape}],
            [{"role": shape, "content": "a"}],
            {"content": shape},
        ):
            raw = json.dumps({place: value}).encode()
            cleaned, counts = clean(raw, kind)
            assert counts.get("dashes", 0) == raw.decode().count(r"\u2014\u2014\u2014") - cleaned.decode().count(
                r"\u2014" * 3
            )
    assert clean(b"{}", kind) == (b"{}", {})


def test_a_message_without_content_is_left_alone() -> None:
    """C073"""
    raw = b'{"messages":[{"role":"assistant","tool_calls":[]},{"role":"user"},{},7]}'
    assert clean(raw) == (raw, {})


# --- roles ---

ROLES = {
    "human": "user", "Human": "user", "ai": "assistant", "AI": "assistant", "bot": "assistant", "User": "user",
    "SYSTEM": "system", "Assistant": "assistant", "Developer": "developer", "TOOL": "tool", "Function": "function",
}  # fmt: skip


@pytest.mark.parametrize("role, expected", ROLES.items())
def test_roles_are_spelled_as_upstreams_know_them(role: str, expected: str) -> None:
    raw = b'{"messages": [{"role": "%b", "content": "\\u0061"}]}'
    assert clean(raw % role.encode()) == (raw % expected.encode(), {"roles": 1})
    assert clean(raw % role.encode(), rules=Clean(roles=False)) == (raw % role.encode(), {})
    assert clean(b'{"input":[{"role":"%b"}]}' % role.encode(), "responses")[1] == {"roles": 1}


@pytest.mark.parametrize("role", ["user", "narrator", "Humane", "", " user", "ｕｓｅｒ", "x" * 1000])
def test_a_role_that_is_right_or_unknown_stays(role: str) -> None:
    raw = json.dumps({"messages": [{"role": role, "content": "a"}]}).encode()
    assert clean(raw) == (raw, {})


# --- bytes ---


def test_everything_that_is_not_changed_keeps_its_bytes() -> None:
    raw = (
        '{ "big":123456789012345678901234567890, "f":[1e400,1.10,-0.0], "a":1,"a":2,\r\n'
        '"messages" : [ {"content":"\\u4f60\\/好", "x":1, "role":"Human"},{"role":"user","role":"user",\t"content":[ 7,'
        '{"type":"text", "text":"旧——————\\u0041\\/","z":1E5},{"type":"text","text":"\\u0041"} ]}],"t":true }  '
    ).encode()
    expected = raw.replace(b'"Human"', b'"user"').replace('"旧——————\\u0041\\/"'.encode(), '"旧——A/"'.encode())
    assert clean(raw) == (expected, {"roles": 1, "dashes": 1})


def test_of_a_duplicated_field_the_one_that_counts_is_cleaned() -> None:
    raw = '{"messages":[{"content":"甲———","content":"乙———"}]}'.encode()
    assert clean(raw) == ('{"messages":[{"content":"甲———","content":"乙——"}]}'.encode(), {"dashes": 1})


def test_keys_in_escapes_are_found() -> None:
    raw = b'{"m\\u0065ssages":[{"c\\u006fntent":"\\u2014\\u2014\\u2014"}]}'
    assert clean(raw) == ('{"m\\u0065ssages":[{"c\\u006fntent":"——"}]}'.encode(), {"dashes": 1})


def test_half_an_emoji_no_longer_breaks_the_request() -> None:
    """C048: each lone half becomes U+FFFD and is counted; with cleaning off the bytes go on as they came."""
    raw = rb'{"model":"m","messages":[{"role":"user","content":"cut \ud83d here \udcb0 \ude00\ud83d"}]}'
    expected = '{"model":"m","messages":[{"role":"user","content":"cut \ufffd here \ufffd \ufffd\ufffd"}]}'.encode()
    assert clean(raw) == (expected, {"control": 4})
    assert clean(raw, rules=Clean(control=False)) == (raw, {})
    mixed = rb'{"messages":[{"content":"\ud83d \u2014\u2014\u2014"}]}'
    assert clean(mixed, rules=Clean(control=False)) == (
        '{"messages":[{"content":"\\ud83d ——"}]}'.encode(),
        {"dashes": 1},
    )


def test_whole_emoji_in_escapes_stay_whole() -> None:
    """C049"""
    content = r"\ud83c\udf78 \ud83d\udc69\u200d\ud83d\udc67"
    untouched = f'{{"messages":[{{"content":"{content}"}}]}}'.encode()
    assert clean(untouched) == (untouched, {})
    beside = f'{{"messages":[{{"content":"{content} ——— \U0001f378"}}]}}'.encode()
    data = read_object(clean(beside)[0]).data
    assert data == {"messages": [{"content": "\U0001f378 \U0001f469\u200d\U0001f467 —— \U0001f378"}]}


def test_the_parsed_body_is_not_changed() -> None:
    raw = '{"messages":[{"role":"Human","content":"———"}]}'.encode()
    request = read_object(raw)
    clean_body(request.document(), request.data, DEFAULT, "chat")
    assert request.data == read_object(raw).data


def test_the_version_of_the_rules_is_known() -> None:
    """C071: a lost prefix cache can be explained by it."""
    assert CLEANER_VERSION.isdigit()


# --- properties ---

WORDS = ["a", "中", "———", "\x00", LONG, "\ud83d", "\n", "    ", FENCE, "`", "|", "  ", "ー" * 600, "–" * 3]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
JSONS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
PARTS = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "output_text", "image_url"]), "text": TEXTS}),
    JSONS,
)
CONTENTS = st.one_of(TEXTS, st.lists(PARTS, max_size=3), JSONS)
MESSAGES = st.fixed_dictionaries(
    {"content": CONTENTS},
    optional={"role": st.sampled_from(["user", "Human", "ai", "tool", "x"]), "extra": JSONS, "name": JSONS},
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.one_of(st.lists(MESSAGES, max_size=4), JSONS),
        "prompt": st.one_of(TEXTS, st.lists(TEXTS, max_size=3), JSONS),
        "input": st.one_of(TEXTS, st.lists(st.one_of(TEXTS, MESSAGES), max_size=3), JSONS),
        "system": CONTENTS,
        "instructions": CONTENTS,
        "tools": JSONS,
        "temperature": JSONS,
    },
)


def without_text(data: object, key: object = None) -> object:
    """The body with every string blanked that is, or by its key might be, text or a role."""
    if isinstance(data, dict):
        return {name: without_text(value, name) for name, value in data.items()}
    if isinstance(data, list):
        return [without_text(value, key if key in ("prompt", "input") else None) for value in data]
    if isinstance(data, str) and key in ("content", "text", "prompt", "input", "system", "instructions", "role"):
        return ""
    return data


@given(BODIES, st.sampled_from(get_args(Kind)), st.booleans())
@settings(max_examples=300)
def test_a_body_is_the_same_but_for_its_text_and_settles_at_once(
    body: dict[str, object], kind: Kind, is_ascii: bool
) -> None:
    """C071, C073"""
    raw = json.dumps(body, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    if not is_ascii and b"\xed\xa0" in raw:  # half a pair has no UTF-8
        raw = json.dumps(body).encode()
    for rules in (DEFAULT, COLLAPSE):
        once, counts = clean(raw, kind, rules)
        assert without_text(json.loads(once)) == without_text(json.loads(raw))
        assert clean(once, kind, rules) == (once, {})
        assert bool(counts) == (once != raw)


@given(st.lists(TEXTS, min_size=1, max_size=5))
@example(["———", f"{FENCE}\n———", "———", LONG])
def test_a_turn_is_cleaned_alike_wherever_it_stands_and_whenever(turns: list[str]) -> None:
    """C071: turn k of request n is byte for byte turn k of request n + 1."""
    for rules in (DEFAULT, COLLAPSE):
        alone = [clean_text(turn, rules)[0] for turn in turns]
        for size in range(1, len(turns) + 1):
            data = cleaned_data({"messages": [{"role": "user", "content": turn} for turn in turns[:size]]}, rules=rules)
            assert data["messages"] == [{"role": "user", "content": text} for text in alone[:size]]


def test_the_reader_and_a_plain_document_agree() -> None:
    """`clean_body` takes any document, also one that does not know its keys."""
    raw = '{"a":{"messages":1},"messages":[{"content":"———"}]}'.encode()
    request = RequestBody(raw, read_object(raw).data)
    document = Document(raw)
    assert clean_body(document, request.data, DEFAULT, "chat") == {"dashes": 1}
    assert document.apply() == clean(raw)[0]

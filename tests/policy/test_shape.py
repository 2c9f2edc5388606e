"""What a route makes of a body, and that nothing else of it changes."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import MaxTokens, Route, Upstream
from gateway.policy.shape import Shaped, needs_shaping, shape
from gateway.wire.body import read_object
from gateway.wire.kinds import DATA_PLANE_PATHS, GENERATING, Kind, kind_of
from gateway.wire.spans import elements, members

OFF = {"thinking": False, "enable_thinking": False}
CHAT = b'{"model":"qwen3-8b","messages":[{"role":"user","content":"hi"}]}'


def route(**settings: object) -> Route:
    return Route.model_validate({"upstreams": "thor", **settings})


def shaped(
    raw: bytes | dict[str, object],
    settings: dict[str, object] | None = None,
    *,
    kind: Kind = "chat",
    engine: str = "vllm",
    upstream: dict[str, object] | None = None,
    **flags: bool,
) -> Shaped:
    body = read_object(raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    return shape(
        body,
        route=route(**(settings or {})),
        upstream=Upstream.model_validate({"url": "http://127.0.0.1:8000", **(upstream or {})}),
        engine=engine,
        kind=kind,
        **flags,  # type: ignore[arg-type]
    )


def data_of(result: Shaped) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result.body)
    return value


# --- Nothing to do -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted({*DATA_PLANE_PATHS.values()}))
def test_a_route_that_asks_nothing_sends_the_callers_own_bytes(kind: Kind) -> None:
    body = read_object(CHAT)
    result = shape(body, route=route(), upstream=Upstream(url="http://127.0.0.1:1"), engine="vllm", kind=kind)
    assert result == Shaped(CHAT)
    assert result.body is body.raw


@pytest.mark.parametrize(
    "settings,raw,kind",
    [
        ({"thinking": "off"}, CHAT, "embeddings"),
        ({"thinking": "off"}, CHAT, "completions"),
        ({"max_tokens": {"ceiling": 5}}, b'{"max_tokens":50}', "embeddings"),
        ({"max_tokens": {"ceiling": 50}}, b'{"max_tokens":50}', "chat"),
        ({"model": "qwen3-8b"}, CHAT, "chat"),
        ({"drop": ["logit_bias"]}, CHAT, "chat"),
        ({"defaults": {"model": "other"}}, CHAT, "chat"),
        ({"override": {"model": "qwen3-8b"}}, CHAT, "chat"),
        ({"thinking": "off"}, json.dumps({"model": "qwen3", "chat_template_kwargs": OFF}).encode(), "chat"),
        ({"thinking": "off"}, b'{"model":"deepseek-r1","max_tokens":5}', "chat"),
    ],
)
def test_rules_that_have_nothing_to_change_send_the_callers_own_bytes(
    settings: dict[str, object], raw: bytes, kind: Kind
) -> None:
    result = shaped(raw, settings, kind=kind)
    assert result.body is raw
    assert result.changes == ()
    assert (result.is_thinking_edited, result.is_floor_raised, result.is_usage_added) == (False, False, False)


def test_a_body_that_is_passed_on_says_its_own_budget() -> None:
    assert shaped(b'{"max_tokens":50}').max_tokens == 50
    assert shaped(b'{"max_tokens":50,"model":"a-nothinking"}').max_tokens == 50
    assert shaped(b'{"max_output_tokens":7}', kind="responses").max_tokens == 7
    assert shaped(b"{}").max_tokens is None


def test_untouched_is_what_an_unread_body_gets() -> None:
    assert Shaped.untouched(b"\x00").body == b"\x00"
    assert Shaped.untouched(b"").changes == ()


# --- Fields ------------------------------------------------------------------------------------------------------


def test_fields_are_dropped_filled_in_and_forced() -> None:
    result = shaped(
        b'{"model":"m", "logit_bias": {"1":2}, "temperature":null,"top_p":0.10, "seed": 5}',
        {
            "drop": ["logit_bias", "absent"],
            "defaults": {"temperature": 0.3, "top_p": 0.5, "top_k": 20},
            "override": {"seed": 7, "stop": ["x"]},
        },
    )
    assert result.body == b'{"model":"m", "temperature":0.3,"top_p":0.10, "seed": 7,"top_k":20,"stop":["x"]}'
    assert result.changes == (
        "drop=logit_bias",
        "default=temperature",
        "default=top_k",
        "override=seed",
        "override=stop",
    )


def test_a_dropped_field_may_be_filled_in_and_any_settings_value_is_written() -> None:
    result = shaped(
        b'{"a":1,"flag":1}',
        {"drop": ["a"], "defaults": {"a": 2**70, "b": {"c": [None, 1.5]}}, "override": {"flag": True, "none": None}},
    )
    assert result.body == b'{"a":1180591620717411303424,"flag":true,"b":{"c":[null,1.5]},"none":null}'


def test_fields_apply_to_embeddings_too() -> None:
    assert shaped(b'{"input":"x"}', {"defaults": {"dimensions": 512}, "model": "e"}, kind="embeddings").body == (
        b'{"input":"x","dimensions":512,"model":"e"}'
    )


# --- Model -------------------------------------------------------------------------------------------------------


def test_the_upstreams_name_for_the_model_is_sent() -> None:
    result = shaped(CHAT, {"model": "deepseek-v4"})
    assert result.body == CHAT.replace(b"qwen3-8b", b"deepseek-v4")
    assert result.changes == ("model=deepseek-v4",)
    assert shaped(b"{}", {"model": "m"}).body == b'{"model":"m"}'


def test_the_nothinking_suffix_asks_for_off_whatever_the_route_says() -> None:
    for thinking in ("client", "on", "off"):
        result = shaped({"model": "qwen3-8b-nothinking"}, {"thinking": thinking})
        assert data_of(result) == {"model": "qwen3-8b", "chat_template_kwargs": OFF}
        assert result.changes == ("model=qwen3-8b", "thinking=off")
        assert result.thinking_asked == "off"
    named = shaped({"model": "fast-nothinking"}, {"model": "deepseek-v4"})
    assert data_of(named) == {"model": "deepseek-v4", "chat_template_kwargs": OFF}
    assert shaped({"model": "emb-nothinking"}, kind="embeddings").body == b'{"model": "emb"}'


def test_what_is_told_fits_into_a_header() -> None:
    result = shaped({"model": "a\r\nx: b,é 名" + "x" * 200 + "-nothinking"})
    assert result.changes[0].isascii()
    assert result.changes[0].startswith("model=a??x:?b????x")
    assert len(result.changes[0]) < 90


# --- Thinking ----------------------------------------------------------------------------------------------------


def test_thinking_is_merged_into_the_callers_template_arguments() -> None:
    """C087."""
    result = shaped(
        b'{"model":"qwen3-8b","chat_template_kwargs":{"enable_thinking":true,"foo":1.10},"reasoning_effort":"high"}',
        {"thinking": "off"},
    )
    assert (
        result.body
        == b'{"model":"qwen3-8b","chat_template_kwargs":{"enable_thinking":false,"foo":1.10,"thinking":false}}'
    )
    assert result.changes == ("thinking=off",)
    assert (result.thinking_asked, result.is_thinking_edited) == ("off", True)


def test_thinking_is_merged_into_overridden_template_arguments() -> None:
    result = shaped(CHAT, {"thinking": "off", "override": {"chat_template_kwargs": {"foo": {"bar": 1}}}})
    assert data_of(result)["chat_template_kwargs"] == {"foo": {"bar": 1}, **OFF}


def test_the_family_is_configured_or_guessed_from_the_model_that_is_sent() -> None:
    assert data_of(shaped({"model": "fast"}, {"thinking": "off", "model": "gpt-oss-20b"}))["reasoning_effort"] == "low"
    assert data_of(shaped({"model": "fast"}, {"thinking": "off"}, upstream={"family": "minimax_m3"}))[
        "chat_template_kwargs"
    ] == {"thinking_mode": "disabled"}
    assert data_of(shaped({"model": 5}, {"thinking": "off"}))["chat_template_kwargs"] == OFF


def test_a_model_that_cannot_be_switched_gets_a_warning() -> None:
    result = shaped({"model": "gpt-oss-20b"}, {"thinking": "off"})
    assert result.changes == ("thinking=low",)
    assert "cannot stop thinking" in result.warning
    assert shaped({"model": "kimi-k2-thinking"}, {"thinking": "off"}).warning
    assert not shaped({"model": "qwen3"}, {"thinking": "off"}).warning


def test_a_refused_switch_is_left_out_of_the_second_sending() -> None:
    """C086."""
    result = shaped(CHAT, {"thinking": "off"}, allow_thinking=False)
    assert result.body == CHAT
    assert (result.thinking_asked, result.is_thinking_edited) == ("client", False)


def test_a_rescue_switches_off_whatever_the_route_says() -> None:
    for thinking in ("client", "on"):
        result = shaped(
            {"model": "qwen3", "max_tokens": 64}, {"thinking": thinking, "max_tokens": {"floor": 500}}, rescue=True
        )
        assert data_of(result) == {"model": "qwen3", "max_tokens": 64, "chat_template_kwargs": OFF}
        assert result.thinking_asked == "off"


def test_the_callers_parsed_body_is_not_changed() -> None:
    body = read_object(
        b'{"model":"qwen3","chat_template_kwargs":{"a":{"b":1},"reasoning_effort":"high"},"stream":true,"stream_options":{"x":1}}'
    )
    before = orjson.dumps(body.data)
    for engine in ("vllm", "sglang", "ollama"):
        shape(
            body,
            route=route(thinking="off", model="m"),
            upstream=Upstream(url="http://h"),
            engine=engine,
            kind="chat",
            add_usage=True,
        )
    assert orjson.dumps(body.data) == before


# --- max_tokens --------------------------------------------------------------------------------------------------


def test_the_budgets_change_is_told_with_both_numbers() -> None:
    rules: dict[str, object] = {"max_tokens": {"default": 1024, "floor": 256, "ceiling": 8192}}
    raised = shaped({"model": "qwen3", "max_tokens": 64}, rules)
    assert (raised.body, raised.changes) == (b'{"model": "qwen3", "max_tokens": 256}', ("max_tokens=64>256",))
    assert (raised.is_floor_raised, raised.max_tokens) == (True, 256)
    lowered = shaped({"max_tokens": 10000}, rules)
    assert (lowered.changes, lowered.is_floor_raised, lowered.max_tokens) == (("max_tokens=10000>8192",), False, 8192)
    added = shaped({}, rules)
    assert (added.body, added.changes, added.is_floor_raised) == (b'{"max_tokens":1024}', ("max_tokens=1024",), True)


def test_the_floor_is_for_requests_that_think_after_the_switch() -> None:
    """C094."""
    rules: dict[str, object] = {"max_tokens": {"floor": 1024}}
    body: dict[str, object] = {"model": "qwen3", "max_tokens": 256}
    assert shaped(body, {**rules, "thinking": "on"}).max_tokens == 1024
    assert shaped(body, {**rules, "thinking": "client"}).max_tokens == 1024
    assert shaped(body, {**rules, "thinking": "off"}).max_tokens == 256
    assert shaped({**body, "model": "deepseek-r1"}, {**rules, "thinking": "off"}).max_tokens == 1024
    assert shaped({**body, "chat_template_kwargs": OFF}, rules).max_tokens == 256


def test_the_second_sending_after_a_full_context_carries_the_callers_own_value() -> None:
    """C092."""
    raw = b'{"model":"qwen3","max_tokens":300}'
    assert shaped(raw, {"max_tokens": {"floor": 1024}}).is_floor_raised
    back = shaped(raw, {"max_tokens": {"floor": 1024}}, allow_floor=False)
    assert (back.body, back.changes, back.max_tokens) == (raw, (), 300)


def test_the_ceiling_holds_for_defaults_and_overrides() -> None:
    rules: dict[str, object] = {"max_tokens": {"ceiling": 100}}
    assert shaped({}, {**rules, "defaults": {"max_tokens": 500}}).body == b'{"max_tokens":100}'
    assert shaped({"max_completion_tokens": 5}, {**rules, "override": {"max_completion_tokens": 500}}).max_tokens == 100


# --- Usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw,expected",
    [
        (b'{"stream":true}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (b'{"stream":true,"stream_options":null}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (b'{"stream_options":{ },"stream":true}', b'{"stream_options":{"include_usage":true },"stream":true}'),
        (
            b'{"stream_options":{"include_usage":false},"stream":true}',
            b'{"stream_options":{"include_usage":true},"stream":true}',
        ),
        (
            b'{"stream_options":{"continuous_usage_stats":true},"stream":true}',
            b'{"stream_options":{"continuous_usage_stats":true,"include_usage":true},"stream":true}',
        ),
    ],
)
def test_usage_is_added_to_streams_and_the_rest_of_the_options_stays(raw: bytes, expected: bytes) -> None:
    """C096 (b), (c)."""
    kinds: tuple[Kind, ...] = ("chat", "completions")
    for kind in kinds:
        result = shaped(raw, kind=kind, add_usage=True)
        assert (result.body, result.changes, result.is_usage_added) == (expected, ("usage=added",), True)
    assert shaped(raw).body == raw


@pytest.mark.parametrize(
    "raw,kind",
    [
        (b'{"stream":false}', "chat"),
        (b"{}", "chat"),
        (b'{"stream":"true"}', "chat"),
        (b'{"stream":true,"stream_options":{"include_usage":true}}', "chat"),
        (b'{"stream":true,"stream_options":"x"}', "chat"),
        (b'{"stream":true}', "responses"),
        (b'{"stream":true}', "messages"),
        (b'{"stream":true}', "embeddings"),
    ],
)
def test_usage_is_not_added_where_it_is_there_or_has_no_place(raw: bytes, kind: Kind) -> None:
    """C096 (a)."""
    both: list[dict[str, object]] = [{}, {"model": "m"}]
    for settings in both:
        result = shaped(raw, settings, kind=kind, add_usage=True)
        assert not result.is_usage_added
        assert b"include_usage" not in result.body.replace(raw[1:-1], b"")


# --- All else ----------------------------------------------------------------------------------------------------

# Spellings that a parser and a writer would not both keep; C044, C045, C056, C074.
VALUES = st.sampled_from([
    b"1.10", b"1e5", b"1e400", b"-0.0", b"12345678901234567890123", b"-9223372036854775809", b"3.141592653589793238462643",
    b"null", b'""', b'"\\ud83d"', b'"\\u0061\\/"', '"北京\u2028😀"'.encode(), b'"say \\"max_tokens\\": 5"', b"[ ]", b"{ }",
    b'{"a":1,"a":2}', b'{"model": {"max_tokens" :1.10}, "stream_options":[1e400]}', b'[{"type":"function","function":{"arguments":"{\\"b\\":1, \\"a\\":2}"}}]',
    b"[" * 500 + b"1.10" + b"]" * 500, b'{"x":' * 500 + b"[]" + b"}" * 500,
])  # fmt: skip
BLANKS = st.sampled_from([b"", b" ", b"\n\t", b"\r\n    "])
UNKNOWN_KEYS = [
    "guided_json",
    "top_k",
    "x",
    "metadata",
    "tools",
    "seed",
    "user",
    "键",
    'quo"te',
    "mod\\u0065",
    "extra_body",
]
KNOWN = {
    "model": [b'"qwen3-8b"', b'"deepseek-v4-nothinking"', b'"gpt-oss-20b"', b"null", b"5"],
    "stream": [b"true", b"false", b"null"],
    "max_tokens": [b"5", b"64", b"99999", b"null", b"64.0", b'"x"', b"1e5"],
    "max_completion_tokens": [b"64", b"300", b"null"],
    "max_output_tokens": [b"64", b"99999"],
    "temperature": [b"0.10", b"null"],
    "logit_bias": [b'{"1":2}'],
    "chat_template_kwargs": [
        b'{ "foo" : 1.10 }',
        b'{"enable_thinking":true,"big":12345678901234567890123}',
        b"null",
        b'"{}"',
        b"{}",
    ],
    "reasoning_effort": [b'"high"', b'"none"', b"null"],
    "reasoning": [b'{"effort":"high","summary":"auto"}', b'"x"'],
    "thinking": [b'{"type":"enabled","budget_tokens":2048}'],
    "stream_options": [b'{"continuous_usage_stats":true}', b"null", b'{"include_usage": true}'],
}
MAY_CHANGE = {*KNOWN, "output_config", "forced"}


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Request bodies as clients may spell them, each known key at most once and unknown keys as they come."""
    parts: list[bytes] = []
    for key in draw(st.lists(st.sampled_from(sorted(KNOWN)), unique=True, max_size=8)):
        spelling = draw(st.sampled_from([key, f"\\u{ord(key[0]):04x}{key[1:]}"]))
        parts.append(
            b'"%b"%b:%b%b' % (spelling.encode(), draw(BLANKS), draw(BLANKS), draw(st.sampled_from(KNOWN[key])))
        )
    for key in draw(st.lists(st.sampled_from(UNKNOWN_KEYS), max_size=6)):
        spelling = key if "\\" in key else json.dumps(key, ensure_ascii=draw(st.booleans()))[1:-1]
        parts.append(b'%b"%b":%b%b' % (draw(BLANKS), spelling.encode(), draw(BLANKS), draw(VALUES)))
    parts = draw(st.permutations(parts))
    return b"%b{%b%b}%b" % (draw(BLANKS), (draw(BLANKS) + b",").join(parts), draw(BLANKS), draw(BLANKS))


routes = st.builds(
    route,
    thinking=st.sampled_from(["client", "off", "on"]),
    model=st.sampled_from([None, "deepseek-v4", "gpt-oss"]),
    max_tokens=st.sampled_from([MaxTokens(), MaxTokens(default=100, floor=90, ceiling=200), MaxTokens(floor=256)]),
    defaults=st.sampled_from([{}, {"temperature": 0.3}]),
    override=st.sampled_from([{}, {"forced": {"a": 1}}, {"temperature": 1}]),
    drop=st.sampled_from([(), ("logit_bias",), ("logit_bias", "reasoning", "stream_options")]),
)


def spelled(text: bytes) -> list[tuple[str, bytes]]:
    return [(member.key, text[member.start : member.end]) for member in members(text)]


@given(
    bodies(), routes, st.sampled_from(sorted(GENERATING)), st.sampled_from(["vllm", "sglang", "llamacpp", "ollama", "openai"]),
    st.sampled_from(["auto", "unknown", "seed_oss", "hunyuan_v3"]), st.booleans(),
)  # fmt: skip
def test_whatever_is_not_named_stays_byte_for_byte(
    raw: bytes, settings: Route, kind: Kind, engine: str, family: str, add_usage: bool
) -> None:
    """Big integers, 1e400, 1.10, duplicates, escapes, nesting of 500, key order and unknown fields (C044, C045, C055, C056)."""
    body = read_object(raw)
    upstream = Upstream.model_validate({"url": "http://127.0.0.1:8000", "family": family})
    result = shape(body, route=settings, upstream=upstream, engine=engine, kind=kind, add_usage=add_usage)
    assert shape(body, route=settings, upstream=upstream, engine=engine, kind=kind, add_usage=add_usage) == result
    before, after = spelled(body.raw), spelled(result.body)
    assert [pair for pair in after if pair[0] not in MAY_CHANGE] == [
        pair for pair in before if pair[0] not in MAY_CHANGE
    ]
    changed = {key for key, _ in {*before} ^ {*after}}
    if not result.changes:
        assert result.body is body.raw
        assert not changed
    kept = [(key, value) for key, value in before if key not in changed]
    assert [pair for pair in after if pair[0] not in changed] == kept
    assert (b'"big":12345678901234567890123' in result.body) is (b'"big":12345678901234567890123' in raw)
    if not str(body.data.get("model", "")).endswith("-nothinking"):  # a suffix asks the first time only
        again = read_object(result.body)
        second = shape(again, route=settings, upstream=upstream, engine=engine, kind=kind, add_usage=add_usage)
        assert read_object(second.body).data == again.data


def test_messages_of_earlier_turns_are_the_same_bytes_in_every_turn() -> None:
    """C055, C074: null stays null, "" stays "", arguments are never re-dumped."""
    first = (
        b'{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",'
        b'"function":{"name":"f","arguments":"{\\"b\\":1, \\"a\\":2}"}}]}'
    )
    turns = [first, b'{"role":"tool","tool_call_id":"c1","content":""}', b'{"role":"assistant","tool_calls":[]}']
    for count in range(1, 4):
        raw = b'{"messages": [%b], "model":"qwen3", "max_tokens":5}' % b", ".join(turns[:count])
        result = shaped(raw, {"thinking": "off", "model": "m", "max_tokens": {"ceiling": 3}})
        member = next(member for member in members(result.body) if member.key == "messages")
        assert [result.body[start:end] for start, end in elements(result.body, member.start)] == turns[:count]


def test_whether_shaping_is_needed_is_seen_without_doing_it() -> None:
    plain, stream = read_object(CHAT), read_object(b'{"stream":true}')
    assert not needs_shaping(route(), plain, "chat", add_usage=True)
    assert needs_shaping(route(), stream, "chat", add_usage=True)
    assert needs_shaping(route(), plain, "chat", rescue=True)
    assert needs_shaping(route(thinking="off"), plain, "chat")
    assert needs_shaping(route(), read_object(b'{"model":"x-nothinking"}'), "embeddings")
    assert not needs_shaping(route(thinking="off"), plain, "opaque")


# --- Kinds -------------------------------------------------------------------------------------------------------


def test_every_path_of_the_data_plane_has_a_kind_and_nothing_else_has() -> None:
    assert kind_of("/v1/chat/completions") == "chat"
    assert kind_of("/v1/responses") == "responses"
    assert kind_of("/tokenize") == "opaque"
    for path in (
        "/sleep",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/metrics",
        "/v1/models",
        "/",
        "",
        "/v1/chat/completions/",
    ):
        assert kind_of(path) is None

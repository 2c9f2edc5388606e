"""What waiting callers hear: who they are, when something is due, and how it looks on the wire."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Api
from gateway.policy.heartbeat import (
    BUSY_MS,
    HEARTBEAT_MS,
    LEAST_MS,
    MS,
    NEVER,
    SILENT,
    Beat,
    BeatClock,
    ClientKind,
    Form,
    Plan,
    beat_bytes,
    client_kind,
    earliest_ms,
    plan,
)
from gateway.wire.kinds import Kind

START = 5_000_000 * MS
KINDS: tuple[ClientKind, ...] = get_args(ClientKind)
REQUESTS: tuple[Kind, ...] = get_args(Kind)


# Who is it?


def headers(**fields: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"g"), *((name.replace("_", "-").encode(), value.encode()) for name, value in fields.items())]


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, "unknown"),
        ({"user_agent": "curl/8.5"}, "unknown"),
        ({"user_agent": "python-requests/2.34"}, "unknown"),
        ({"user_agent": "python-requests/2.34", "accept_charset": "utf-8"}, "dify"),
        ({"user_agent": "OpenAI/Python 3.57.0", "x_stainless_read_timeout": "600"}, "openai_python"),
        ({"user_agent": "AsyncOpenAI/Python 1.109.1"}, "openai_python"),
        ({"user_agent": "my-app/1", "x_stainless_lang": "python"}, "openai_python"),
        ({"user_agent": "OpenAI/Python 2.54.0", "x_stainless_read_timeout": "60.0"}, "llama_index"),
        ({"user_agent": "OpenAI/JS 7.59.0", "x_stainless_lang": "js"}, "undici"),
        ({"user_agent": "my-app/1", "x_stainless_lang": "js"}, "undici"),
        ({"user_agent": "ai-sdk-openai-compatible/3.0.92 ai-sdk-provider-utils/5 node.js/22"}, "undici"),
        ({"user_agent": "langchainjs-openai/1.0.0 (node)"}, "undici"),
        ({"user_agent": "RooCode/3.52.1", "x_title": "Roo Code"}, "undici"),
        ({"user_agent": "node"}, "undici"),
        ({"user_agent": "nodejs-something"}, "unknown"),
        ({"openai_beta": "assistants=v2", "accept": "text/event-stream"}, "tabby"),
        ({"user_agent": "curl/8.5", "openai_beta": "assistants=v2"}, "unknown"),
        ({"user_agent": "Python/3.11 aiohttp/3.12", "x_openwebui_user_id": "1"}, "open_webui"),
        ({"user_agent": "Python/3.11 aiohttp/3.12"}, "unknown"),
    ],
)
def test_a_program_is_known_by_what_it_sends(fields: dict[str, str], expected: ClientKind) -> None:
    assert client_kind(headers(**fields), "openai") == expected


def test_who_speaks_anthropics_api_is_treated_as_its_libraries() -> None:
    assert client_kind(headers(user_agent="curl/8.5"), "anthropic") == "anthropic"


# What does it hear?


@pytest.mark.parametrize(
    "kind, facts, expected",
    [
        # the budget says when, the route's interval how often
        ("unknown", {"ttft_ms": 2000}, (2000, 10_000)),
        ("unknown", {}, (10_000, 10_000)),
        ("unknown", {"ttft_ms": 2000, "heartbeat_ms": 15_000}, (2000, 15_000)),
        ("unknown", {"ttft_ms": 90_000}, (90_000, 10_000)),
        # clients that give up before the budget
        ("llama_index", {"ttft_ms": 90_000}, (20_000, 10_000)),
        ("undici", {"ttft_ms": 250_000}, (200_000, 10_000)),
        ("anthropic", {"ttft_ms": 90_000}, (10_000, 10_000)),
        # half of what the caller bears
        ("openai_python", {"ttft_ms": 90_000, "read_timeout_ms": 600_000}, (90_000, 10_000)),
        ("openai_python", {"ttft_ms": 90_000, "read_timeout_ms": 5000}, (2500, 2500)),
        ("unknown", {"ttft_ms": 1000, "read_timeout_ms": 5000}, (1000, 2500)),
        ("unknown", {"read_timeout_ms": 1}, (LEAST_MS, LEAST_MS)),
    ],
)
def test_a_stream_hears_something_before_its_caller_gives_up(
    kind: ClientKind, facts: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert plan(kind, request="chat", is_stream=True, **facts).quiet == Beat(*expected, "comment")


@pytest.mark.parametrize(
    "kind, request_kind, form, before_token, in_reasoning, has_status",
    [
        ("unknown", "chat", "comment", True, True, False),
        ("openai_python", "chat", "comment", True, True, False),
        ("openai_python", "completions", "comment", True, True, False),
        ("llama_index", "chat", "comment", False, False, False),
        ("dify", "chat", "comment", False, False, False),
        ("tabby", "completions", "comment", False, False, False),
        ("undici", "chat", "comment", False, False, False),
        ("open_webui", "chat", "comment", False, False, True),
        ("anthropic", "messages", "ping", False, False, False),
        ("unknown", "responses", "comment", False, False, False),
        ("open_webui", "responses", "comment", False, False, False),
    ],
)
def test_each_client_hears_the_forms_that_it_takes(
    kind: ClientKind, request_kind: Kind, form: Form, before_token: bool, in_reasoning: bool, has_status: bool
) -> None:
    found = plan(kind, request=request_kind, is_stream=True, include_usage=True)
    assert found.quiet is not None
    assert found.quiet.form == form
    assert (found.before_token is not None, found.in_reasoning is not None) == (before_token, in_reasoning)
    assert found.has_status is has_status


def test_chunks_without_choices_go_only_to_who_must_handle_them_anyway() -> None:
    """client-contract §3: naive `choices[0]` loops break on form B; `include_usage` brings such a chunk too."""
    assert plan("unknown", request="chat", is_stream=True).in_reasoning is None
    assert plan("unknown", request="chat", is_stream=True, include_usage=True).in_reasoning is not None


@pytest.mark.parametrize(
    "kind, read_timeout_ms, expected",
    [
        ("unknown", None, (45_000, 15_000)),
        ("openai_python", None, (45_000, 15_000)),
        ("openai_python", 600_000, (300_000, 15_000)),
        ("openai_python", 20_000, (10_000, 10_000)),
        ("llama_index", 60_000, (30_000, 15_000)),
        ("llama_index", 600_000, (30_000, 15_000)),
        ("dify", None, (200_000, 15_000)),
        ("undici", None, (200_000, 15_000)),
        ("undici", 600_000, (200_000, 15_000)),
        ("undici", 60_000, (30_000, 15_000)),
        ("open_webui", None, None),
        ("tabby", None, None),
        ("anthropic", 600_000, None),
    ],
)
def test_a_plain_call_hears_newlines_as_late_as_its_caller_allows(
    kind: ClientKind, read_timeout_ms: int | None, expected: tuple[int, int] | None
) -> None:
    found = plan(kind, request="chat", is_stream=False, read_timeout_ms=read_timeout_ms, ttft_ms=1, heartbeat_ms=50)
    assert found == (Plan(Beat(*expected, "newline")) if expected else SILENT)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_text_and_maybe_no_json_hears_nothing(kind: ClientKind) -> None:
    assert plan(kind, request="opaque", is_stream=False) == SILENT
    assert plan(kind, request="opaque", is_stream=True) == SILENT
    assert plan(kind, request="embeddings", is_stream=True) == SILENT


@given(
    st.sampled_from(KINDS),
    st.sampled_from(REQUESTS),
    st.booleans(),
    st.none() | st.integers(1, 10**7),
    st.none() | st.integers(1, 10**6),
    st.integers(50, 10**6),
)
def test_no_plan_begins_before_the_time_to_make_one(
    kind: ClientKind,
    request_kind: Kind,
    is_stream: bool,
    read_timeout_ms: int | None,
    ttft_ms: int | None,
    heartbeat_ms: int,
) -> None:
    found = plan(
        kind,
        request=request_kind,
        is_stream=is_stream,
        read_timeout_ms=read_timeout_ms,
        ttft_ms=ttft_ms,
        heartbeat_ms=heartbeat_ms,
        include_usage=True,
    )
    earliest = earliest_ms(
        is_stream=is_stream, read_timeout_ms=read_timeout_ms, ttft_ms=ttft_ms, heartbeat_ms=heartbeat_ms
    )
    assert earliest >= 1
    for beat in (found.quiet, found.before_token, found.in_reasoning):
        assert beat is None or (beat.first_ms >= earliest and beat.every_ms >= min(LEAST_MS, heartbeat_ms))
    if found.quiet is None:
        assert found == SILENT


# When is it due?


def hear(
    what: Plan, until_s: float, *, token_s: float = 0, visible_s: float = 0, events_s: tuple[float, ...] = ()
) -> list[tuple[float, Form]]:
    """Plays a request that is looked at whenever the clock asked for it or something came. (seconds, form) heard."""
    clock, heard = BeatClock(what), list[tuple[float, Form]]()
    token, visible = (START + int(s * 1e9) if s else 0 for s in (token_s, visible_s))
    events = sorted(START + int(s * 1e9) for s in {*events_s, token_s, visible_s} if s)
    now, last_write = START, 0
    while now <= START + until_s * 1e9:
        last_event = max((event for event in events if event <= now), default=0)
        last_write = max(last_write, last_event)
        form, when = clock.due(
            START,
            now,
            last_write=last_write,
            last_event=last_event,
            token=token if token <= now else 0,
            visible=visible if visible <= now else 0,
        )
        if form is None:
            assert when > now
            now = min([when, *(event for event in events if event > now)])
        else:
            heard.append(((now - START) / 1e9, form))
            clock.wrote(form, now)
            last_write = now
    return heard


def test_a_silent_stream_hears_comments_and_a_chunk_each_minute() -> None:
    """client-contract §14, 14: LangChain's async client gives up after 120 s without a parsed chunk."""
    heard = hear(plan("openai_python", request="chat", is_stream=True, ttft_ms=2000), 130)
    assert [s for s, form in heard if form == "comment"] == [2, 12, 22, 32, 42, 52, 70, 80, 90, 100, 110, 130]
    assert [s for s, form in heard if form == "empty_delta"] == [60, 120]


def test_nothing_is_due_while_tokens_flow() -> None:
    flowing = tuple(range(3, 100, 5))
    assert hear(plan("unknown", request="chat", is_stream=True), 99, token_s=3, visible_s=3, events_s=flowing) == []


def test_silence_in_mid_stream_hears_comments_only() -> None:
    """C7."""
    heard = hear(plan("unknown", request="chat", is_stream=True, include_usage=True), 95, token_s=1, visible_s=1)
    assert heard == [(s, "comment") for s in range(11, 95, 10)]


def test_silent_reasoning_hears_chunks_without_choices() -> None:
    """client-contract §3: form C would close the think block in Dify and RAGFlow."""
    what = plan("openai_python", request="chat", is_stream=True, include_usage=True, ttft_ms=1000)
    heard = hear(what, 200, token_s=5, visible_s=190)
    assert [(s, form) for s, form in heard if form != "comment"] == [
        (65, "no_choices"),
        (125, "no_choices"),
        (185, "no_choices"),
    ]
    heard = hear(plan("openai_python", request="chat", is_stream=True), 200, token_s=5, visible_s=190)
    assert {form for _, form in heard} == {"comment"}, "who did not ask for usage may not know such chunks"


def test_a_role_chunk_puts_the_parsed_content_timer_back() -> None:
    heard = hear(plan("unknown", request="chat", is_stream=True), 170, events_s=(50,))
    assert [s for s, form in heard if form == "empty_delta"] == [110, 170]


def test_the_chunk_does_not_come_before_the_budget() -> None:
    heard = hear(plan("unknown", request="chat", is_stream=True, ttft_ms=90_000), 100)
    assert heard[0][0] == 90
    assert (90, "empty_delta") in heard


@pytest.mark.parametrize("kind", ["dify", "tabby", "llama_index", "undici"])
def test_some_hear_comments_only(kind: ClientKind) -> None:
    what = plan(kind, request="chat", is_stream=True, include_usage=True, ttft_ms=1000)
    assert {form for _, form in hear(what, 300, token_s=150)} == {"comment"}


def test_anthropics_clients_hear_pings() -> None:
    assert hear(plan("anthropic", request="messages", is_stream=True, ttft_ms=60_000), 35) == [
        (10, "ping"), (20, "ping"), (30, "ping"),
    ]  # fmt: skip


def test_open_webui_shows_a_line_from_the_first_beat_to_the_first_token() -> None:
    heard = hear(plan("open_webui", request="chat", is_stream=True, ttft_ms=2000), 40, token_s=25)
    assert heard == [(2, "status_event"), (12, "comment"), (22, "comment"), (25, "status_done"), (35, "comment")]


def test_open_webui_shows_no_line_for_an_answer_in_time() -> None:
    heard = hear(plan("open_webui", request="chat", is_stream=True, ttft_ms=2000), 15, token_s=1)
    assert heard == [(11, "comment")]


def test_whoever_ends_the_wait_in_another_way_knows_what_is_still_shown() -> None:
    clock = BeatClock(plan("open_webui", request="chat", is_stream=True, ttft_ms=2000))
    assert not clock.owes_status_done
    clock.wrote("status_event", START)
    assert clock.owes_status_done
    assert "open" in repr(clock)
    clock.wrote("status_done", START)
    assert not clock.owes_status_done


def test_a_plain_call_hears_newlines_until_its_answer_begins() -> None:
    assert hear(plan("unknown", request="chat", is_stream=False), 200, token_s=100) == [
        (45, "newline"), (60, "newline"), (75, "newline"), (90, "newline"),
    ]  # fmt: skip


def test_who_hears_nothing_is_never_asked_again() -> None:
    assert BeatClock(SILENT).due(START, START + 10**12) == (None, NEVER)
    newline = BeatClock(plan("unknown", request="chat", is_stream=False))
    assert newline.due(START, START + 10**12, token=START + 5) == (None, NEVER)


def test_a_beat_that_may_not_be_written_now_is_asked_for_again_soon() -> None:
    clock = BeatClock(plan("unknown", request="chat", is_stream=True))
    now = START + HEARTBEAT_MS * MS
    assert clock.due(START, now, can_beat=False) == (None, now + BUSY_MS * MS)
    assert clock.due(START, now - 1, can_beat=False) == (None, now)
    assert clock.due(START, now) == ("comment", now)


@given(
    st.sampled_from(KINDS),
    st.sampled_from(REQUESTS),
    st.booleans(),
    st.booleans(),
    st.integers(0, 150),
    st.integers(0, 150),
    st.lists(st.integers(1, 150), max_size=6),
)
def test_no_course_of_events_breaks_a_clients_rules(
    kind: ClientKind,
    request_kind: Kind,
    is_stream: bool,
    include_usage: bool,
    token_s: int,
    thinks_s: int,
    events_s: list[int],
) -> None:
    what = plan(kind, request=request_kind, is_stream=is_stream, include_usage=include_usage, ttft_ms=1000)
    visible_s = token_s + thinks_s if token_s else 0
    heard = hear(what, 200, token_s=token_s, visible_s=visible_s, events_s=tuple(events_s))
    for s, form in heard:
        before = not token_s or s < token_s
        assert before or form not in ("empty_delta", "newline", "status_event")
        assert not before or form not in ("no_choices", "status_done")
    forms = [form for _, form in heard]
    assert forms.count("status_event") <= 1
    assert forms.count("status_done") <= forms.count("status_event")
    assert all(later - earlier >= 0 for (earlier, _), (later, _) in pairwise(heard))
    chunks = [s for s, form in heard if form in ("empty_delta", "no_choices")]
    assert all(later - earlier >= 60 for earlier, later in pairwise(chunks))


# How does it look?


@pytest.mark.parametrize(
    "form, estimation_ms, expected",
    [
        ("comment", None, b": keep-alive\n\n"),
        ("comment", 1234, b": keep-alive estimation_ms=1234\n\n"),
        ("comment", 0, b": keep-alive estimation_ms=0\n\n"),
        ("comment", -5, b": keep-alive estimation_ms=0\n\n"),
        ("ping", 1234, b'event: ping\ndata: {"type": "ping"}\n\n'),
        ("newline", 1234, b"\n"),
    ],
)
def test_beats_without_a_chunk(form: Form, estimation_ms: int | None, expected: bytes) -> None:
    assert beat_bytes(form, estimation_ms=estimation_ms) == expected


def chunk_of(form: Form, request: Kind = "chat", **facts: Any) -> Any:
    data = beat_bytes(form, request=request, model="m", answer_id="chatcmpl-1", created=17, **facts)
    assert data.startswith(b"data: {")
    assert data.endswith(b"}\n\n")
    assert data.count(b"\n") == 2
    assert b"\r" not in data
    return json.loads(data[6:])


@pytest.mark.parametrize(
    "form, request_kind, expected_object, choices",
    [
        ("empty_delta", "chat", "chat.completion.chunk", [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]),
        ("empty_delta", "completions", "text_completion", [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}]),
        ("no_choices", "chat", "chat.completion.chunk", []),
        ("no_choices", "completions", "text_completion", []),
    ],
)  # fmt: skip
def test_a_chunk_carries_the_five_fields_that_strict_clients_want(
    form: Form, request_kind: Kind, expected_object: str, choices: list[Any]
) -> None:
    """client-contract §1, rules 5 and 6; Tabby's completions die of a `delta`."""
    assert chunk_of(form, request_kind) == {
        "id": "chatcmpl-1", "object": expected_object, "created": 17, "model": "m", "choices": choices,
    }  # fmt: skip


def test_open_webuis_line_says_how_long_it_takes_and_then_that_it_is_over() -> None:
    waiting = chunk_of("status_event", estimation_ms=11_001)
    assert waiting["choices"] == []
    assert waiting["event"] == {
        "type": "status",
        "data": {"description": "Waiting for the model, about 12 s", "done": False},
    }
    assert chunk_of("status_event")["event"]["data"]["description"] == "Waiting for the model"
    assert chunk_of("status_done", estimation_ms=11_001)["event"]["data"] == {
        "description": "The model is answering",
        "done": True,
    }
    assert "type" not in waiting, "a top-level `type` makes Open WebUI drop the chunk"


@given(st.sampled_from(get_args(Form)), st.sampled_from(REQUESTS), st.text(), st.text(), st.none() | st.integers())
def test_every_beat_is_one_whole_block_whatever_the_names(
    form: Form, request_kind: Kind, model: str, answer_id: str, estimation_ms: int | None
) -> None:
    """client-contract §1, rules 1 to 4: LF only, blocks of their own, no comment that begins with `ping`."""
    data = beat_bytes(form, request=request_kind, model=model, answer_id=answer_id, estimation_ms=estimation_ms)
    assert b"\r" not in data
    if form == "newline":
        return
    assert data.endswith(b"\n\n")
    assert b"\n\n" not in data[:-2]
    assert data.count(b"\n") == (3 if form == "ping" else 2)
    assert not data.lstrip(b": ").startswith(b"ping")


def test_half_a_surrogate_pair_in_a_name_costs_nothing() -> None:
    """C048, C109."""
    assert json.loads(beat_bytes("no_choices", model="a\ud83d")[6:])["model"] == "a?"


@pytest.mark.parametrize("api", get_args(Api))
def test_repeated_headers_do_no_harm(api: Api) -> None:
    assert client_kind([(b"user-agent", b"a"), (b"user-agent", b"b")] * 3, api) in ("unknown", "anthropic")

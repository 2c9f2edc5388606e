"""What the clients see of budgets, retries, fallbacks and the breaker: an answer, once, or a sentence."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.clients.coming import cases
from tests.clients.model_plays import FULL, THOUGHTS, Asked, answers, gives, resets, says_status
from tests.clients.real_clients import KINDS, OPENAI_KINDS, Kind
from tests.clients.scenes import MARK, Mode, Played, Scene, chat_body, scene, stage
from tests.support.plays import finish, silence
from tests.support.raw import STREAM_HEAD, Handler, Received, Wire, chunk, whole
from tests.support.running import Running

BUDGET_MS = 80
OTHER = ("the other ", "upstream")


def _budget(on_exceed: str, **more: object) -> dict[str, object]:
    return {"budget": {"ttft_ms": BUDGET_MS, "heartbeat_ms": 50, "on_exceed": on_exceed, **more}}


def _kinds(*names: str) -> list[Kind]:
    return [kind for kind in KINDS if kind.name in names]


# The caller's own limit of silence

READ_S = 1.0
# These tell it (client-contract §9); the others keep it to themselves, or limit the whole call.
TELLING = _kinds("openai-1", "openai-2", "openai-3", "langchain", "langchain-async", "llama-index")
IMPATIENT_CALLERS = scene("read_timeout", answers(wait=2.2 * READ_S), job={"timeout": READ_S}, kinds=TELLING)
FAILING_LATE = scene(
    "newline_failure",
    says_status("500 Internal Server Error", "CUDA ran out of memory", wait=1.5 * READ_S),
    job={"timeout": READ_S},
    kinds=TELLING,
)


@pytest.mark.parametrize("mode, kind", cases(TELLING, "read_timeout"))
async def test_a_caller_that_limits_silence_hears_something_in_time(played: Played, mode: Mode, kind: Kind) -> None:
    """client-contract §13: LlamaIndex's 60 s, here one second; newlines before the JSON of a plain answer."""
    seen = await played.see(IMPATIENT_CALLERS, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")
    assert len(seen.records) == 1


@pytest.mark.parametrize("mode, kind", cases(TELLING, "newline_failure", modes=("plain",)))
async def test_a_failure_after_newlines_is_no_empty_success(played: Played, mode: Mode, kind: Kind) -> None:
    """client-contract §4: the status is out, so what is left is to make the client raise; before the upstream's error
    there must be no timeout of the client's own."""
    seen = await played.see(FAILING_LATE, mode, kind)
    assert seen.said.error is not None
    assert seen.seconds > 1.4 * READ_S


# LangChain counts parsed chunks, not bytes

PREFILL = scene(
    "parsed_heartbeat",
    answers(wait=2.2),
    route={"budget": {"ttft_ms": 50, "heartbeat_ms": 100}},
    job={"chunk_timeout": 1.0},
)


@pytest.fixture
def _chunks_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """120 s of LangChain's become 1 s, 60 s of ours half a second."""
    monkeypatch.setattr("gateway.policy.heartbeat.CHUNK_MS", 500)


@pytest.mark.usefixtures("_chunks_in_time")
@pytest.mark.parametrize("mode, kind", cases(_kinds("langchain-async"), "parsed_heartbeat", modes=("stream",)))
async def test_langchain_survives_a_long_prefill(played: Played, mode: Mode, kind: Kind) -> None:
    """client-contract §14.14, 130 s against LangChain's limit of 120 s, scaled down."""
    seen = await played.see(PREFILL, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")


@pytest.mark.usefixtures("_chunks_in_time")
@pytest.mark.parametrize(
    "mode, kind", cases([kind for kind in KINDS if kind.name != "langchain-async"], modes=("stream",))
)
async def test_what_langchain_needs_harms_nobody(played: Played, mode: Mode, kind: Kind) -> None:
    seen = await played.see(PREFILL, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")


# Pending

PENDING = scene("pending", answers(wait=0.5), route=_budget("pending"))


@pytest.mark.parametrize("mode, kind", cases(KINDS))
async def test_who_did_not_opt_in_never_sees_202(played: Played, mode: Mode, kind: Kind) -> None:
    """client-contract §3 H, §4: most clients take it for an empty answer."""
    seen = await played.see(PENDING, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")
    assert [record["status"] for record in seen.records] == [200]


@pytest.mark.parametrize("mode, kind", cases(KINDS[:1], "pending"))
async def test_who_opted_in_gets_202_on_the_same_route(mode: Mode, kind: Kind) -> None:
    async with stage(PENDING) as (gateway, _):
        response = await gateway.ask(
            chat_body(stream=mode == "stream"), "/raw/v1/chat/completions", {"prefer": "respond-async"}
        )
    assert response.status == 202
    assert response.json["status"] == "pending"


REPEATED = scene(
    "retry_joins",
    answers(wait=1.4),
    route=_budget("pending"),
    job={"timeout": 0.8, "retries": 3, "headers": {"prefer": "respond-async, wait=10"}},
    kinds=TELLING[:-1],  # LlamaIndex would come back for half a minute
)


@pytest.mark.parametrize("mode, kind", cases(REPEATED.kinds, "retry_joins", modes=("plain",)))
async def test_a_request_that_is_sent_again_joins_the_first(played: Played, mode: Mode, kind: Kind) -> None:
    """client-contract §14.11: the client's own limit passes, it comes back, and the model server is asked once."""
    seen = await played.see(REPEATED, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")
    assert len(seen.requests) == 1


# Plain calls seen from inside


async def _thinks_aloud(request: Received, wire: Wire) -> None:
    asked = Asked(request)
    if not asked.is_stream:
        await wire.send(whole(asked.body("this went up as a plain call")))
        return
    await wire.send(STREAM_HEAD)
    await wire.stream(asked.opening(), *(chunk({"reasoning_content": text}) for text in THOUGHTS))
    await wire.stream(*asked.words(), *asked.closing())
    await finish(wire, "last_chunk")


INSIDE = {"stream_upstream": True}
SEEN_INSIDE = scene("stream_upstream", _thinks_aloud, route=INSIDE, kinds=OPENAI_KINDS, upstream={"engine": "vllm"})
SILENT_INSIDE = scene(
    "stream_upstream_silent",
    silence,
    route={**INSIDE, "timeouts": {"first_token_ms": 300, "total_ms": 1500}},
    kinds=OPENAI_KINDS,
    upstream={"engine": "vllm"},  # what others say in streams and plain answers is not known well enough
)


@pytest.mark.parametrize("mode, kind", cases(OPENAI_KINDS, "stream_upstream", modes=("plain",)))
async def test_a_plain_call_seen_from_inside_gets_the_same_answer(played: Played, mode: Mode, kind: Kind) -> None:
    """Dify's blocking mode and LangChain's `invoke` among them."""
    seen = await played.see(SEEN_INSIDE, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")
    assert seen.said.finish == (None if kind.name == "dify" else "stop")
    if kind.shows_reasoning and kind.name != "dify":  # whose blocking mode shows none
        assert seen.said.reasoning == "".join(THOUGHTS)
    assert [request.json["stream"] for request in seen.requests] == [True]


@pytest.mark.parametrize("mode, kind", cases(OPENAI_KINDS, "stream_upstream", modes=("plain",)))
async def test_a_plain_call_seen_from_inside_has_a_limit_for_its_first_token(
    played: Played, mode: Mode, kind: Kind
) -> None:
    seen = await played.see(SILENT_INSIDE, mode, kind)
    assert "first_token_ms" in seen.said.message


# Breaker and `fail`


@asynccontextmanager
async def _the_breaker_is_open(gateway: Running) -> AsyncIterator[None]:
    for _ in range(4):
        await gateway.ask(chat_body(stream=False), "/raw/v1/chat/completions")
    yield


OPEN = scene(
    "breaker",
    says_status("500 Internal Server Error", "CUDA ran out of memory"),
    upstream={"breaker": {"mode": "on", "minimum_calls": 2, "wait_open_ms": 60_000}},
    around=_the_breaker_is_open,
)
TOO_LATE = scene("fail", answers(wait=1.5), route=_budget("fail"))


@pytest.mark.parametrize("mode, kind", cases(KINDS, "breaker"))
async def test_an_open_breaker_is_told_in_words(played: Played, mode: Mode, kind: Kind) -> None:
    seen = await played.see(OPEN, mode, kind)
    assert [record["status"] for record in seen.records] == [503]
    assert "`up`" in seen.said.message
    assert seen.requests == []


@pytest.mark.parametrize("mode, kind", cases(KINDS, "fail", modes=("stream",)))
async def test_a_budget_that_fails_is_told_in_words(played: Played, mode: Mode, kind: Kind) -> None:
    seen = await played.see(TOO_LATE, mode, kind)
    assert [record["status"] for record in seen.records] == [503]
    assert "budget" in seen.said.message
    assert seen.said.text == ""


# Another upstream


async def _is_the_other(request: Received, wire: Wire) -> None:
    await gives(wire, request, texts=OTHER)


def _late_then_prompt(first: Handler) -> Handler:
    """Each client's first request meets `first`, whichever upstream it reaches; later ones are answered at once."""
    count: Counter[str] = Counter()

    async def play(request: Received, wire: Wire) -> None:
        name = f"{request.header(MARK)} {request.json.get('stream')}"
        count[name] += 1
        await (first if count[name] == 1 else answers())(request, wire)

    return play


LATE_FIRST = _late_then_prompt(answers(wait=2.0))
RESET_FIRST = _late_then_prompt(resets())
FALLBACK = Scene(
    "fallback", {"up": answers(wait=2.0), "other": _is_the_other},
    {**_budget("fallback", fallback="other"), "upstreams": ["up"]}, is_shared=False,
)  # fmt: skip
DOWN = Scene(
    "fallback_down", {"up": None, "other": _is_the_other},
    {**_budget("fallback", fallback="other"), "upstreams": ["up"]}, is_shared=False,
)  # fmt: skip


@asynccontextmanager
async def _a_hedge_is_earned(gateway: Running) -> AsyncIterator[None]:
    """One in twenty requests may be hedged."""
    for _ in range(20):
        gateway.gateway.runtime.fleet.extra.note_request(time.monotonic_ns())
    yield


HEDGED = Scene(
    "hedge", {"up": LATE_FIRST, "other": LATE_FIRST}, _budget("hedge"), is_shared=False, around=_a_hedge_is_earned
)
RETRIED = Scene("retry", {"up": RESET_FIRST, "other": RESET_FIRST}, is_shared=False)


@pytest.mark.parametrize("mode, kind", cases(KINDS, "fallback", modes=("stream",)))
async def test_the_fallback_answers_when_the_first_is_late(played: Played, mode: Mode, kind: Kind) -> None:
    seen = await played.see(FALLBACK, mode, kind)
    assert (seen.said.text, seen.said.message) == ("".join(OTHER), "")


@pytest.mark.parametrize("mode, kind", cases(KINDS, "fallback"))
async def test_the_fallback_answers_when_the_first_is_down(played: Played, mode: Mode, kind: Kind) -> None:
    seen = await played.see(DOWN, mode, kind)
    assert (seen.said.text, seen.said.message) == ("".join(OTHER), "")


@pytest.mark.parametrize("mode, kind", cases(KINDS, "hedge", modes=("stream",)))
async def test_a_hedge_gives_the_whole_answer_once(played: Played, mode: Mode, kind: Kind) -> None:
    seen = await played.see(HEDGED, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")
    assert seen.seconds < 1.5
    assert len(seen.requests) == 2


@pytest.mark.parametrize("mode, kind", cases(KINDS, "retry"))
async def test_a_retry_gives_the_whole_answer_once(played: Played, mode: Mode, kind: Kind) -> None:
    seen = await played.see(RETRIED, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")
    assert len(seen.requests) == 2
    assert len(seen.records) == 1

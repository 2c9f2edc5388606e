"""No client sees a silent empty answer; each sees a readable message for each failure: one table of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.clients.coming import COMING
from tests.clients.model_plays import (
    FULL,
    breaks_off,
    is_done_at_once,
    mistakes_the_mode,
    never_finishes,
    pretends_to_be_a_page,
    resets,
    says_nothing,
    says_status,
    tells_an_error,
)
from tests.clients.real_clients import KINDS, Kind
from tests.clients.scenes import MODES, Mode, Played, scene
from tests.support.plays import silence
from tests.support.raw import Handler

EVERYBODY = frozenset(kind.name for kind in KINDS)
LATE = {"budget": {"ttft_ms": 60, "heartbeat_ms": 50}}
LATE_S = 0.25  # a few heartbeats after the request
DIED, MEMORY, PLACE = "the engine died", "CUDA ran out of memory", "no place left for you"
BROKE = "in the middle of its answer"


@dataclass(frozen=True)
class Failure:
    """`words`: what the message must hold, the same for both modes or one for each. `coming`: where the clients named
    do not see it yet."""

    name: str
    play: Handler | None
    words: str | tuple[str, str]
    route: Mapping[str, Any] = field(default_factory=dict)
    coming: Mapping[Mode, tuple[str, frozenset[str]]] = field(default_factory=dict)

    def words_in(self, mode: Mode) -> str:
        return self.words if isinstance(self.words, str) else self.words[MODES.index(mode)]


def _flat(body: bytes) -> Handler:
    return says_status("400 Bad Request", "", body=body)


FAILURES = (
    Failure("refused", None, "refused the connection"),
    Failure("reset", resets(), "reset the connection without an answer"),
    Failure("cut", breaks_off("reset"), BROKE),
    Failure("half", breaks_off("half"), BROKE),
    Failure(
        "stall", breaks_off("open"), ("was silent for 200 ms", "took longer than 700 ms"),
        {"timeouts": {"idle_ms": 200, "total_ms": 700}},
    ),
    Failure(
        "silent", silence, ("no first token from upstream `up` within 300 ms", "took longer than 700 ms"),
        {"timeouts": {"first_token_ms": 300, "total_ms": 700}},
    ),
    Failure("status_500", says_status("500 Internal Server Error", MEMORY), MEMORY),
    Failure("status_503", says_status("503 Service Unavailable", PLACE, headers="retry-after: 1"), PLACE),
    Failure("html", pretends_to_be_a_page, "a web page instead of JSON"),
    Failure("wrong_mode", mistakes_the_mode, ("did not answer with a stream", "answered with a stream")),
    Failure("error_event", tells_an_error(DIED), DIED),
    Failure("error_first", tells_an_error(DIED, words=0), DIED),
    Failure("says_nothing", says_nothing, ("ended before its first event", "not JSON")),
    Failure(
        "unfinished", never_finishes, ("without finishing the answer", "JSON"),
        coming={"plain": ("broken_json", EVERYBODY)},
    ),
    Failure("late_500", says_status("500 Internal Server Error", MEMORY, wait=LATE_S), MEMORY, LATE),
    Failure("late_400", says_status("400 Bad Request", PLACE, wait=LATE_S), PLACE, LATE),
    Failure(
        "late_503", says_status("503 Service Unavailable", PLACE, headers="retry-after: 1", wait=LATE_S), PLACE, LATE
    ),
    Failure("late_reset", resets(wait=LATE_S), "reset the connection without an answer", LATE),
    Failure(
        "late_silence", silence, ("no first token from upstream `up` within 400 ms", "took longer than 700 ms"),
        {**LATE, "timeouts": {"first_token_ms": 400, "total_ms": 700}},
    ),
    Failure(
        "flat_error", _flat(b'{"object":"error","message":"too many tokens","type":"BadRequestError","code":400}'),
        "too many tokens",
        coming={mode: ("flat_error", frozenset({"ai-sdk"})) for mode in MODES},
    ),
    Failure(
        "detail", _flat(b'{"detail":"too many tokens"}'), "too many tokens",
        coming={
            mode: ("flat_error", frozenset({"openai-3", "langchain", "langchain-async", "ai-sdk"})) for mode in MODES
        },
    ),
    Failure(
        "flat_error_event", tells_an_error(DIED, is_flat=True), DIED,
        coming={
            "stream": ("flat_error_event", EVERYBODY - {"ai-sdk"}), "plain": ("flat_error", frozenset({"ai-sdk"})),
        },
    ),
    Failure(
        "bare_done", is_done_at_once, ("model server", "upstream"),
        coming={"stream": ("bare_done", EVERYBODY), "plain": ("no_choices", EVERYBODY)},
    ),
)  # fmt: skip


NOT_ANTHROPIC = {("flat_error_event", "stream"), ("bare_done", "plain")}  # shapes of OpenAI's API alone


def _table() -> list[object]:
    rows: list[object] = []
    for failure in FAILURES:
        for mode in MODES:
            name, failing = failure.coming.get(mode, ("", frozenset()))
            for kind in KINDS:
                if kind.name == "anthropic" and (failure.name, mode) in NOT_ANTHROPIC:
                    continue
                is_coming = name in COMING and kind.name in failing
                marks = [pytest.mark.xfail(strict=True, reason=COMING[name])] if is_coming else []
                rows.append(pytest.param(failure, mode, kind, marks=marks, id=f"{failure.name}-{mode}-{kind.name}"))
    return rows


@pytest.mark.parametrize("failure, mode, kind", _table())
async def test_each_failure_is_told_to_each_client(played: Played, failure: Failure, mode: Mode, kind: Kind) -> None:
    """client-contract §5, §6, §14.6, §14.7, §14.9: an exception with words that say what happened."""
    seen = await played.see(scene(failure.name, failure.play, route=failure.route), mode, kind)
    assert seen.said.error is not None, f"silence after {seen.said.text!r}"
    assert failure.words_in(mode) in seen.said.message
    assert seen.said.text != FULL
    assert FULL.startswith(seen.said.text)
    assert all(record["outcome"] != "complete" for record in seen.records)

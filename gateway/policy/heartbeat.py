"""What a waiting caller hears, by the program that it is, and when. Pure; looked at only while somebody waits.

The forms of client-contract §3, §4 and §13:

    comment       `: keep-alive` block          streams; no client breaks on it, but parsed-content timers do not see it
    empty_delta   chunk with nothing in it      before the first token, for such a timer (LangChain's async 120 s)
    no_choices    chunk with `choices: []`      the same once reasoning runs; only for who asked for `include_usage`
    ping          `event: ping`                 Anthropic's streams
    status_event  a line in Open WebUI          at the first beat; `status_done` takes it back at the first token
    newline       one byte                      plain JSON answers; commits them to 200, so the later the better

Who a caller is shows in its headers (§9). Not told apart: LangChain, RAGFlow and plain openai-python; Open WebUI where
its administrator forwards no user headers. Those get what all of them can take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import orjson

from gateway.wire.kinds import GENERATING, Kind

if TYPE_CHECKING:
    from gateway.errors import Api
    from gateway.wire.headers import Headers

ClientKind = Literal[
    "unknown", "openai_python", "llama_index", "dify", "open_webui", "undici", "tabby", "anthropic"
]  # fmt: skip
Form = Literal["comment", "empty_delta", "no_choices", "ping", "status_event", "status_done", "newline"]

MS: Final = 1_000_000
NEVER: Final = 1 << 62  # an instant after all others
HEARTBEAT_MS: Final = 10_000
LEAST_MS: Final = 500  # between two beats, whatever read timeout a caller claims
CHUNK_MS: Final = 60_000  # half of the one known parsed-content timer, 120 s
BUSY_MS: Final = 1000  # until asking again when a beat is due and none may be written

# Longest time to the first beat of a stream. undici gives up after 300 s without headers, LlamaIndex after 60 s;
# Claude Code's users take a silent minute for a hang (client-contract §8, §12, §13).
_STREAM_FIRST_MS: Final[dict[ClientKind, int]] = {"llama_index": 20_000, "undici": 200_000, "anthropic": 10_000}
# First newline of a plain answer. Those that are missing here wait without a limit, or refuse long calls.
_PLAIN_FIRST_MS: Final[dict[ClientKind, int]] = {
    "unknown": 45_000, "openai_python": 45_000, "llama_index": 30_000, "dify": 200_000, "undici": 200_000,
}  # fmt: skip
_PLAIN_EVERY_MS: Final = 15_000
# Limits outside the SDK that announces its own read timeout: half of that may be too late.
_PLAIN_BOUND_MS: Final[dict[ClientKind, int]] = {"undici": 200_000, "llama_index": 30_000, "dify": 200_000}
_UNDICI: Final = (b"OpenAI/JS", b"ai-sdk", b"langchainjs", b"RooCode/")


@dataclass(frozen=True, slots=True)
class Beat:
    """`first_ms` after the request's arrival, then once in `every_ms` of silence."""

    first_ms: int
    every_ms: int
    form: Form


@dataclass(frozen=True, slots=True)
class Plan:
    """What one caller hears. `quiet` keeps byte timers calm, the chunks those that count parsed content."""

    quiet: Beat | None = None
    before_token: Beat | None = None
    in_reasoning: Beat | None = None
    has_status: bool = False


SILENT: Final = Plan()


# Who is it?


def client_kind(headers: Headers, api: Api) -> ClientKind:
    """The program that calls, by what it sends (client-contract §9); names in lower case."""
    if api == "anthropic":
        return "anthropic"
    sent = dict(headers)
    agent = sent.get(b"user-agent", b"")
    language = sent.get(b"x-stainless-lang", b"")
    if any(name.startswith(b"x-openwebui-") for name in sent):
        return "open_webui"
    if b"OpenAI/Python" in agent or language == b"python":
        return "llama_index" if sent.get(b"x-stainless-read-timeout") == b"60.0" else "openai_python"
    if language == b"js" or agent in (b"node", b"undici") or any(mark in agent for mark in _UNDICI):
        return "undici"
    if agent.startswith(b"python-requests/") and sent.get(b"accept-charset", b"").lower() == b"utf-8":
        return "dify"
    if not agent and sent.get(b"openai-beta") == b"assistants=v2":
        return "tabby"
    return "unknown"


# What does it hear?


def earliest_ms(*, is_stream: bool, read_timeout_ms: int | None, ttft_ms: int | None, heartbeat_ms: int) -> int:
    """Before this no caller's first beat is due: the time to find out who it is and to make its `plan`."""
    if is_stream:
        first = min(ttft_ms or heartbeat_ms, *_STREAM_FIRST_MS.values())
    else:
        first = min(_PLAIN_FIRST_MS.values())
    return min(first, _half(read_timeout_ms) or first)


def plan(
    kind: ClientKind,
    *,
    request: Kind,
    is_stream: bool,
    read_timeout_ms: int | None = None,
    include_usage: bool = False,
    ttft_ms: int | None = None,
    heartbeat_ms: int = HEARTBEAT_MS,
) -> Plan:
    """The row of client-contract §13 for one request.

    `read_timeout_ms`: what the caller's library bears (`policy.limits`); half of it moves the first newline, and
    shortens a stream's figures. `include_usage`: as the caller asked, not as we send it. `ttft_ms`, `heartbeat_ms`: the
    route's budget and interval.
    """
    half = _half(read_timeout_ms)
    if not is_stream:
        return _plain(kind, half) if request != "opaque" else SILENT  # speech is no JSON
    if request not in GENERATING:
        return SILENT
    first = min(ttft_ms or heartbeat_ms, _STREAM_FIRST_MS.get(kind, NEVER), half or NEVER)
    every = min(heartbeat_ms, half or NEVER)
    if request == "messages":
        return Plan(Beat(first, every, "ping"))
    quiet = Beat(first, every, "comment")
    if request == "responses":  # its events have names and an order; a chunk of another API is none of them
        return Plan(quiet)
    if kind not in ("unknown", "openai_python"):
        return Plan(quiet, has_status=kind == "open_webui")
    return Plan(
        quiet,
        before_token=Beat(max(first, CHUNK_MS), CHUNK_MS, "empty_delta"),
        in_reasoning=Beat(CHUNK_MS, CHUNK_MS, "no_choices") if include_usage else None,
    )


def _plain(kind: ClientKind, half: int | None) -> Plan:
    first = _PLAIN_FIRST_MS.get(kind)
    if first is None:
        return SILENT
    first = min(half or first, _PLAIN_BOUND_MS.get(kind, NEVER))
    return Plan(Beat(first, min(_PLAIN_EVERY_MS, half or NEVER), "newline"))


def _half(read_timeout_ms: int | None) -> int | None:
    return None if read_timeout_ms is None else max(LEAST_MS, read_timeout_ms // 2)


# When is it due?


class BeatClock:
    """One waiting request's beats: what is due, and when to ask again. Instants in monotonic ns, 0 = not yet."""

    __slots__ = ("_last_chunk", "_plan", "_status")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._last_chunk = 0
        self._status: Literal["untold", "open", "done"] = "untold" if plan.has_status else "done"

    def __repr__(self) -> str:
        return f"<BeatClock {self._plan}, status {self._status}>"

    @property
    def owes_status_done(self) -> bool:
        """Open WebUI still shows that the model is waited for; whatever comes next must take that back."""
        return self._status == "open"

    def due(
        self,
        received: int,
        now: int,
        *,
        last_write: int = 0,
        last_event: int = 0,
        token: int = 0,
        visible: int = 0,
        can_beat: bool = True,
    ) -> tuple[Form | None, int]:
        """(what to write, when to ask again). It must be written and told to `wrote` before asking again.

        `last_write`: towards the caller, beats included; `last_event`: of the upstream's that went out, a role chunk
        included; `can_beat`: something may be written now, between two events.
        """
        soonest, form = NEVER, None
        for limit, candidate in self._limits(received, last_write, last_event, token, visible):
            if limit <= now:
                form = candidate
                break
            soonest = min(soonest, limit)
        if form is None:
            return None, soonest
        return (form, now) if can_beat else (None, now + BUSY_MS * MS)

    def wrote(self, form: Form, now: int) -> None:
        """This beat went out. The caller keeps `last_write` itself."""
        if form in ("empty_delta", "no_choices", "status_event", "status_done"):
            self._last_chunk = now
        if form == "status_event":
            self._status = "open"
        elif form == "status_done":
            self._status = "done"

    def _limits(
        self, received: int, last_write: int, last_event: int, token: int, visible: int
    ) -> list[tuple[int, Form]]:
        """When each form is due; of several that are due the first one goes out, and serves for the others."""
        plan, quiet = self._plan, self._plan.quiet
        if quiet is None or (quiet.form == "newline" and token):  # no newline inside a JSON text
            return []
        first = received + quiet.first_ms * MS
        limits: list[tuple[int, Form]] = []
        if self._status == "open" and token:
            limits.append((token, "status_done"))
        elif self._status == "untold" and not token:
            limits.append((first, "status_event"))
        parsed = max(self._last_chunk, last_event, token)
        beat = plan.before_token if not token else plan.in_reasoning if not visible else None
        if beat is not None:
            limits.append((max(received + beat.first_ms * MS, parsed + beat.every_ms * MS), beat.form))
        limits.append((last_write + quiet.every_ms * MS if last_write else first, quiet.form))
        return limits


# How does it look?


def beat_bytes(
    form: Form,
    *,
    request: Kind = "chat",
    model: str = "",
    estimation_ms: int | None = None,
    answer_id: str = "",
    created: int = 0,
) -> bytes:
    """One beat as it goes out. `estimation_ms`: time to the first token as far as is known; `created`: seconds since
    1970; `answer_id`, `model`: of the answer, or what stands for them until it comes."""
    if form == "newline":
        return b"\n"
    if form == "ping":
        return b'event: ping\ndata: {"type": "ping"}\n\n'
    estimate = None if estimation_ms is None else max(0, estimation_ms)
    if form == "comment":  # never begins with `ping`: Continue takes that for an end mark
        return b": keep-alive\n\n" if estimate is None else b": keep-alive estimation_ms=%d\n\n" % estimate
    chunk: dict[str, object] = {
        "id": _encodable(answer_id),
        "object": "text_completion" if request == "completions" else "chat.completion.chunk",
        "created": created,
        "model": _encodable(model),
        "choices": [],
    }
    if form == "empty_delta":
        choice: dict[str, object] = {"text": ""} if request == "completions" else {"delta": {}}
        chunk["choices"] = [{"index": 0, **choice, "logprobs": None, "finish_reason": None}]
    elif form != "no_choices":
        chunk["event"] = {"type": "status", "data": _status(estimate, is_done=form == "status_done")}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _status(estimate_ms: int | None, *, is_done: bool) -> dict[str, object]:
    if is_done:
        text = "The model is answering"
    elif estimate_ms is None:
        text = "Waiting for the model"
    else:
        text = f"Waiting for the model, about {-(-estimate_ms // 1000)} s"
    return {"description": text, "done": is_done}


def _encodable(text: str) -> str:
    """Half a surrogate pair in a name that the caller sent must not cost the answer (C048, C109)."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")

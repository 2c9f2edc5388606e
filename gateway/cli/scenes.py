"""What `firsttoken demo` plays: a simulated model server, the gateway in front of it, and eight calls through both.

One process and real sockets on loopback. The times and token counts of a call are the gateway's own account of it,
the record that otherwise becomes its log line; the caller adds the heartbeats it saw and the text it got. The last
call has a crowd around it, whose calls are no scenes: some teach the gateway what the server takes for a prompt, as a
working day would have, and some stand before it in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import orjson

from gateway.cli import CommandError
from gateway.cli.caller import Answer, post
from gateway.cli.comeback import Comeback, come_back
from gateway.cli.phrases import Language
from gateway.cli.stage import BUDGET_MS, Stage, staged
from gateway.sim.profiles import DEMO

SceneName = Literal["thinking", "off", "burnt", "rescued", "cold", "queued", "repeated", "pending"]

SMALL_BUDGET: Final = 64  # tokens; what a caller who never heard of thinking takes for plenty
DOCUMENT_TOKENS: Final = 40_000  # of the simulated tokenizer; half a second of prefill
BEHIND_S: Final = 0.1  # the second caller comes so long after the first
CROWD: Final = 3  # callers with documents of their own, before the one that comes back
LESSON_TOKENS: Final = (200, 1_000, 6_000)  # prompts of several sizes: one size would not tell what a token takes
LESSONS: Final = 24  # first tokens; estimates are made from a fitted line after twenty
APART: Final = 100_000  # between the numbers of notes in two documents: they begin differently, none is cached
LIMIT_S: Final = 60.0  # for all of it; four times what it should take

_QUESTIONS: Final[dict[Language, str]] = {
    "en": "In thirty characters: where does the time go?",
    "zh": "用三十个字说明：时间花在哪里？",
}
_SENTENCES: Final[dict[Language, tuple[str, int]]] = {  # with the number of tokens they come to
    "en": ("Note {}: the first token waits for three things, and each of them can be measured. ", 20),
    "zh": ("第{}条：首个词元要等三件事，每一件都可以测量。", 17),
}


@dataclass(frozen=True, slots=True)
class Scene:
    """One call: to which route, with which prompt, and how."""

    name: SceneName
    prefix: str
    is_long: bool = False  # the document, else the question
    max_tokens: int | None = None
    is_stream: bool = True
    delay_s: float = 0.0
    comes_back: bool = False  # takes 202 for an answer, behind a crowd


ACTS: Final[tuple[tuple[Scene, ...], ...]] = (  # one after the other; the calls of an act overlap
    (Scene("thinking", ""),),
    (Scene("off", "/fast"),),
    (Scene("burnt", "", max_tokens=SMALL_BUDGET),),
    (Scene("rescued", "/rescue", max_tokens=SMALL_BUDGET, is_stream=False),),
    (Scene("cold", "/fresh"), Scene("queued", "/fresh", is_long=True, delay_s=BEHIND_S)),
    (Scene("repeated", "/fresh", is_long=True),),
    (Scene("pending", "/fast", is_long=True, delay_s=BEHIND_S, comes_back=True),),
)
STEPS: Final = len(ACTS)


@dataclass(frozen=True, slots=True)
class Take:
    """How a scene went. `record` is the gateway's account; see `Account.close` for its fields."""

    name: SceneName
    record: dict[str, object]
    heartbeats: int
    answer: str
    comeback: Comeback | None = None


async def play(
    speed: float, language: Language, on_step: Callable[[int], None], acts: Sequence[tuple[Scene, ...]] = ACTS
) -> list[Take]:
    """All scenes, in their order. `on_step` is told the number of each act, from 0, before it is played.

    Raises CommandError for a call that did not come out, OSError when no socket can be opened.
    """
    takes: list[Take] = []
    try:
        async with asyncio.timeout(LIMIT_S), staged(speed) as stage:
            for number, act in enumerate(acts):
                on_step(number)
                async with asyncio.TaskGroup() as group:
                    calls = [group.create_task(_scene(stage, scene, speed, language)) for scene in act]
                takes += [call.result() for call in calls]
    except TimeoutError:
        raise CommandError("the demo took too long", "is this machine very busy? Try again later") from None
    except BaseExceptionGroup as group:
        raise _first_of(group) from None
    return takes


async def _scene(stage: Stage, scene: Scene, speed: float, language: Language) -> Take:
    if not scene.comes_back:
        return await _call(stage, scene, speed, language)
    lessons = [LESSON_TOKENS[number % len(LESSON_TOKENS)] for number in range(LESSONS)]
    await _crowd(stage, lessons, 1, language)
    async with asyncio.TaskGroup() as group:
        group.create_task(_crowd(stage, [DOCUMENT_TOKENS] * CROWD, 1 + LESSONS, language))
        call = group.create_task(_call(stage, scene, speed, language))
    return call.result()


async def _call(stage: Stage, scene: Scene, speed: float, language: Language) -> Take:
    """Plays one scene. Raises CommandError when the answer is not one."""
    request_id = f"demo-{scene.name}"
    path, body = f"{scene.prefix}/v1/chat/completions", _body(scene, language)
    await asyncio.sleep(scene.delay_s / speed)
    comeback: Comeback | None = None
    if scene.comes_back:
        answer, comeback = await come_back(stage.port, path, body, request_id, round(BUDGET_MS / 1000 / speed, 3))
    else:
        answer = await post(stage.port, path, body, {"x-request-id": request_id})
    record = await stage.ledger.record(request_id)
    if answer.status != 200 or record.get("outcome") not in ("complete", "pending_done"):
        why = record.get("reason") or record.get("outcome")
        raise CommandError(f"the call `{scene.name}` ended with status {answer.status or 'none'} ({why})")
    return Take(scene.name, record, answer.heartbeats(), answer.text(), comeback)


async def _crowd(stage: Stage, sizes: Sequence[int], first: int, language: Language) -> None:
    """Calls at the same time, each with a document of so many tokens; `first` numbers the documents.

    What they are answered is of no interest: a crowd that is one smaller is a crowd.
    """

    async def call(number: int, tokens: int) -> Answer:
        body = _json(document(language, number * APART, tokens), is_stream=True)
        return await post(stage.port, "/fast/v1/chat/completions", body, {"x-request-id": f"demo-crowd-{number}"})

    async with asyncio.TaskGroup() as group:
        for number, tokens in enumerate(sizes, first):
            group.create_task(call(number, tokens))


def _body(scene: Scene, language: Language) -> bytes:
    prompt = document(language) if scene.is_long else _QUESTIONS[language]
    return _json(prompt, scene.max_tokens, is_stream=scene.is_stream)


def _json(prompt: str, max_tokens: int | None = None, *, is_stream: bool) -> bytes:
    body: dict[str, object] = {"model": DEMO.models[0], "messages": [{"role": "user", "content": prompt}]}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    return orjson.dumps({**body, "stream": is_stream})


def document(language: Language, first: int = 0, tokens: int = DOCUMENT_TOKENS) -> str:
    """A long prompt of about so many tokens, whose notes are numbered from `first`."""
    sentence, each = _SENTENCES[language]
    return "".join(sentence.format(number) for number in range(first, first + tokens // each))


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a task group: what went wrong, not how many tasks it took down."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first

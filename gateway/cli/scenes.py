"""What `firsttoken demo` plays: a simulated model server, the gateway in front of it, and seven calls through both.

One process and real sockets on loopback. The times and token counts of a call are the gateway's own account of it,
the record that otherwise becomes its log line; the caller adds the heartbeats it saw and the text it got.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal

import httptools
import orjson

from gateway.app import Gateway
from gateway.cli import CommandError
from gateway.cli.phrases import Language
from gateway.configfile import from_mapping
from gateway.lifecycle import GatewayServer, listening_socket
from gateway.sim.profiles import DEMO, Profile
from gateway.sim.transport import serve

SceneName = Literal["thinking", "off", "burnt", "rescued", "cold", "queued", "repeated"]

HOST: Final = "127.0.0.1"
SMALL_BUDGET: Final = 64  # tokens; what a caller who never heard of thinking takes for plenty
DOCUMENT_TOKENS: Final = 40_000  # of the simulated tokenizer; half a second of prefill
COMPILE_S: Final = 2.5  # of the first call after a start; real servers take a minute and more
BEHIND_S: Final = 0.1  # the second caller comes so long after the first
BUDGET_MS: Final = 500
LEAST_HEARTBEAT_MS: Final = 50  # what the settings take
LIMIT_S: Final = 60.0  # for all of it; four times what it should take
ACCOUNT_LIMIT_S: Final = 5.0  # from the end of an answer to its record

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


ACTS: Final[tuple[tuple[Scene, ...], ...]] = (  # one after the other; the calls of an act overlap
    (Scene("thinking", ""),),
    (Scene("off", "/fast"),),
    (Scene("burnt", "", max_tokens=SMALL_BUDGET),),
    (Scene("rescued", "/rescue", max_tokens=SMALL_BUDGET, is_stream=False),),
    (Scene("cold", "/fresh"), Scene("queued", "/fresh", is_long=True, delay_s=BEHIND_S)),
    (Scene("repeated", "/fresh", is_long=True),),
)
STEPS: Final = len(ACTS)


@dataclass(frozen=True, slots=True)
class Take:
    """How a scene went. `record` is the gateway's account; see `Account.close` for its fields."""

    name: SceneName
    record: dict[str, object]
    heartbeats: int
    answer: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A gateway that serves."""

    port: int
    ledger: Ledger


class Ledger:
    """Takes the records of finished requests, and hands them out by request id."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, object]] = {}
        self._came = asyncio.Event()

    def write(self, record: dict[str, object]) -> None:
        self._records[str(record.get("request_id"))] = record
        self._came.set()

    async def record(self, request_id: str) -> dict[str, object]:
        """The record of a request, once it is there. Raises CommandError when it does not come."""
        try:
            async with asyncio.timeout(ACCOUNT_LIMIT_S):
                while request_id not in self._records:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            raise CommandError(f"the gateway has no account of the call `{request_id}`") from None
        return self._records[request_id]


async def play(speed: float, language: Language, on_step: Callable[[int], None]) -> list[Take]:
    """All scenes, in their order. `on_step` is told the number of each act, from 0, before it is played.

    Raises CommandError for a call that did not come out, OSError when no socket can be opened.
    """
    takes: list[Take] = []
    try:
        async with asyncio.timeout(LIMIT_S), _stage(speed) as stage:
            for number, act in enumerate(ACTS):
                on_step(number)
                async with asyncio.TaskGroup() as group:
                    calls = [group.create_task(_call(stage, scene, speed, language)) for scene in act]
                takes += [call.result() for call in calls]
    except TimeoutError:
        raise CommandError("the demo took too long", "is this machine very busy? Try again later") from None
    except BaseExceptionGroup as group:
        raise _first_of(group) from None
    return takes


def profiles(speed: float) -> tuple[Profile, Profile]:
    """The model server, and the same one as it is right after a start. Raises ValueError for a speed that is none."""
    warm = DEMO.scaled(speed)
    return warm, dataclasses.replace(warm, jit_first_call_s=COMPILE_S / speed)


def settings_for(model_url: str, fresh_url: str, speed: float) -> dict[str, object]:
    """The gateway's configuration; the advice of the story shows parts of it with everyday values."""
    heartbeat_ms = max(LEAST_HEARTBEAT_MS, round(BUDGET_MS / speed))
    budget = {"ttft_ms": max(1, round(BUDGET_MS / speed)), "on_exceed": "heartbeat", "heartbeat_ms": heartbeat_ms}
    fresh = {"upstreams": "fresh", "thinking": "off", "budget": budget}
    urls = {"model": model_url, "fresh": fresh_url}
    return {
        "listen": {"host": HOST, "port": 0, "drain_timeout_s": 1},
        # The engine is named: the first call comes before the gateway's own question for it was answered.
        "upstreams": {name: {"url": url, "engine": "vllm"} for name, url in urls.items()},
        "routes": [
            {"name": "fast", "match": {"prefix": "/fast"}, "upstreams": "model", "thinking": "off"},
            {"name": "rescue", "match": {"prefix": "/rescue"}, "upstreams": "model", "rescue": True},
            {"name": "fresh", "match": {"prefix": "/fresh"}, **fresh},
            {"name": "default", "upstreams": "model"},
        ],
    }


@asynccontextmanager
async def _stage(speed: float) -> AsyncIterator[Stage]:
    """Two simulated servers and the gateway on free ports, while the block runs."""
    async with AsyncExitStack() as stack:
        urls = []
        for profile in profiles(speed):
            server = await serve(profile, HOST, 0)
            stack.push_async_callback(server.close)
            urls.append(server.url)
        ledger = Ledger()
        gateway = Gateway(from_mapping(settings_for(urls[0], urls[1], speed)), write_log=ledger.write)
        port = await stack.enter_async_context(_served(gateway))
        yield Stage(port, ledger)


@asynccontextmanager
async def _served(gateway: Gateway) -> AsyncIterator[int]:
    """The gateway's own server on a free port. Not `Server.serve`, which would take Ctrl-C for a wish to drain."""
    server = GatewayServer(gateway)
    sock = listening_socket(HOST, 0)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([sock])
    if not server.started:
        sock.close()
        raise CommandError("the gateway did not start")
    ticking = asyncio.get_running_loop().create_task(server.main_loop(), name="demo gateway")
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        await server.shutdown([sock])


async def _call(stage: Stage, scene: Scene, speed: float, language: Language) -> Take:
    """Plays one scene. Raises CommandError when the answer is not one."""
    request_id = f"demo-{scene.name}"
    body = _body(scene, language)
    await asyncio.sleep(scene.delay_s / speed)
    answer = await _ask(stage.port, f"{scene.prefix}/v1/chat/completions", body, request_id)
    record = await stage.ledger.record(request_id)
    if answer.status != 200 or record.get("outcome") != "complete":
        why = record.get("reason") or record.get("outcome")
        raise CommandError(f"the call `{scene.name}` ended with status {answer.status or 'none'} ({why})")
    return Take(scene.name, record, answer.heartbeats(), answer.text())


def _body(scene: Scene, language: Language) -> bytes:
    prompt = document(language) if scene.is_long else _QUESTIONS[language]
    body: dict[str, object] = {"model": DEMO.models[0], "messages": [{"role": "user", "content": prompt}]}
    if scene.max_tokens is not None:
        body["max_tokens"] = scene.max_tokens
    return orjson.dumps({**body, "stream": scene.is_stream})


def document(language: Language) -> str:
    """A long prompt of about `DOCUMENT_TOKENS` tokens."""
    sentence, tokens = _SENTENCES[language]
    return "".join(sentence.format(number) for number in range(DOCUMENT_TOKENS // tokens))


# -- the caller ----------------------------------------------------------------------------------------------------


class _Answer:
    """One response as its caller gets it; the methods in the middle are httptools' callbacks."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.is_complete = False
        self._pieces: list[bytes] = []

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def heartbeats(self) -> int:
        """Comment blocks of a stream."""
        return sum(line.startswith(b":") for line in b"".join(self._pieces).split(b"\n"))

    def text(self) -> str:
        """What a reader of the answer sees."""
        body = b"".join(self._pieces)
        if body.startswith(b"{"):
            return _content(orjson.loads(body), "message")
        data = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: {"))
        return "".join(_content(orjson.loads(event), "delta") for event in data).strip()


def _content(payload: object, key: str) -> str:
    choices = payload.get("choices") if isinstance(payload, dict) else None
    part = choices[0].get(key) if isinstance(choices, list) and choices else None
    content = part.get("content") if isinstance(part, dict) else None
    return content if isinstance(content, str) else ""


async def _ask(port: int, path: str, body: bytes, request_id: str) -> _Answer:
    """One request on a connection of its own."""
    answer = _Answer()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\nx-request-id: {request_id}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        while not answer.is_complete and (data := await reader.read(65536)):
            answer.parser.feed_data(data)
    finally:
        writer.close()
    return answer


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a task group: what went wrong, not how many tasks it took down."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first

"""Which path answers what: the model server itself, without a wire."""

from __future__ import annotations

import asyncio
import base64
import random
import struct
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import orjson

from gateway.sim import refusals, text
from gateway.sim.answers import Answer, Identity, make_answer
from gateway.sim.engine import Engine, Job, QueueFull, Run
from gateway.sim.intake import Api, Ask, content_text, read_ask, read_json, render, served_model
from gateway.sim.plan import Switches, thinking_of
from gateway.sim.refusals import Refusal
from gateway.sim.stats import render_llamacpp, render_vllm
from gateway.sim.steps import EVENT_STREAM, End, Head, Header, Steps, plain

METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"
GENERATING: Mapping[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # --api-key guards only these
EMBEDDING_SIZE = 16


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it arrived. Header names are lower case.

    `arrived_at` is the loop's time of its last byte, `connection` the number of its connection, from 1.
    """

    method: str
    path: str
    query: str
    headers: tuple[Header, ...]
    body: bytes
    keep_alive: bool = True
    version: str = "1.1"
    arrived_at: float = 0.0
    connection: int = 0

    def header(self, name: bytes) -> str | None:
        """The first value of a header, or None."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)


class Application:
    """Answers requests for one engine. `seed` makes ids and words repeatable."""

    def __init__(self, engine: Engine, *, api_key: str | None = None, seed: int = 0) -> None:
        self.engine, self.api_key, self.seed = engine, api_key, seed
        self._rng = random.Random(seed)
        self._gets: dict[str, Callable[[], Steps]] = {
            "/health": lambda: plain(200, b"") if engine.profile.engine == "vllm" else plain(200, b'{"status":"ok"}'),
            "/ping": lambda: plain(200, b""),
            "/version": lambda: plain(200, orjson.dumps({"version": engine.profile.version})),
            "/load": lambda: plain(200, b'{"server_load":0}'),
            "/metrics": lambda: plain(200, self._metrics(), METRICS_TYPE),
            "/v1/models": lambda: plain(200, self._models()),
        }
        self._posts: dict[str, Callable[[Mapping[str, object]], object]] = {
            "/tokenize": self._tokenize,
            "/v1/messages/count_tokens": self._count_tokens,
            **({"/v1/embeddings": self._embeddings} if engine.profile.embeddings else {}),
        }

    def is_inference(self, request: Request) -> bool:
        """Whether the request asks for work; faults are played on these only."""
        return request.path in GENERATING or request.path in self._posts

    def respond(self, request: Request) -> Steps:
        """The steps of the answer; never raises before the first step."""
        path = request.path
        if self.api_key and path.startswith(GUARDED) and request.method != "OPTIONS" and not self._authorized(request):
            return plain(401, refusals.UNAUTHORIZED)
        allowed = "GET" if path in self._gets else "POST" if path in GENERATING or path in self._posts else None
        if allowed is None:
            return plain(404, refusals.NOT_FOUND)
        if request.method != allowed:
            return plain(405, refusals.METHOD_NOT_ALLOWED, headers=((b"allow", allowed.encode()),))
        if allowed == "GET":
            return self._gets[path]()
        return self._posted(request)

    def handler_name(self, path: str) -> str:
        """The label of `http_requests_total`."""
        return path if path in self._gets or path in self._posts or path in GENERATING else "none"

    def _authorized(self, request: Request) -> bool:
        return request.header(b"authorization") == f"Bearer {self.api_key}"

    async def _posted(self, request: Request) -> Steps:
        profile = self.engine.profile
        try:
            body = read_json(request.header(b"content-type") or "", request.body)
            api = GENERATING.get(request.path)
            if api is None:
                served_model(profile, body.get("model"))
                steps = plain(200, orjson.dumps(self._posts[request.path](body)))
            else:
                ask = read_ask(profile, api, body, self.seed)
                if profile.render_s:
                    await asyncio.sleep(profile.render_s)
                steps = self._generate(request, ask)
            async with aclosing(steps):
                async for step in steps:
                    yield step
        except Refusal as refusal:
            async for step in self._refused(refusal, request):
                yield step

    def _refused(self, refusal: Refusal, request: Request) -> Steps:
        headers = ((b"retry-after", refusal.retry_after.encode()),) if refusal.retry_after else ()
        body = refusal.body(self.engine.profile.engine, anthropic=request.path.startswith("/v1/messages"))
        return plain(refusal.status, body, headers=headers)

    async def _generate(self, request: Request, ask: Ask) -> Steps:
        given = request.header(b"x-request-id") or ask.body.get("request_id")
        identity = Identity(self._rng, given if isinstance(given, str) else None)
        answer = make_answer(self.engine.profile, ask, identity)
        extra = ((b"x-request-id", identity.request_id.encode()),) if self.engine.profile.request_id_headers else ()
        try:
            run = self.engine.submit(Job(ask.prompt, ask.plans, ask.max_tokens, ask.salt))
        except QueueFull:
            raise refusals.queue_full() from None
        with run:
            steps = self._stream(run, answer, extra) if ask.stream else self._whole(run, answer, extra)
            async with aclosing(steps):
                async for step in steps:
                    yield step

    async def _stream(self, run: Run, answer: Answer, extra: tuple[Header, ...]) -> Steps:
        head = Head(200, ((b"content-type", EVENT_STREAM), *extra))
        if self.engine.profile.early_headers:
            yield head
        for event in answer.opening():
            yield event
        async for comment in self._comments(run):
            yield comment
        if not self.engine.profile.early_headers:
            yield head
        for event in answer.first(run):
            yield event
        async with aclosing(run.tokens()) as tokens:
            async for token in tokens:
                for event in answer.token(token, run):
                    yield event
        for event in answer.closing(run):
            yield event
        yield End()

    async def _comments(self, run: Run) -> AsyncGenerator[bytes, None]:
        """Waits for the first token, with a comment after each idle interval where the server is set up so."""
        interval = self.engine.profile.comment_interval_s
        while interval:
            try:
                async with asyncio.timeout(interval):
                    await run.first_token()
                    return
            except TimeoutError:
                yield b": keep-alive\n\n"
        await run.first_token()

    async def _whole(self, run: Run, answer: Answer, extra: tuple[Header, ...]) -> Steps:
        async with aclosing(run.tokens()) as tokens:
            async for _ in tokens:
                pass
        async for step in plain(200, answer.whole(run), headers=extra):
            yield step

    def _metrics(self) -> bytes:
        engine = self.engine
        if engine.profile.engine == "llamacpp":
            return render_llamacpp(engine.stats, engine.gauges())
        return render_vllm(engine.stats, engine.gauges(), engine.profile.models[0])

    def _models(self) -> bytes:
        profile, identity = self.engine.profile, Identity(self._rng)
        entry = {"object": "model", "created": identity.created, "owned_by": profile.engine, "parent": None}
        permission = {"id": f"modelperm-{identity.hex()}", "object": "model_permission", "created": identity.created}
        data = [
            {"id": name, **entry, "root": name, "max_model_len": profile.max_model_len, "permission": [permission]}
            for name in profile.models
        ]
        return orjson.dumps({"object": "list", "data": data})

    def _tokenize(self, body: Mapping[str, object]) -> object:
        profile = self.engine.profile
        if "messages" in body:
            kwargs = body.get("chat_template_kwargs")
            switches = Switches(kwargs if isinstance(kwargs, Mapping) else {})
            prompt = render(profile, "chat", body, thinking_of(profile, switches)[0])
        else:
            prompt = content_text(body.get("prompt"))
        pieces = text.tokenize(prompt)
        numbers = [zlib.crc32(piece.encode("utf-8", "surrogatepass")) % 100_000 for piece in pieces]
        shown = pieces if body.get("return_token_strs") else None
        return {"count": len(pieces), "max_model_len": profile.max_model_len, "tokens": numbers, "token_strs": shown}

    def _count_tokens(self, body: Mapping[str, object]) -> object:
        prompt = render(self.engine.profile, "messages", body, self.engine.profile.thinking)
        return {"input_tokens": len(text.tokenize(prompt))}

    def _embeddings(self, body: Mapping[str, object]) -> object:
        given = body.get("input")
        inputs = given if isinstance(given, list) else [given]
        wide = body.get("dimensions")
        size = wide if isinstance(wide, int) else EMBEDDING_SIZE
        data = []
        for index, item in enumerate(inputs):
            rng = random.Random(f"{self.seed}/{item}")
            vector: object = [round(rng.uniform(-1, 1), 6) for _ in range(size)]
            if body.get("encoding_format") == "base64":
                packed = struct.pack(f"<{size}f", *vector)  # type: ignore[misc]
                vector = base64.b64encode(packed).decode()
            data.append({"object": "embedding", "index": index, "embedding": vector})
        tokens = sum(len(text.tokenize(str(item))) for item in inputs)
        identity = Identity(self._rng)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        head = {"id": f"embd-{identity.hex()}", "object": "list", "created": identity.created}
        return {**head, "model": served_model(self.engine.profile, body.get("model")), "data": data, "usage": usage}

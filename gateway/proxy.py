"""The story of a request, in the order in which it happens.

    accept → read → match → admit → clean and shape → pick → send → wait and relay → account

Control paths never come here. Every error is raised as a `GatewayError` and caught in one place, `handle`; every
request is accounted once, last. Choosing happens in plain functions of `policy`; this file acts on their choices.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Literal

from gateway.catalogue import answer_models
from gateway.complaints import our_fault, outcome_of
from gateway.errors import (
    GatewayError,
    MethodNotAllowed,
    NoRoute,
    Overloaded,
    RouteForbidden,
    Unauthorized,
    UpstreamUnavailable,
    body_of,
    headers_of,
)
from gateway.exchange import ClientGone, Exchange, Room, Share
from gateway.policy.balance import Candidate, order
from gateway.policy.routes import canonical_hint, may_use, normalise_path
from gateway.reply import Reply, known_fields
from gateway.sending import Prepared, Sender
from gateway.wire.body import DECISIVE, RequestBody, read_object
from gateway.wire.headers import as_json, for_upstream, label_value
from gateway.wire.kinds import Kind, kind_of
from gateway.wire.opaque import model_in, readable
from gateway.wire.thinking import strip_nothinking

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.account import Account
    from gateway.config import Key, Route
    from gateway.exchange import Call
    from gateway.relay import Relay
    from gateway.runtime import RouteState, Runtime
    from gateway.upstream.state import UpstreamState
    from gateway.upstream.watch import Watch

log = logging.getLogger("gateway.proxy")

JSON_KINDS: frozenset[Kind] = frozenset(("chat", "completions", "responses", "messages", "embeddings"))
STREAM_KINDS: frozenset[Kind] = frozenset(("chat", "completions", "responses", "messages"))


class Proxy:
    """Serves data-plane requests. Holds no state of a request."""

    def __init__(self, runtime: Runtime, account: Account, watch: Watch, clock: Callable[[], int]) -> None:
        self.runtime = runtime
        self._account = account
        self._watch = watch
        self._clock = clock
        self._sender = Sender(account, clock)
        self._room = Room()
        self.running = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes of request bodies that are held now."""
        return self._room.held

    async def handle(self, call: Call) -> None:
        """One request, from its head to its account. Never raises but for the cancellation of its task from outside."""
        x = Exchange(call)
        leaving = Leaving(call)
        self.running += 1
        try:
            await self._serve(x, call, leaving)
        except ClientGone:
            x.settle("client_cancelled")
        except GatewayError as error:
            self._refuse(x, call, error)
        except asyncio.CancelledError:
            if not call.is_gone:
                self._refuse(x, call, _draining(), leaving.relay)
                raise
            x.settle("client_cancelled")
        except Exception as error:
            log.exception("internal error in request %s", x.request_id, exc_info=error)
            self._refuse(x, call, our_fault(), leaving.relay)
        finally:
            self.running -= 1
            call.watch(None)
            self._book(x)

    async def _serve(self, x: Exchange, call: Call, leaving: Leaving) -> None:
        runtime = self.runtime
        if runtime.cors is not None and runtime.cors.answer(x, call):
            return
        path = self._accept(x, call, runtime)
        key = self._identify(x, call, runtime)
        if endpoint_of(path) == "models":
            await answer_models(x, call, runtime, self._watch, key, path)
            return
        share = Share(self._room, runtime.settings.listen.max_buffered_bytes)
        try:
            raw = await self._read(x, call, runtime, share)
            call.watch(leaving)
            body = self._understand(x, raw)
            route, rest = self._match(x, call, path, runtime)
            self._admit(key, route)
            is_read = body is not None
            sent = body.raw if body is not None else raw  # without a byte-order mark
            headers = for_upstream(call.headers)
            if x.kind in JSON_KINDS:
                headers = as_json(headers)
            prepared = Prepared(route, rest, sent, body, headers, call, share, is_read)
            del raw, body, sent
            reply = await self._try_upstreams(x, prepared, leaving)
        finally:
            share.give_back()
        if reply is not None:
            reply.send(x, call, self._clock())

    # accept

    def _accept(self, x: Exchange, call: Call, runtime: Runtime) -> str:
        """The path as routes know it, with the kind of endpoint noted. Nothing was read yet."""
        path = normalise_path(call.path) or _path_of_model(call.path)
        endpoint = endpoint_of(path) if path is not None else None
        if path is None or (endpoint is None and not _is_open(path, runtime)):
            raise _no_such_path(call.path)
        x.kind = kind_below(path) or "opaque"
        if x.kind == "messages" or path.endswith("/v1/messages/count_tokens"):
            x.api = "anthropic"
        allowed = _METHODS.get(endpoint, ("POST",))
        if call.method not in allowed:
            raise MethodNotAllowed(
                f"{call.method} is not served here; use {allowed[-1]}.", headers={"allow": ", ".join(allowed)}
            )
        return path

    def _identify(self, x: Exchange, call: Call, runtime: Runtime) -> Key | None:
        """Whose request it is, before its body is read. None when no keys are configured."""
        if not runtime.settings.keys:
            return None
        key = runtime.keys.find(call.headers)
        if key is None:
            raise Unauthorized(
                "This key is not known here, or none was sent. Send one of this gateway's keys as "
                "`Authorization: Bearer KEY`.",
                headers={"www-authenticate": "Bearer"},
                should_retry=False,
            )
        x.key_name = key.name
        return key

    # read

    async def _read(self, x: Exchange, call: Call, runtime: Runtime, share: Share) -> bytes:
        raw = await call.read_body(runtime.settings.listen.max_body_bytes, share.take)
        x.timeline.body = call.body_ns
        return raw

    def _understand(self, x: Exchange, raw: bytes) -> RequestBody | None:
        """The JSON object that policies look at; None for bodies that are relayed unread."""
        if x.kind not in JSON_KINDS:
            x.model = model_in(raw)
            return readable(raw)
        body = read_object(raw, DECISIVE)
        model = body.data.get("model")
        x.model = model if isinstance(model, str) else None
        x.is_stream = body.data.get("stream") is True and x.kind in STREAM_KINDS
        return body

    # match and admit

    def _match(self, x: Exchange, call: Call, path: str, runtime: Runtime) -> tuple[RouteState, str]:
        found = runtime.table.find(path, x.model, call.headers, x.key_name)
        if found is None and x.model is not None:
            plain, asked_off = strip_nothinking(x.model)
            if asked_off:
                found = runtime.table.find(path, plain, call.headers, x.key_name)
        if found is None:
            names = ", ".join(f"`{name}`" for name in runtime.table.model_names()[:8])
            what = f"model `{label_value(x.model)}`" if x.model else "this path"
            raise NoRoute(
                f"No route takes {what}." + (f" Known models: {names}." if names else " See `firsttoken check`.")
            )
        if not _is_served(found.rest, found.route):
            raise _no_such_path(call.path)
        x.route = found.route.name
        return runtime.routes[found.route.name], found.rest

    def _admit(self, key: Key | None, route: RouteState) -> None:
        if key is not None and not may_use(key, route.config):
            raise RouteForbidden(
                f"Key `{key.name}` does not open route `{route.config.name}`; ask for it, or use another model."
            )

    # pick, send, wait, relay

    async def _try_upstreams(self, x: Exchange, prepared: Prepared, leaving: Leaving) -> Reply | None:
        """The next upstream is asked only while nothing has left this host (class R0)."""
        *before, last = self._pick(prepared.route)
        for state in before:
            try:
                return await self._sender.send(x, prepared, state, leaving)
            except (UpstreamUnavailable, Overloaded) as error:
                state.meters.failure(error.reason)
        return await self._sender.send(x, prepared, last, leaving)

    def _pick(self, route: RouteState) -> list[UpstreamState]:
        if len(route.upstreams) == 1:
            return list(route.upstreams)
        route.turn += 1
        by_name = {state.name: state for state in route.upstreams}
        candidates = [Candidate(state.name, state.is_up, state.inflight) for state in route.upstreams]
        return [by_name[name] for name in order(candidates, route.turn)]

    # errors

    def _refuse(self, x: Exchange, call: Call, error: GatewayError, relay: Relay | None = None) -> None:
        """The one place where an error becomes an answer."""
        x.error = error
        if relay is not None and relay.break_off(error, self._clock()):
            return
        x.settle(outcome_of(error), error.reason)
        if call.is_gone:
            return
        if call.is_started:
            call.abort()
            return
        x.status = error.status
        body = body_of(error, x.api, x.request_id)
        headers = [*headers_of(error), (b"x-request-id", x.request_id.encode("ascii")), *known_fields(x, self.runtime)]
        call.start(error.status, headers, len(body))
        call.write(body)
        call.end()

    def refuse_unread(self, call: Call, error: GatewayError) -> None:
        """A request that was not even valid HTTP: answered and accounted like any other."""
        x = Exchange(call)
        self._refuse(x, call, error)
        self._book(x)

    def _book(self, x: Exchange) -> None:
        """Its answer is out already: what goes wrong here must not become the caller's trouble, nor stop the rest."""
        try:
            self._account.close(x, self._clock())
        except Exception as error:
            log.exception("request %s could not be booked", x.request_id, exc_info=error)


class Leaving:
    """What the client's leaving means at the moment: while we wait for a connection, the end of the request's task;
    while an answer is relayed, the relay's business."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._task = asyncio.current_task()
        self.relay: Relay | None = None

    def on_client_gone(self) -> None:
        if self.relay is not None:
            self.relay.on_client_gone()
        elif self._task is not None:
            self._task.cancel()

    def on_client_paused(self) -> None:
        if self.relay is not None:
            self.relay.on_client_paused()

    def on_client_resumed(self) -> None:
        if self.relay is not None:
            self.relay.on_client_resumed()


def _draining() -> GatewayError:
    return Overloaded("The gateway is shutting down; send the request again.", reason="draining", retry_after_s=1)


_METHODS: dict[str | None, tuple[str, ...]] = {
    "models": ("GET", "HEAD"),
    None: ("GET", "POST"),
    "stored": ("GET", "POST"),
}


def endpoint_of(path: str) -> Kind | Literal["models", "stored"] | None:
    """What a path is for, whatever route prefix stands before it; None when it is not of the data plane."""
    kind = kind_below(path)
    if kind is not None:
        return kind
    start = path.find("/v1/")
    below = path[start:] if start >= 0 else ""
    if below == "/v1/models" or below.startswith("/v1/models/"):
        return "models"
    return "stored" if below.startswith("/v1/responses/") else None


def kind_below(path: str) -> Kind | None:
    """The kind of a data-plane path that a route's prefix may stand before."""
    kind = kind_of(path)
    if kind is not None:
        return kind
    slash = path.find("/", 1)
    while slash > 0:  # a route's prefix may be several segments long
        kind = kind_of(path[slash:])
        if kind is not None:
            return kind
        slash = path.find("/", slash + 1)
    return None


def _path_of_model(path: str) -> str | None:
    """The path of one model's entry, whose name may hold what no other path may (`org%2Fname`). It stays here."""
    before, mark, name = path.partition("/v1/models/")
    canonical = normalise_path(before + "/v1/models") if mark else None
    return f"{canonical}/{name}" if canonical is not None and name else None


def _no_such_path(path: str) -> NoRoute:
    hint = canonical_hint(path) or (
        "Inference endpoints are under /v1; a server's admin paths are closed unless a route opens them."
    )
    return NoRoute(f"There is no such path here. {hint}", reason="unknown_path")


def _is_served(rest: str, route: Route) -> bool:
    """Whether the path that would go upstream may: what stood before it was the route's prefix or nothing."""
    return kind_of(rest) is not None or rest.startswith("/v1/responses/") or rest in route.open_paths


def _is_open(path: str, runtime: Runtime) -> bool:
    return any(path.endswith(opened) for opened in runtime.open_paths)

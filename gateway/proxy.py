"""The story of a request, in the order in which it happens.

    accept → read → match → admit → clean and shape → pick → send → wait and relay → account

Control paths never come here. Every error is raised as a `GatewayError` and caught in one place, `handle`; every
request is accounted once, last. Choosing happens in plain functions of `policy`; this file acts on their choices.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from gateway.answering import Answering
from gateway.catalogue import answer_models
from gateway.complaints import our_fault, outcome_of
from gateway.errors import (
    GatewayError,
    MethodNotAllowed,
    NoRoute,
    Overloaded,
    RouteForbidden,
    Unauthorized,
    body_of,
    event_of,
    headers_of,
)
from gateway.exchange import ClientGone, Exchange, Room, Share
from gateway.judging import Verdicts
from gateway.paths import METHODS, endpoint_of, is_open, is_served, kind_below, no_such_path, path_of_model
from gateway.patience import closing_beat
from gateway.policy.limits import NO_LIMITS, NO_PREFERENCE, caller_limits, preference
from gateway.policy.routes import may_use, normalise_path
from gateway.reply import known_fields
from gateway.sending import Prepared, Sender
from gateway.trying import Crew, Trial
from gateway.wire.body import DECISIVE, RequestBody, read_object
from gateway.wire.headers import as_json, first, for_upstream, label_value
from gateway.wire.kinds import JSON_KINDS, Kind
from gateway.wire.opaque import model_in, readable
from gateway.wire.thinking import strip_nothinking

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gateway.account import Account
    from gateway.config import Key
    from gateway.exchange import Call
    from gateway.held import HeldCall
    from gateway.pending import PendingBook
    from gateway.runtime import RouteState, Runtime
    from gateway.upstream.watch import Watch

log = logging.getLogger("gateway.proxy")

PENDING_BUDGET_MS: Final = 2000  # for a caller that takes 202 where nobody set a budget (latency-methods §7, short)
STREAM_KINDS: frozenset[Kind] = frozenset(("chat", "completions", "responses", "messages"))


class Proxy:
    """Serves data-plane requests. Holds no state of a request."""

    def __init__(
        self, runtime: Runtime, account: Account, watch: Watch, pendings: PendingBook, clock: Callable[[], int]
    ) -> None:
        self.runtime = runtime
        self.pendings = pendings
        self._account = account
        self._watch = watch
        self._clock = clock
        verdicts = Verdicts(account)
        self._crew = Crew(account, Sender(account, verdicts, clock), Answering(verdicts, clock), clock)
        self._room = Room()
        self.running = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes of request bodies that are held now."""
        return self._room.held

    async def handle(self, call: Call) -> None:
        """One request, from its head to its account. Never raises but for the cancellation of its task from outside."""
        x = Exchange(call)
        leaving = Leaving()
        await self._guarded(x, call, leaving, self._serve(x, call, leaving))

    async def _guarded(self, x: Exchange, call: Call, leaving: Leaving, work: Coroutine[object, object, None]) -> None:
        self.running += 1
        try:
            await work
        except ClientGone:
            x.settle("client_cancelled")
        except GatewayError as error:
            self._refuse(x, call, error)
        except asyncio.CancelledError:
            if leaving.is_handed_over:
                raise
            if not call.is_gone:
                self._refuse(x, call, _draining(), leaving.trial)
                raise
            x.settle("client_cancelled")
        except Exception as error:
            log.exception("internal error in request %s", x.request_id, exc_info=error)
            self._refuse(x, call, our_fault(), leaving.trial)
        finally:
            self.running -= 1
            if not leaving.is_handed_over:
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
            self._set_terms(x, call, route)
            is_read = body is not None
            sent = body.raw if body is not None else raw  # without a byte-order mark
            headers = for_upstream(call.headers)
            if x.kind in JSON_KINDS:
                headers = as_json(headers)
            prepared = Prepared(route, rest, sent, body, headers, call, share, is_read)
            del raw, body, sent
            if x.is_opted_in:
                await self._hold(x, call, prepared, key, leaving)
            else:
                await self._answer(x, prepared, leaving)
        finally:
            if not leaving.is_handed_over:
                share.give_back()

    async def _answer(self, x: Exchange, prepared: Prepared, leaving: Leaving, held: HeldCall | None = None) -> None:
        """Pick, send, wait, relay: the attempts, and what comes of them."""
        fallback = self.runtime.fallback_of(prepared.route)
        trial = leaving.trial = Trial(
            x, prepared, self._crew, self.runtime.fleet, fallback, held.detach if held is not None else None
        )
        if held is not None:
            held.recording.describe = trial.describe
        reply = await trial.run()
        if reply is not None:
            reply.send(x, prepared.call, self._clock())

    # hold: a caller that comes back for its answer

    async def _hold(self, x: Exchange, call: Call, prepared: Prepared, key: Key | None, leaving: Leaving) -> None:
        """The request goes on in a task of its own; this one ends with the connection's answer."""
        if (first(call.headers, b"x-stainless-retry-count") or b"0") != b"0":
            running = await self.pendings.running_like(key, x.path, prepared.raw)
            if running is not None:
                self._join(x, call, running)
                return
        held = self.pendings.hold(call, x, key, prepared.raw, model=x.model)
        prepared.call = held
        leaving.is_handed_over = True
        self.pendings.spawn(self._carry(x, held, prepared))
        await held.released

    async def _carry(self, x: Exchange, held: HeldCall, prepared: Prepared) -> None:
        leaving = Leaving()
        held.watch(leaving)
        try:
            await self._guarded(x, held, leaving, self._answer(x, prepared, leaving, held))
        finally:
            prepared.share.give_back()
            self.pendings.end(held, x)

    def _join(self, x: Exchange, call: Call, entry_id: str) -> None:
        """The same request of the same caller runs already: an SDK's retry shall not start it twice."""
        recording = self.pendings.find(entry_id)
        if recording is not None and recording.call is not None:
            recording.call.detach()
        headers, body = self.pendings.announcement_of(entry_id, x)
        self.pendings.note_joined()
        x.status = 202
        x.settle("complete", "joined")
        call.start(202, headers, len(body))
        call.write(body)
        call.end()

    # accept

    def _accept(self, x: Exchange, call: Call, runtime: Runtime) -> str:
        """The path as routes know it, with the kind of endpoint noted. Nothing was read yet."""
        path = normalise_path(call.path) or path_of_model(call.path)
        endpoint = endpoint_of(path) if path is not None else None
        if path is None or (endpoint is None and not is_open(path, runtime)):
            raise no_such_path(call.path)
        x.kind = kind_below(path) or "opaque"
        if x.kind == "messages" or path.endswith("/v1/messages/count_tokens"):
            x.api = "anthropic"
        allowed = METHODS.get(endpoint, ("POST",))
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
        if x.is_stream:
            options = body.data.get("stream_options")
            x.wants_usage = isinstance(options, dict) and options.get("include_usage") is True
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
        if not is_served(found.rest, found.route):
            raise no_such_path(call.path)
        x.route = found.route.name
        return runtime.routes[found.route.name], found.rest

    def _admit(self, key: Key | None, route: RouteState) -> None:
        if key is not None and not may_use(key, route.config):
            raise RouteForbidden(
                f"Key `{key.name}` does not open route `{route.config.name}`; ask for it, or use another model."
            )

    def _set_terms(self, x: Exchange, call: Call, route: RouteState) -> None:
        """How long this request may take, and what happens when its first token is late: the route's word, and the
        caller's own where it gave one."""
        budget = x.budget = route.config.budget
        limits = caller_limits(call.headers)
        x.read_timeout_ms = limits.read_timeout_ms
        if limits is not NO_LIMITS and limits.deadline_ms is not None:
            end = x.timeline.recv + limits.deadline_ms * 1_000_000
            if limits.is_silence:
                x.first_byte_deadline = end
            else:
                x.deadline = end
        wish = preference(call.headers)
        if wish is NO_PREFERENCE and route.config.pending != "always":
            return
        may_pend = route.config.pending != "never" and x.kind in JSON_KINDS
        x.is_opted_in = may_pend and (wish.accepts_pending or route.config.pending == "always")
        if wish.wait_s is not None:
            x.budget = budget.model_copy(update={"ttft_ms": int(wish.wait_s * 1000)})
        elif x.is_opted_in and budget.ttft_ms is None:
            x.budget = budget.model_copy(update={"ttft_ms": PENDING_BUDGET_MS})

    # errors

    def _refuse(self, x: Exchange, call: Call, error: GatewayError, trial: Trial | None = None) -> None:
        """The one place where an error becomes an answer."""
        x.error = error
        if trial is not None and trial.break_off(error, self._clock()):
            return
        x.settle(outcome_of(error), error.reason)
        if call.is_gone:
            return
        if call.is_started:
            if x.is_stream and not (trial is not None and trial.has_answered):  # a heartbeat committed the status
                call.end(closing_beat(x) + event_of(error, x.api))
            else:  # SDKs take a 200 with an error in it for an empty answer; a cut they notice
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
    """What the client's leaving means at the moment: before there are attempts the end of the request's task, then the
    attempts' business."""

    __slots__ = ("_task", "is_handed_over", "trial")

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.trial: Trial | None = None
        self.is_handed_over = False  # another task answers, accounts and gives everything back

    def on_client_gone(self) -> None:
        if self.trial is not None:
            self.trial.on_client_gone()
        elif self._task is not None:
            self._task.cancel()

    def on_client_paused(self) -> None:
        if self.trial is not None:
            self.trial.on_client_paused()

    def on_client_resumed(self) -> None:
        if self.trial is not None:
            self.trial.on_client_resumed()


def _draining() -> GatewayError:
    return Overloaded("The gateway is shutting down; send the request again.", reason="draining", retry_after_s=1)

"""Requests whose callers took 202 for an answer: held by the application, not by a connection.

A caller that opted in gets a `HeldCall` between its connection and the request; once that is detached, the answer goes
into a `Recording`. The book knows them all, keeps them within their bounds, and tells the store that replicas share.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import orjson

from gateway.held import HeldCall
from gateway.recording import Recording
from gateway.store.entry import Entry, StoreDown

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gateway.config import Key, Pending
    from gateway.exchange import Call, Exchange
    from gateway.metrics import PendingMeters
    from gateway.store.entry import State, Store
    from gateway.wire.headers import Headers

log = logging.getLogger("gateway.pending")

ID_BYTES: Final = 16  # 128 random bits
MAX_TOMBSTONES: Final = 10_000  # ids of results that expired, so that their owners are told so
RETRY_AFTER_S: Final = 1
PUBLISH_EVERY_S: Final = 1.0  # news of running requests for other replicas
STOP_S: Final = 1.0  # for requests to end by themselves once they were told


class PendingBook:
    """All held requests of this process, and the results that wait to be fetched. Bounded in number, bytes and time."""

    def __init__(self, limits: Pending, store: Store, meters: PendingMeters, clock: Callable[[], int]) -> None:
        self.limits = limits
        self.store = store
        self._meters = meters
        self._clock = clock
        self._recordings: OrderedDict[str, Recording] = OrderedDict()
        self._expired: OrderedDict[str, str] = OrderedDict()  # id: owner
        self._running: dict[str, HeldCall] = {}  # by fingerprint, detached or not
        self._tasks: set[asyncio.Task[None]] = set()
        self.bytes = 0
        store.on_cancel = self.cancel
        store.on_damaged = self._restore

    def __repr__(self) -> str:
        return f"<PendingBook {self.running} running, {len(self._recordings)} known, {self.bytes} bytes>"

    @property
    def running(self) -> int:
        return sum(recording.is_running for recording in self._recordings.values())

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Requests that outlived their connections or may; a loop holds tasks weakly, so they are held here (C124)."""
        return self._tasks

    # Holding

    def hold(self, call: Call, x: Exchange, key: Key | None, raw: bytes, *, model: str | None) -> HeldCall:
        """A call for a caller that opted in. Nothing is promised yet."""
        entry = Entry(
            id=secrets.token_urlsafe(ID_BYTES),
            owner_key=owner_of(key),
            replica=self.store.replica,
            state="pending",
            created_ms=int(time.time() * 1000),
            info={"route": x.route, "model": model, "is_stream": x.is_stream, "api": x.api},
            fingerprint=fingerprint_of(key, x.path, raw),
        )
        recording = Recording(entry, max_bytes=int(self.limits.max_result_mb * 1024 * 1024))
        held = self._running[entry.fingerprint] = HeldCall(call, x, self, recording)
        return held

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Runs something that must outlive its connection."""
        task = asyncio.get_running_loop().create_task(work, name="pending")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def admit(self, recording: Recording) -> bool:
        """Room for one more; old results make it when they can."""
        if recording.entry.id in self._recordings:
            return True
        while len(self._recordings) >= self.limits.max_count:
            if not self._drop_oldest_result():
                self._meters.results["refused"].inc()
                return False
        self._recordings[recording.entry.id] = recording
        self._meters.results["created"].inc()
        self._meters.running.inc()
        return True

    def withdraw(self, recording: Recording) -> None:
        """It was not promised after all."""
        if self._recordings.pop(recording.entry.id, None) is not None:
            recording.finish("cancelled", self._clock())
            self._meters.running.dec()
            self._meters.results["withdrawn"].inc()

    def take(self, recording: Recording, data: bytes) -> bool:
        """Records more of an answer, if one result and all of them may be so large."""
        total = int(self.limits.max_total_mb * 1024 * 1024)
        while self.bytes + len(data) > total:
            if not self._drop_oldest_result():
                recording.is_full = True
                return False
        if not recording.append(data):
            return False
        self.bytes += len(data)
        return True

    def finish(self, recording: Recording, state: State, error: dict[str, object] | None = None) -> None:
        """The end of a request that was promised; no effect on one that was answered directly."""
        if recording.entry.id not in self._recordings:
            return
        if recording.is_full:
            state, error = "failed", _TOO_LARGE
        if recording.finish(state, self._clock(), error):
            self._meters.running.dec()
            self._meters.results[state].inc()
            self.store.finish(recording.entry)

    def end(self, held: HeldCall, x: Exchange) -> None:
        """The request is over, whatever became of it. Called at the end of its answer and of its task."""
        recording = held.recording
        if self._running.get(recording.entry.fingerprint) is held:
            del self._running[recording.entry.fingerprint]
        held.release()
        if x.outcome == "client_cancelled" or (held.is_cancelled and not held.is_started):
            self.finish(recording, "cancelled")
        elif x.error is not None:
            told = x.error
            self.finish(recording, "failed", {
                "message": told.message, "type": told.type, "param": None, "code": told.code, "reason": x.reason,
                "status": told.status,
            })  # fmt: skip
        elif held.is_started:
            self.finish(recording, "done")  # also the upstream's own refusal: its status, its bytes
        else:
            self.finish(recording, "failed", _NO_ANSWER)
        recording.let_go()

    # Finding

    def find(self, entry_id: str) -> Recording | None:
        return self._recordings.get(entry_id)

    def is_expired(self, entry_id: str, owner_key: str) -> bool:
        """Whether that was a result of this owner's whose time is over."""
        return self._expired.get(entry_id) == owner_key

    async def running_like(self, key: Key | None, path: str, raw: bytes) -> str | None:
        """The id of the running request that this one repeats, here or elsewhere. It goes on without its connection:
        whoever repeats a request does not wait there any more."""
        fingerprint = fingerprint_of(key, path, raw)
        held = self._running.get(fingerprint)
        if held is not None and held.detach() and await held.announced():
            return held.recording.entry.id
        try:
            return await self.store.find(fingerprint) if self.store.is_shared else None
        except StoreDown:
            return None

    def note_joined(self) -> None:
        self._meters.results["joined"].inc()

    def cancel(self, entry_id: str) -> None:
        recording = self._recordings.get(entry_id)
        if recording is not None and recording.call is not None:
            recording.call.cancel()

    # Time

    def sweep(self) -> None:
        """Lets go of results whose time is over, and tells other replicas how the running ones do. Once a second."""
        now = self._clock()
        oldest = now - int(self.limits.ttl_s * 1e9)
        for recording in list(self._recordings.values()):
            if recording.is_running:
                if self.store.is_shared and recording.describe is not None:
                    recording.entry.info.update(recording.describe())
                    self.store.update(recording.entry)
            elif recording.ended_ns < oldest:
                self._drop(recording)

    async def run(self) -> None:
        """Sweeps for ever; cancelled at shutdown."""
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            try:
                self.sweep()
            except Exception as error:
                log.exception("pending results could not be looked after", exc_info=error)

    async def stop(self) -> None:
        """The process ends: what still runs is told as failed, never left as running for ever (C129)."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        for recording in list(self._recordings.values()):
            self.finish(recording, "failed", _DRAINED)

    def _drop_oldest_result(self) -> bool:
        for recording in self._recordings.values():
            if not recording.is_running:
                self._drop(recording)
                return True
        return False

    def _drop(self, recording: Recording) -> None:
        entry = recording.entry
        del self._recordings[entry.id]
        self.bytes -= recording.size
        self._meters.results["expired"].inc()
        self._expired[entry.id] = entry.owner_key
        while len(self._expired) > MAX_TOMBSTONES:
            self._expired.popitem(last=False)

    def _restore(self, entry_id: str) -> None:
        recording = self._recordings.get(entry_id)
        if recording is not None:
            self.store.restore(recording.entry, recording.read(0))

    # Telling

    def announcement_of(self, entry_id: str, x: Exchange) -> tuple[Headers, bytes]:
        """Fields and body of a 202 that points to a request which runs already, maybe elsewhere."""
        recording = self._recordings.get(entry_id)
        if recording is None:
            entry = Entry(entry_id, "", "", "pending", int(time.time() * 1000))
            recording = Recording(entry, max_bytes=0)
        return self.announcement(recording, x)

    def announcement(self, recording: Recording, x: Exchange) -> tuple[Headers, bytes]:
        """Fields and body of the 202."""
        body = orjson.dumps(status_of(recording.entry, recording.describe))
        return [
            (b"content-type", b"application/json"),
            (b"location", f"/gateway/pending/{recording.entry.id}".encode()),
            (b"retry-after", b"%d" % RETRY_AFTER_S),
            (b"preference-applied", b"respond-async"),
            (b"cache-control", b"no-store"),
            (b"x-request-id", x.request_id.encode("ascii")),
            *(x.cors or ()),
        ], body


_TOO_LARGE: Final[dict[str, object]] = {
    "message": "The answer grew larger than a pending result may be (`pending.max_result_mb`, `pending.max_total_mb`). "
    "Ask for it as a stream without `Prefer: respond-async`.",
    "type": "gateway_error", "param": None, "code": "result_too_large",
}  # fmt: skip

_DRAINED: Final[dict[str, object]] = {
    "message": "The gateway was stopped while this request ran. Send it again.",
    "type": "overloaded_error", "param": None, "code": "overloaded", "reason": "draining", "status": 503,
}  # fmt: skip


_NO_ANSWER: Final[dict[str, object]] = {
    "message": "The request ended without an answer. Send it again.",
    "type": "gateway_error", "param": None, "code": "internal", "status": 500,
}  # fmt: skip


def status_of(entry: Entry, describe: Callable[[], dict[str, object]] | None) -> dict[str, object]:
    """What a poll says of a request: id, status, phase, estimates, where to ask. Times in ms."""
    told = describe() if describe is not None else entry.info
    elapsed_ms = max(0, int(time.time() * 1000) - entry.created_ms)
    found: dict[str, object] = {"id": entry.id, "object": "gateway.pending", "status": entry.state}
    if entry.state == "pending":
        for name in ("estimation_ms", "estimation_p90_ms", "estimation_basis"):
            if told.get(name) is not None:
                found[name] = told[name]
        found["elapsed_ms"] = told.get("elapsed_ms", elapsed_ms)
        found["phase"] = told.get("phase", "queued")
        found["message"] = _sentence(found)
    if entry.error is not None:
        found["error"] = error_of(entry)
    found["poll_url"] = f"/gateway/pending/{entry.id}"
    found["stream_url"] = f"/gateway/pending/{entry.id}"
    return found


def error_of(entry: Entry) -> dict[str, object]:
    """Why it failed, with every field that programs look for."""
    told = entry.error or {}
    reason = told.get("reason", "pending_failed")
    return {"message": "The request failed.", "type": "gateway_error", "param": None, "code": reason, **told}


def _sentence(found: dict[str, object]) -> str:
    phase = {
        "queued": "waits for its turn at the model server",
        "prefill": "is being read by the model",
        "reasoning": "is being thought about",
        "answering": "is being answered",
    }.get(str(found["phase"]), "runs")
    estimate = found.get("estimation_ms")
    about = f"about {int(estimate) / 1000:.1f} s to go" if isinstance(estimate, int) else "no estimate"
    return f"The request {phase}: {about}. Poll `poll_url`, or read `stream_url` with `Accept: text/event-stream`."


def owner_of(key: Key | None) -> str:
    """An opaque word for whoever holds this key; empty where no keys are needed."""
    return "" if key is None else hashlib.sha256(b"owner:" + key.digest()).hexdigest()


def fingerprint_of(key: Key | None, path: str, raw: bytes) -> str:
    """The same for the same request of the same caller."""
    digest = hashlib.sha256(owner_of(key).encode() + b"\0" + path.encode("utf-8", "replace") + b"\0")
    digest.update(raw)
    return digest.hexdigest()

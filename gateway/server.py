"""Our side towards clients: uvicorn's httptools protocol, with limits, and with requests dispatched before ASGI.

Data-plane requests become `DirectCall`s and go to the proxy; their response bytes are written straight to the
transport. The control plane (health, metrics, status) goes on to uvicorn's own cycle and FastAPI.
What uvicorn leaves open is closed here: header and body timers, sizes, one Host, one framing (fault-catalogue E).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.direct import DirectCall
from gateway.errors import BadRequest, ClientTooSlow, GatewayError, MethodNotAllowed

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from gateway.app import Gateway

log = logging.getLogger("gateway.server")

NS = 1_000_000_000
MAX_HEAD_BYTES = 32 * 1024
MAX_FIELDS = 100
MAX_TARGET = 8 * 1024
WRITE_HIGH_WATER = 4096  # + one read of up to 250 KB stays below the 256 KiB that a stalled reader may hold
_BAD_HOST = frozenset(b'/?#@\\ \t<>"{}|^`')
_REFUSED_METHODS = frozenset((b"CONNECT", b"TRACE"))


class GatewayProtocol(HttpToolsProtocol):
    """One client connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        gateway = cast("Gateway", config.app)
        self._gateway = gateway
        self._listen = gateway.settings.listen
        self._clock = gateway.clock
        self._received_ns = 0  # first byte of the request that is being read
        self._head_done = False
        self._head_bytes = 0
        self._refusal: GatewayError | None = None
        self._fresh: deque[DirectCall] = deque()  # calls whose head came with this read
        self._discarding = False
        self.deadline_ns = 0  # swept by `GatewayServer`, one timer for all connections
        self.call: DirectCall | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER, low=0)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        if not self._received_ns:
            self._received_ns = self._clock()
            self._head_bytes = 0
            if self.call is None:
                self.deadline_ns = self._received_ns + int(self._listen.header_timeout_s * NS)
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(
                self._refusal or BadRequest("Protocol upgrades are not served here; use plain HTTP/1.1.", status=501)
            )
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal or BadRequest("This is not a valid HTTP/1.1 request.", reason="bad_http"))
            return
        if self._refusal is not None:
            self._refuse(self._refusal)
            return
        if not self._head_done and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                BadRequest(
                    f"The request head is larger than {MAX_HEAD_BYTES} bytes.", status=431, code="head_too_large"
                )
            )
            return
        while self._fresh:
            self._dispatch(self._fresh.popleft())

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A FIN is how most clients leave, so it ends the exchange, unless `half_close: wait` says otherwise."""
        return True if self._listen.half_close == "wait" and self.call is not None else None

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(cast("Any", self))
        self.deadline_ns = 0
        call, self.call = self.call, None
        if call is not None:
            call.connection_lost()
        for queued, _ in self.pipeline:
            if isinstance(queued, DirectCall):
                queued.connection_lost()
        self.pipeline.clear()
        if isinstance(self.cycle, DirectCall):
            self.cycle = None  # type: ignore[assignment]
            self.flow.resume_writing()
            if exc is None:
                self.transport.close()
        else:
            super().connection_lost(exc)
        self.parser = None  # type: ignore[assignment]

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.call is not None:
            self.call.writing_paused()
            self.deadline_ns = self._clock() + int(self._listen.write_stall_s * NS)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.call is not None:
            self.deadline_ns = 0
            self.call.writing_resumed()

    # httptools callbacks

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._head_done = False
        if not self._received_ns:
            self._received_ns = self._clock()

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > MAX_TARGET:
            self._refusal = BadRequest(
                f"The request target is longer than {MAX_TARGET} bytes.", status=414, code="target_too_long"
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer field must never reach a decision (E22)
        if len(self.headers) >= MAX_FIELDS:
            self._refusal = BadRequest(f"More than {MAX_FIELDS} header fields.", status=431, code="head_too_large")
            return
        name = name.lower()
        if name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_done = True
        received, self._received_ns = self._received_ns, 0
        if self._refusal is None:
            self._refusal = self._check_head()
        if self._refusal is not None:
            return
        target = httptools.parse_url(self.url)
        path = (target.path or b"/").decode("latin-1")
        if self._gateway.is_control(path, self._local_port()):
            self._hand_to_asgi(path)
            return
        call = DirectCall(
            self, self.parser.get_method().decode("ascii"), path, target.query or b"", self.headers, received
        )
        call.keep_alive = self.parser.get_http_version() == "1.1" and self.parser.should_keep_alive()
        call.expects_continue = self.expect_100_continue
        self.cycle = cast("Any", call)
        self._fresh.append(call)

    def on_body(self, body: bytes) -> None:
        if isinstance(self.cycle, DirectCall):
            if not self.cycle.response_complete:
                self.cycle.body_arrived(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if isinstance(self.cycle, DirectCall):
            self.cycle.body_complete(self._clock())
        elif self._refusal is None:
            super().on_message_complete()

    # Dispatch

    def _check_head(self) -> GatewayError | None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            return BadRequest("Only HTTP/1.1 is spoken here.", status=505, code="http_version")
        if method in _REFUSED_METHODS:
            return MethodNotAllowed(f"The method {method.decode('ascii', 'replace')} is not served.")
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1") or (hosts and not _BAD_HOST.isdisjoint(hosts[0])):
            return BadRequest("The request needs exactly one valid Host header.", reason="bad_host")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (len(codings) > 1 or codings[0].lower() != b"chunked" or version == "1.0"):
            return BadRequest("The only transfer coding accepted is `chunked`.", status=501, reason="bad_framing")
        if codings and any(name == b"content-length" for name, _ in self.headers):
            return BadRequest("Content-Length and Transfer-Encoding exclude each other.", reason="bad_framing")
        return None

    def _hand_to_asgi(self, path: str) -> None:
        self.scope = {  # type: ignore[typeddict-item]
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,  # type: ignore[typeddict-item]
            "root_path": self.root_path,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        self.deadline_ns = 0
        super().on_headers_complete()

    def _dispatch(self, call: DirectCall) -> None:
        if self.call is None:
            self._run(call)
        else:  # pipelined: one at a time, in order, and nothing more is read meanwhile
            self.flow.pause_reading()
            self.pipeline.appendleft(cast("Any", (call, self.app)))

    def _run(self, call: DirectCall) -> None:
        self.call = call
        if call.more_body:
            self.deadline_ns = self._clock() + int(self._listen.body_idle_timeout_s * NS)
        else:
            self.deadline_ns = 0
        task = self.loop.create_task(self._gateway.proxy.handle(call))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def on_response_complete(self) -> None:
        """The answer is out: start what was pipelined, or wait for the next head."""
        self.server_state.total_requests += 1
        self.call = None
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if not self.pipeline:
            self._wait_for_head(keep_alive=True)
            return
        cycle, app = self.pipeline.pop()
        if isinstance(cycle, DirectCall):
            self._run(cycle)
        else:
            self._start_asgi_task(cycle, app)

    def shutdown(self) -> None:
        """The server stops: idle connections close now, busy ones after their answer."""
        if self.call is not None:
            self.call.keep_alive = False
        elif self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    # Limits

    def _wait_for_head(self, *, keep_alive: bool = False) -> None:
        limit = self._listen.keep_alive_s if keep_alive and not self._received_ns else self._listen.header_timeout_s
        self.deadline_ns = self._clock() + int(limit * NS)

    def body_progressed(self) -> None:
        """More of a request body arrived."""
        self.deadline_ns = self._clock() + int(self._listen.body_idle_timeout_s * NS)

    def body_finished(self) -> None:
        self.deadline_ns = 0

    def deadline_passed(self) -> None:
        """Called by the sweep when `deadline_ns` lies in the past."""
        self.deadline_ns = 0
        if self.call is not None:
            if self.call.more_body and not self.call.is_started:
                self.call.refuse_body(ClientTooSlow("The request body did not arrive in time.", reason="body_timeout"))
            else:  # a reader that takes nothing
                self.call.stalled = True
                self.transport.abort()
        elif self._received_ns and not self._discarding:
            self._refuse(ClientTooSlow("The request head did not arrive in time.", reason="head_timeout"))
        else:
            self.transport.close()

    def linger(self, seconds: float = 2.0) -> None:
        """Answered before the body was read: stop reading meaning into it, let the caller read the answer, close."""
        self._discarding = True
        self.flow.resume_reading()
        self.deadline_ns = self._clock() + int(seconds * NS)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _refuse(self, error: GatewayError) -> None:
        """A request that never became one: answered here, and the connection closes."""
        if self.call is not None or self.transport.is_closing():  # an answer is under way: it cannot be told apart
            self.transport.abort()
            return
        call = DirectCall(self, "GET", "/", b"", [], self._received_ns or self._clock())
        call.keep_alive = False
        self._gateway.proxy.refuse_unread(call, error)
        self.linger()

    def _local_port(self) -> int | None:
        return self.server[1] if self.server else None

    def start_head(self) -> bytes:
        """Lines that every response carries (`date`)."""
        return b"".join(b"%b: %b\r\n" % field for field in self.server_state.default_headers)

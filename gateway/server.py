"""Our side towards clients: uvicorn's httptools protocol, with limits, and with requests dispatched before ASGI.

Data-plane requests become `DirectCall`s and go to the proxy; their response bytes are written straight to the
transport. The control plane (health, metrics, status) goes on to uvicorn's own cycle and FastAPI.
What uvicorn leaves open is closed here: header and body timers, sizes, one Host, one framing (fault-catalogue E).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
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
        self._received_ns = 0  # first byte of the head that is being read; 0: none is
        self._in_body = False  # between a request's head and its end
        self._head_bytes = 0
        self._field_bytes = 0
        self._refusal: GatewayError | None = None  # of the request that is being read
        self._broken: GatewayError | None = None  # told once the requests before it have their answers
        self._asgi: RequestResponseCycle | None = None
        self._discarding = False
        self._body_limit_ns = 0
        self._unsent = 0  # bytes that a client had not taken at the last look
        self.deadline_ns = 0  # swept by `GatewayServer`, one timer for all connections
        self.call: DirectCall | None = None  # the one being answered; `cycle` is the newest

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER, low=0)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        if not self._in_body:
            if not self._received_ns:
                self._received_ns = self._clock()
                self._head_bytes = 0
                if not self._is_busy:
                    self.deadline_ns = self._received_ns + int(self._listen.header_timeout_s * NS)
            self._head_bytes += len(data)
        error: GatewayError | None = None
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # an upgrade was refused by its head already
            error = BadRequest("This is not a valid HTTP/1.1 request.", reason="bad_http")
        if self._refusal is None and error is None and self._received_ns and self._head_bytes > MAX_HEAD_BYTES:
            error = _head_too_large()
        error = self._refusal or error
        if error is not None:
            self._refuse(error)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A FIN is how most clients leave, so it ends the exchange, unless `half_close: wait` says otherwise."""
        if self._listen.half_close == "wait" and self._is_busy and not self.cycle.more_body:
            self.cycle.keep_alive = False
            return True
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(cast("Any", self))
        self.deadline_ns = 0
        self._discarding = True
        call, self.call = self.call, None
        if call is not None:
            call.connection_lost()
        if self._asgi is not None and not self._asgi.response_complete:
            self._asgi.disconnected = True
            self._asgi.message_event.set()
        self.pipeline.clear()
        self.cycle = self._asgi = None  # type: ignore[assignment]
        self.flow.resume_writing()
        if exc is None:
            self.transport.close()
        self.parser = None  # type: ignore[assignment]

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._is_busy or not self._discarding:
            self._give_reader_time()
        if self.call is not None:
            self.call.writing_paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.call is not None:
            self.deadline_ns = 0
            self.call.writing_resumed()
        elif self._is_busy:
            self.deadline_ns = 0
        elif not self._discarding:
            self._wait_for_head(keep_alive=True)

    # httptools callbacks

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._field_bytes = 0
        if not self._received_ns:  # behind another one in the same read
            self._received_ns = self._clock()
            self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > MAX_TARGET:
            self._refusal = BadRequest(
                f"The request target is longer than {MAX_TARGET} bytes.", status=414, code="target_too_long"
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer field must never reach a decision (E22)
        self._field_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_FIELDS or self._field_bytes > MAX_HEAD_BYTES:
            self._refusal = self._refusal or _head_too_large()
            return
        name = name.lower()
        if name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_body = True
        received, self._received_ns = self._received_ns, 0
        if self._refusal is None:
            self._refusal = self._check_head()
        if self._refusal is not None:
            return
        target = httptools.parse_url(self.url)
        path = (target.path or b"/").decode("latin-1")
        if self._gateway.is_control(path, self._local_port()):
            self._hand_to_asgi()
            return
        method = self.parser.get_method().decode("ascii")
        call = DirectCall(self, method, path, target.query or b"", self.headers, received)
        call.is_http10 = self.parser.get_http_version() == "1.0"
        call.keep_alive = not call.is_http10 and self.parser.should_keep_alive()
        call.expects_continue = self.expect_100_continue and not call.is_http10
        is_busy = self._is_busy
        self.cycle = cast("Any", call)
        if is_busy:  # pipelined: one at a time, in order, and nothing more is read meanwhile
            self.flow.pause_reading()
            self.pipeline.appendleft(cast("Any", (call, self.app)))
        else:
            self._run(call)

    def on_body(self, body: bytes) -> None:
        if self._refusal is not None:
            return  # the newest cycle is that of a request before it
        if not isinstance(self.cycle, DirectCall):
            super().on_body(body)
        elif not self.cycle.response_complete:
            self.cycle.body_arrived(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._refusal is not None:
            return
        if isinstance(self.cycle, DirectCall):
            self.cycle.body_complete(self._clock())
        else:
            super().on_message_complete()

    # Dispatch

    def _check_head(self) -> GatewayError | None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            return BadRequest("Only HTTP/1.1 is spoken here.", status=505, code="http_version")
        if method in _REFUSED_METHODS:
            return MethodNotAllowed(f"The method {method.decode('ascii', 'replace')} is not served.")
        if not self.url.startswith((b"/", b"http://", b"https://")):
            return BadRequest("The request target must be a path.", reason="bad_target")
        if self.parser.should_upgrade():
            return BadRequest("Protocol upgrades are not served here; use plain HTTP/1.1.", status=501)
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1") or (hosts and not _BAD_HOST.isdisjoint(hosts[0])):
            return BadRequest("The request needs exactly one valid Host header.", reason="bad_host")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (len(codings) > 1 or codings[0].lower() != b"chunked" or version == "1.0"):
            return BadRequest("The only transfer coding accepted is `chunked`.", status=501, reason="bad_framing")
        if codings and any(name == b"content-length" for name, _ in self.headers):
            return BadRequest("Content-Length and Transfer-Encoding exclude each other.", reason="bad_framing")
        return None

    @property
    def _is_busy(self) -> bool:
        """A request has no complete answer yet: one being answered, or one that waits for its turn."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _hand_to_asgi(self) -> None:
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
        super().on_headers_complete()  # in turn, behind those that are not answered yet

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._asgi = cycle
        self._stop_timer()
        super()._start_asgi_task(cycle, app)

    def _run(self, call: DirectCall) -> None:
        self.call = call
        call.is_paused = self.flow.write_paused  # by the end of the answer before, which the client has not taken yet
        self._stop_timer()
        if call.more_body:
            self._body_limit_ns = self._clock() + int(self._listen.body_timeout_s * NS)
            self.body_progressed(call)
        task = self.loop.create_task(self._gateway.proxy.handle(call))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def on_response_complete(self) -> None:
        """The answer is out: start what was pipelined, or wait for the next head."""
        self.server_state.total_requests += 1
        self.call = None
        if self.transport.is_closing():
            self._give_reader_time()
            return
        waiting = self.pipeline.pop() if self.pipeline else None
        if not self.pipeline:
            self.flow.resume_reading()
        if waiting is None:
            if self._broken is not None:
                self._answer_refusal(self._broken)
            else:
                self._wait_for_head(keep_alive=True)
        elif isinstance(waiting[0], DirectCall):
            self._run(waiting[0])
        else:
            self._start_asgi_task(*waiting)

    def shutdown(self) -> None:
        """The server stops: idle connections close now, busy ones after their answers."""
        if self._is_busy:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    # Limits

    def _wait_for_head(self, *, keep_alive: bool = False) -> None:
        if self.flow.write_paused:
            return  # the reader's own time runs, and `resume_writing` comes back here
        limit = self._listen.keep_alive_s if keep_alive and not self._received_ns else self._listen.header_timeout_s
        self.deadline_ns = self._clock() + int(limit * NS)

    def body_progressed(self, call: DirectCall) -> None:
        """More of a request body arrived."""
        if call is self.call:
            self.deadline_ns = min(self._clock() + int(self._listen.body_idle_timeout_s * NS), self._body_limit_ns)

    def body_finished(self, call: DirectCall) -> None:
        if call is self.call:
            self._stop_timer()

    def _stop_timer(self) -> None:
        if not self.flow.write_paused:  # the reader's own time runs on
            self.deadline_ns = 0

    def deadline_passed(self) -> None:
        """Called by the sweep when `deadline_ns` lies in the past."""
        self.deadline_ns = 0
        call = self.call
        if call is not None and call.more_body and not call.is_started:
            call.refuse_body(ClientTooSlow("The request body did not arrive in time.", reason="body_timeout"))
        elif self.flow.write_paused or self.transport.is_closing():
            self._judge_reader()
        elif self._is_busy:
            pass
        elif self._received_ns and not self._discarding:
            self._refuse(ClientTooSlow("The request head did not arrive in time.", reason="head_timeout"))
        else:
            self.transport.close()

    def _give_reader_time(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self.deadline_ns = self._clock() + int(self._listen.write_stall_s * NS)

    def _judge_reader(self) -> None:
        """A client that took something gets more time; one that takes nothing is dropped."""
        if 0 < self.transport.get_write_buffer_size() < self._unsent:
            self._give_reader_time()
            return
        if self.call is not None:
            self.call.stalled = True
        self.transport.abort()

    def linger(self, seconds: float = 2.0) -> None:
        """Answered before the body was read: stop reading meaning into it, let the caller read the answer, close."""
        self._discarding = True
        self.flow.resume_reading()
        self.deadline_ns = self._clock() + int(seconds * NS)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def reset(self) -> None:
        """Ends the connection in a way that no client takes for the end of an answer."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _refuse(self, error: GatewayError) -> None:
        """Bytes that make no request. Nothing more is read; the requests before them get their answers first."""
        self._discarding = True
        if not self._is_busy:
            self._answer_refusal(error)
        elif not self.cycle.more_body:
            self._broken = error
        elif isinstance(self.cycle, DirectCall):  # it is this one's own body
            self.cycle.refuse_body(error)
        else:
            self.transport.abort()

    def _answer_refusal(self, error: GatewayError) -> None:
        call = DirectCall(self, "GET", "/", b"", [], self._received_ns or self._clock())
        call.keep_alive = False
        self._gateway.proxy.refuse_unread(call, error)  # its body is never complete, so this lingers

    def _local_port(self) -> int | None:
        return self.server[1] if self.server else None

    def is_last(self, call: DirectCall) -> bool:
        """Whether the connection ends with this answer because the server stops (fault-catalogue F1)."""
        return self._gateway.is_draining and cast("Any", self.cycle) is call

    def start_head(self) -> bytes:
        """Lines that every response carries (`date`)."""
        return b"".join(b"%b: %b\r\n" % field for field in self.server_state.default_headers)


def _head_too_large() -> BadRequest:
    return BadRequest(
        f"The request head is larger than {MAX_HEAD_BYTES} bytes or has more than {MAX_FIELDS} fields.",
        status=431,
        code="head_too_large",
    )

"""Faults of reaching the server and of its connections (catalogue A, B1 to B4, C5, D1)."""

from __future__ import annotations

from gateway.sim.faults.kinds import Context, Fault, Maker, count, framed, pieces, seconds
from gateway.sim.steps import End, HangUp, Head, Pause, Raw, Steps

NOT_HTTP = {
    "ssh": b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
    "tls": b"\x15\x03\x01\x00\x02\x02\x46",
    "http09": b"<html>hello</html>\n",
    "binary": bytes(range(256)),
}


def _only(*parts: Pause | HangUp | Raw | End) -> Fault:
    async def played(_steps: Steps, _context: Context) -> Steps:
        for part in parts:
            yield part

    return played


def stall_headers(argument: str) -> Fault:
    """stall_headers[=S]: silence before the headers, for S seconds or for ever [A6]"""
    wait = Pause(seconds(argument, None))

    async def played(steps: Steps, _context: Context) -> Steps:
        yield wait
        async for step in steps:
            yield step

    return played


def reset_before(_argument: str) -> Fault:
    """reset_before: RST before any byte [B1]"""
    return _only(HangUp(reset=True))


def close_before(_argument: str) -> Fault:
    """close_before: FIN before any byte [B2]"""
    return _only(HangUp())


def cut_head(_argument: str) -> Fault:
    """cut_head: FIN in the middle of the response head [B3]"""
    return _only(Raw(b"HTTP/1.1 200 OK\r\nContent-Le"), HangUp())


def not_http(argument: str) -> Fault:
    """not_http[=ssh|tls|http09|binary]: bytes of another protocol, then FIN [B4]"""
    if argument and argument not in NOT_HTTP:
        raise ValueError(f"one of {', '.join(NOT_HTTP)}")
    return _only(Raw(NOT_HTTP[argument or "ssh"]), HangUp())


def reset(argument: str) -> Fault:
    """reset[=N]: RST after N events, by default 3 [C5]"""
    return _ended_after(count(argument, 3), HangUp(reset=True))


def restart(argument: str) -> Fault:
    """restart[=S]: the server dies at this request, comes back after S seconds with nothing cached or compiled [D1]"""
    down_s = seconds(argument, 0.0) or 0.0

    async def played(_steps: Steps, context: Context) -> Steps:
        context.server.restart_soon(down_s)
        yield Pause(None)

    return played


def idle_close(argument: str) -> Fault:
    """idle_close[=S]: this connection is closed after S idle seconds instead of the profile's, by default 0 [A10]"""
    wait = seconds(argument, 0.0) or 0.0

    async def played(steps: Steps, context: Context) -> Steps:
        context.connection.keep_alive_s = wait
        async for step in steps:
            yield step

    return played


def close_on_reuse(_argument: str) -> Fault:
    """close_on_reuse: a good answer, but the next request on this connection meets a FIN and no byte [A10]"""

    async def played(steps: Steps, context: Context) -> Steps:
        context.connection.closes_on_reuse = True
        async for step in steps:
            yield step

    return played


def surplus(_argument: str) -> Fault:
    """surplus: a whole second response behind the answer, in the same segment [A11]"""

    async def played(steps: Steps, _context: Context) -> Steps:
        chunked, held = False, b""
        async for step in steps:
            if type(step) is bytes:
                if held:
                    yield held
                held = step
            elif type(step) is End:
                yield Raw(framed(held, chunked=chunked) + (b"0\r\n\r\n" if chunked else b"") + SURPLUS)
                yield End(silent=True)
            else:
                chunked = step.length is None if type(step) is Head else chunked
                yield step

    return played


SURPLUS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 18\r\n\r\n" + b'{"smuggled": true}'


def _ended_after(events: int, end: HangUp) -> Fault:
    async def played(steps: Steps, _context: Context) -> Steps:
        seen = 0
        async for step in pieces(steps):
            if type(step) is End or (type(step) is bytes and seen >= events):
                yield end
                return
            seen += type(step) is bytes
            yield step

    return played


FAULTS: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        stall_headers,
        reset_before,
        close_before,
        cut_head,
        not_http,
        reset,
        restart,
        idle_close,
        close_on_reuse,
        surplus,
    )
}

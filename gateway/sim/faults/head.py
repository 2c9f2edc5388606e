"""Faults of the response head, and answers that are errors (catalogue B)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import orjson

from gateway.sim import refusals
from gateway.sim.faults.kinds import Context, Fault, Maker, count, is_anthropic
from gateway.sim.steps import EVENT_STREAM, JSON, End, HangUp, Head, Header, Raw, Steps, plain

HTML = b"<!DOCTYPE html>\n<html><head><title>Welcome</title></head><body><h1>It works!</h1></body></html>\n"
STATUS_TYPES = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError", 503: "ServiceUnavailableError"}


def _head_edit(edit: Callable[[Head], Head]) -> Fault:
    async def played(steps: Steps, _context: Context) -> Steps:
        async for step in steps:
            yield edit(step) if type(step) is Head else step

    return played


def refusing(status: int, message: str, kind: str | None = None, retry_after: str | None = None) -> Fault:
    """The error answer of the server's own kind, in place of any other."""

    def played(_steps: Steps, context: Context) -> Steps:
        refusal = refusals.Refusal(status, message, kind or STATUS_TYPES.get(status, "InternalServerError"))
        headers: tuple[Header, ...] = ((b"retry-after", retry_after.encode()),) if retry_after else ()
        body = refusal.body(context.server.profile.engine, anthropic=is_anthropic(context.request))
        return plain(status, body, headers=headers)

    return played


def status(argument: str) -> Fault:
    """status[=CODE[:RETRY_AFTER]]: an error answer with that status, by default 500 [B14, B15, B16]"""
    code, _, retry_after = argument.partition(":")
    return refusing(int(code or 500), f"simulated error {code or 500}", None, retry_after or None)


def context_400(_argument: str) -> Fault:
    """context_400: the prompt and max_tokens are too long together [B16]"""

    def played(_steps: Steps, context: Context) -> Steps:
        refusal = refusals.budget_too_long(context.server.profile.max_model_len, 100, 4096)
        return plain(400, refusal.body(context.server.profile.engine, anthropic=is_anthropic(context.request)))

    return played


def loading(_argument: str) -> Fault:
    """loading: llama.cpp's 503 while it loads the model [B17]"""
    error = {"code": 503, "message": "Loading model", "type": "unavailable_error"}

    def played(_steps: Steps, _context: Context) -> Steps:
        return plain(503, orjson.dumps({"error": error}))

    return played


def html(argument: str) -> Fault:
    """html[=STATUS]: a web page, by default with 200 [B18]"""
    code = count(argument, 200)

    def played(_steps: Steps, _context: Context) -> Steps:
        return plain(code, HTML, b"text/html; charset=utf-8")

    return played


def no_type(_argument: str) -> Fault:
    """no_type: no content-type header [B18]"""

    def edit(head: Head) -> Head:
        return dataclasses.replace(head, headers=tuple(h for h in head.headers if h[0] != b"content-type"))

    return _head_edit(edit)


def error_200(argument: str) -> Fault:
    """error_200[=CODE]: status 200 with an error body [B19]"""
    error = {"message": "simulated", "type": "InternalServerError", "param": None, "code": count(argument, 500)}

    def played(_steps: Steps, _context: Context) -> Steps:
        return plain(200, orjson.dumps({"error": error}))

    return played


def wrong_mode(_argument: str) -> Fault:
    """wrong_mode: plain JSON where a stream was asked for, a stream where plain JSON was [B20]"""

    async def played(_steps: Steps, context: Context) -> Steps:
        body = orjson.loads(context.request.body)
        body["stream"] = not body.get("stream", False)
        body.pop("stream_options", None)
        async for step in context.server.respond(dataclasses.replace(context.request, body=orjson.dumps(body))):
            yield step

    return played


def bad_status(argument: str) -> Fault:
    """bad_status[=TEXT]: a status line with that status, by default `abc` [B5]"""
    line = (
        b"HTTP/1.1 %s OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}"
        % (argument or "abc").encode()
    )

    async def played(_steps: Steps, _context: Context) -> Steps:
        yield Raw(line)
        yield HangUp()

    return played


def interim(argument: str) -> Fault:
    """interim[=N]: N times 100 Continue before the answer, by default 500 [B6]"""
    times = count(argument, 500)

    async def played(steps: Steps, _context: Context) -> Steps:
        yield Raw(b"HTTP/1.1 100 Continue\r\n\r\n" * times)
        async for step in steps:
            yield step

    return played


def switching(_argument: str) -> Fault:
    """switching: an unasked 101 [B7]"""

    async def played(_steps: Steps, _context: Context) -> Steps:
        yield Raw(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n\x81\x05hello")
        yield HangUp()

    return played


def big_head(argument: str) -> Fault:
    """big_head[=BYTES]: one header value of that size, by default 400,000 [B8]"""
    return _with_headers((b"x-big", b"a" * count(argument, 400_000)))


def many_fields(argument: str) -> Fault:
    """many_fields[=N]: N extra headers, by default 5,000 [B8]"""
    return _with_headers(*((b"x-field-%d" % number, b"1") for number in range(count(argument, 5000))))


def hop_headers(_argument: str) -> Fault:
    """hop_headers: hop-by-hop and hostile headers [B13]"""
    return _with_headers(
        (b"connection", b"x-secret"),
        (b"x-secret", b"do not forward"),
        (b"keep-alive", b"timeout=5"),
        (b"set-cookie", b"a=b"),
        (b"proxy-authenticate", b"Basic"),
        (b"trailer", b"x-late"),
        (b"x-gateway-route", b"forged"),
        (b"server-timing", b"forged;dur=1"),
        (b"access-control-allow-origin", b"*"),
        (b"x-accel-redirect", b"/etc/passwd"),
    )


def redirect(argument: str) -> Fault:
    """redirect[=URL]: 302, by default to a metadata address [B12]"""
    target = (argument or "http://169.254.169.254/").encode()

    def played(_steps: Steps, _context: Context) -> Steps:
        return plain(302, b"", headers=((b"location", target),))

    return played


def cl_and_te(_argument: str) -> Fault:
    """cl_and_te: both content-length and transfer-encoding: chunked [B10]"""

    def edit(head: Head) -> Head:
        length = () if head.length is not None else ((b"content-length", b"5"),)
        return Head(head.status, (*head.headers, *length), None)

    return _head_edit(edit)


def bad_framing(argument: str) -> Fault:
    """bad_framing[=two_lengths|negative|text|coding]: a head whose body has no clear end [B9]"""
    kinds = {
        "two_lengths": b"content-length: 5\r\ncontent-length: 7\r\n",
        "negative": b"content-length: -1\r\n",
        "text": b"content-length: five\r\n",
        "coding": b"transfer-encoding: gzip, chunked\r\n",
    }
    lines = kinds.get(argument or "two_lengths")
    if lines is None:
        raise ValueError(f"one of {', '.join(kinds)}")
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s\r\n5\r\nhello\r\n0\r\n\r\n" % (JSON, lines)

    async def played(_steps: Steps, _context: Context) -> Steps:
        yield Raw(raw)
        yield End(silent=True)

    return played


def error_stream(argument: str) -> Fault:
    """error_stream[=STATUS]: an error status with an event stream as its body, by default 500"""
    code = count(argument, 500)

    async def played(_steps: Steps, _context: Context) -> Steps:
        yield Head(code, ((b"content-type", EVENT_STREAM),))
        yield b'data: {"error":{"message":"simulated","type":"InternalServerError","param":null,"code":%d}}\n\n' % code
        yield End()

    return played


def _with_headers(*headers: Header) -> Fault:
    return _head_edit(lambda head: dataclasses.replace(head, headers=(*head.headers, *headers)))


FAULTS: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        status,
        context_400,
        loading,
        html,
        no_type,
        error_200,
        wrong_mode,
        bad_status,
        interim,
        switching,
        big_head,
        many_fields,
        hop_headers,
        redirect,
        cl_and_te,
        bad_framing,
        error_stream,
    )
}

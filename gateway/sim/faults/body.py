"""Faults of body and stream (catalogue B22, C)."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable

import orjson

from gateway.sim.faults.kinds import Context, Fault, Maker, count, framed, is_anthropic, pieces, seconds
from gateway.sim.steps import End, HangUp, Head, Pause, Raw, Step, Steps

DONE = b"data: [DONE]\n\n"
EMPTY_CHUNK = (
    b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":%s,"finish_reason":null}]}\n\n'
)


def _events(edit: Callable[[bytes, int], list[Step]], *, whole: bool = True) -> Fault:
    """Each event, or piece of a plain body if not `whole`, becomes what `edit(event, number from 0)` gives."""

    async def played(steps: Steps, _context: Context) -> Steps:
        number = 0
        async for step in steps if whole else pieces(steps):
            if type(step) is not bytes:
                yield step
                continue
            for part in edit(step, number):
                yield part
            number += 1

    return played


def _after(events: int, what: Callable[[bool], list[Step]], *, stops: bool = True) -> Fault:
    """After so many events, or at the end if there are fewer, `what(chunked)`; then nothing more if it `stops`."""

    async def played(steps: Steps, _context: Context) -> Steps:
        seen, chunked, done = 0, False, False
        async for step in pieces(steps):
            if type(step) is Head:
                chunked = step.length is None
            if not done and (type(step) is End or (type(step) is bytes and seen == events)):
                done = True
                for part in what(chunked):
                    yield part
                if stops:
                    return
            seen += type(step) is bytes
            yield step

    return played


def stall_first(argument: str) -> Fault:
    """stall_first[=S]: headers, then silence before the first event, for S seconds or for ever [B22]"""
    wait = seconds(argument, None)
    return _after(0, lambda _chunked: [Pause(wait)], stops=False)


def stall(argument: str) -> Fault:
    """stall[=N[:S]]: silence after N events, by default 3, for S seconds or for ever [C7]"""
    events, _, wait_text = argument.partition(":")
    wait = seconds(wait_text, None)
    return _after(count(events, 3), lambda _chunked: [Pause(wait)], stops=False)


def cut(argument: str) -> Fault:
    """cut[=N]: FIN in the middle of a chunk behind N events, by default 3 [C1, C3]"""
    half = framed(b'data: {"id":"chatcmpl-cut","choices":[{"index":0,"delta":{"content":"hal', chunked=False)
    return _after(count(argument, 3), lambda chunked: [Raw(b"ff\r\n" + half if chunked else b'{"c'), HangUp()])


def no_last_chunk(argument: str) -> Fault:
    """no_last_chunk[=N]: FIN between chunks, after N events or after all [C4]"""
    return _after(count(argument, 1_000_000_000), lambda _chunked: [HangUp()])


def bad_chunk(argument: str) -> Fault:
    """bad_chunk[=SIZE]: after 3 events a chunk with that size line, by default `zz` [C6]"""
    return _after(3, lambda _chunked: [Raw((argument or "zz").encode() + b"\r\nhello\r\n"), Pause(None)])


def error_first(argument: str) -> Fault:
    """error_first[=nested|flat|named]: an error as the first event, then [DONE] [C13]"""
    return _error(0, argument)


def error_after(argument: str) -> Fault:
    """error_after[=N[:nested|flat|named]]: an error after N events, by default 3, then [DONE] [C13]"""
    events, _, kind = argument.partition(":")
    return _error(count(events, 3), kind)


def _error(events: int, kind: str) -> Fault:
    if kind not in ("", "nested", "flat", "named"):
        raise ValueError("one of nested, flat, named")
    error = {"message": "simulated engine error", "type": "InternalServerError", "param": None, "code": 500}
    body = orjson.dumps({"object": "error", **error} if kind == "flat" else {"error": error})
    openai: list[Step] = [(b"event: error\n" if kind == "named" else b"") + b"data: " + body + b"\n\n", DONE, End()]
    anthropic = (
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"simulated engine error"}}\n\n'
    )

    def played(steps: Steps, context: Context) -> Steps:
        parts: list[Step] = [anthropic, End()] if is_anthropic(context.request) else openai
        return _after(events, lambda _chunked: parts)(steps, context)

    return played


def wrong_length(argument: str) -> Fault:
    """wrong_length[=N]: content-length N too large, by default 10, then FIN; negative N: too small [C1, C2]"""
    extra = int(argument or 10)

    async def played(steps: Steps, _context: Context) -> Steps:
        async for step in steps:
            if type(step) is Head:
                length = (step.length if step.length is not None else 1_000_000) + extra
                rest = tuple(header for header in step.headers if header[0] != b"content-length")
                yield Head(step.status, (*rest, (b"content-length", b"%d" % length)), length)
            elif type(step) is End:
                yield HangUp()
            else:
                yield step

    return played


def drip(argument: str) -> Fault:
    """drip[=S]: one byte every S seconds, by default 1 [C8]"""
    wait = Pause(seconds(argument, 1.0))
    return _events(lambda event, _number: [part for i in range(len(event)) for part in (event[i : i + 1], wait)])


def split(argument: str) -> Fault:
    """split[=BYTES]: chunks of that size regardless of events and characters, by default 1 [C15]"""
    size = max(1, count(argument, 1))
    return _events(lambda event, _number: [event[i : i + size] for i in range(0, len(event), size)])


def coalesce(argument: str) -> Fault:
    """coalesce[=N]: N events in one chunk, by default all that there are [C18]"""
    size = max(1, count(argument, 1_000_000_000))

    async def played(steps: Steps, _context: Context) -> Steps:
        held: list[bytes] = []
        async for step in steps:
            if type(step) is bytes:
                held.append(step)
            if held and (type(step) is End or len(held) == size):
                yield b"".join(held)
                held = []
            if type(step) is not bytes:
                yield step

    return played


def burst(argument: str) -> Fault:
    """burst[=N]: N tiny extra events in one chunk behind the first one, by default 100,000 [C18]"""
    events = (EMPTY_CHUNK % b'{"content":"x"}') * count(argument, 100_000)
    return _events(lambda event, number: [event, events] if number == 0 else [event])


def endless(argument: str) -> Fault:
    """endless[=S]: the second event again and again, every S seconds, by default 0.01 [C17]"""
    wait = Pause(seconds(argument, 0.01))

    async def played(steps: Steps, _context: Context) -> Steps:
        number = 0
        async for step in steps:
            yield step
            number += type(step) is bytes
            while number == 2:
                yield step
                yield wait

    return played


def no_done(_argument: str) -> Fault:
    """no_done: everything but [DONE] [C10]"""
    return _events(lambda event, _number: [] if event == DONE else [event])


def no_finish(_argument: str) -> Fault:
    """no_finish: a clean end without finish_reason, usage and [DONE] [C9]"""
    return _events(lambda event, _number: [] if event == DONE or _is_finish(event) else [event])


def two_done(_argument: str) -> Fault:
    """two_done: [DONE] twice [C11]"""
    return _events(lambda event, _number: [event, DONE] if event == DONE else [event])


def after_done(_argument: str) -> Fault:
    """after_done: a late delta behind [DONE] [C12]"""
    late = EMPTY_CHUNK % b'{"content":"late"}'
    return _events(lambda event, _number: [event, late] if event == DONE else [event])


def linger(_argument: str) -> Fault:
    """linger: the body stays open behind its last event [C22]"""

    async def played(steps: Steps, _context: Context) -> Steps:
        async for step in steps:
            yield Pause(None) if type(step) is End else step

    return played


def bad_json(_argument: str) -> Fault:
    """bad_json: `data: {oops` behind the first event [C14]"""
    return _events(lambda event, number: [event, b"data: {oops\n\n"] if number == 0 else [event])


def bad_utf8(_argument: str) -> Fault:
    """bad_utf8: a byte FF within the JSON of an event behind the first one [C15]"""
    bad = EMPTY_CHUNK % b'{"content":"\xff"}'
    return _events(lambda event, number: [event, bad] if number == 0 else [event])


def odd_chunks(_argument: str) -> Fault:
    """odd_chunks: empty choices, null deltas and a missing id before the first event [C20]"""
    odd = [
        b'data: {"choices":[],"prompt_filter_results":[]}\n\n',
        b'data: {"choices":[{"index":0,"delta":null,"finish_reason":null}]}\n\n',
        b'data: {"id":null,"usage":null}\n\n',
        EMPTY_CHUNK % b"{}",
    ]
    return _events(lambda event, number: [*odd, event] if number == 0 else [event])


def early_role(_argument: str) -> Fault:
    """early_role: the role chunk right behind the headers, before the prefill, as old servers did"""

    async def played(steps: Steps, _context: Context) -> Steps:
        async for step in steps:
            if type(step) is Head:
                yield step
                yield EMPTY_CHUNK % b'{"role":"assistant","content":""}'
            elif not (type(step) is bytes and b'"role":"assistant"' in step):
                yield step

    return played


def giant(argument: str) -> Fault:
    """giant[=BYTES]: one line of that size, by default 50 MiB, behind the first event [C16]"""
    size = count(argument, 50 * 1024 * 1024)
    piece = b"a" * min(size, 65536)
    pieces_: list[Step] = [
        b'data: {"choices":[{"index":0,"delta":{"content":"',
        *([piece] * (size // max(1, len(piece)))),
    ]
    return _events(lambda event, number: [event, *pieces_, b'"}}]}\n\n'] if number == 0 else [event])


def crlf(_argument: str) -> Fault:
    """crlf: lines end in CR LF [C19]"""
    return _events(lambda event, _number: [event.replace(b"\n", b"\r\n")])


def lone_cr(_argument: str) -> Fault:
    """lone_cr: lines end in CR [C19]"""
    return _events(lambda event, _number: [event.replace(b"\n", b"\r")])


def bom(_argument: str) -> Fault:
    """bom: the stream begins with a byte order mark [C19]"""
    return _events(lambda event, number: [b"\xef\xbb\xbf" + event] if number == 0 else [event])


def id_lines(_argument: str) -> Fault:
    """id_lines: every event has an id line [C19]"""
    return _events(lambda event, number: [b"id: %d\n" % number + event])


def retry_lines(_argument: str) -> Fault:
    """retry_lines: every event has a retry line [C19]"""
    return _events(lambda event, _number: [b"retry: 500\n" + event])


def comments(argument: str) -> Fault:
    """comments[=N]: a comment block before every N-th event, by default before each [C19]"""
    every = max(1, count(argument, 1))
    return _events(lambda event, number: [b": ping\n\n", event] if number % every == 0 else [event])


def usage_everywhere(_argument: str) -> Fault:
    """usage_everywhere: running usage on every chunk, asked for or not"""

    def edit(event: bytes, number: int) -> list[Step]:
        if not event.startswith(b"data: {") or b'"usage"' in event or not event.endswith(b"}\n\n"):
            return [event]
        counts = (7, number, 7 + number)
        usage = b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % counts
        return [event[:-3] + usage]

    return _events(edit)


def trailers(_argument: str) -> Fault:
    """trailers: a header behind the last chunk [C23]"""

    async def played(steps: Steps, _context: Context) -> Steps:
        async for step in steps:
            yield End(((b"x-late", b"trailer"),)) if type(step) is End else step

    return played


def gzip(_argument: str) -> Fault:
    """gzip: a compressed body, asked for or not; streams are flushed at every event [B21]"""

    async def played(steps: Steps, _context: Context) -> Steps:
        packer, head, held = zlib.compressobj(wbits=31), Head(200, ()), b""
        async for step in steps:
            if type(step) is Head:
                rest = tuple(header for header in step.headers if header[0] != b"content-length")
                head = dataclasses.replace(step, headers=(*rest, (b"content-encoding", b"gzip")))
                if step.length is None:
                    yield head
            elif type(step) is bytes:
                packed = packer.compress(step) + packer.flush(zlib.Z_SYNC_FLUSH)
                if head.length is None:
                    yield packed
                else:
                    held += packed
            elif type(step) is End:
                body = held + packer.flush()
                if head.length is not None:
                    yield dataclasses.replace(head, headers=(*head.headers, (b"content-length", b"%d" % len(body))))
                yield body
                yield step
            else:
                yield step

    return played


def _is_finish(event: bytes) -> bool:
    return b'"finish_reason":"' in event or b'"choices":[]' in event


FAULTS: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        stall_first,
        stall,
        cut,
        no_last_chunk,
        bad_chunk,
        error_first,
        error_after,
        wrong_length,
        drip,
        split,
        coalesce,
        burst,
        endless,
        no_done,
        no_finish,
        two_done,
        after_done,
        linger,
        bad_json,
        bad_utf8,
        odd_chunks,
        early_role,
        giant,
        crlf,
        lone_cr,
        bom,
        id_lines,
        retry_lines,
        comments,
        usage_everywhere,
        trailers,
        gzip,
    )
}

"""Request-smuggling corpora through the real server (E6, C146): one verdict at every split, never a hidden request.

The rules are those of the corpora's README. Every target is opened as an opaque path, so that what the gateway takes
does reach the model server, where it is counted. A gateway may be stricter than a source, never laxer.
"""

from __future__ import annotations

import asyncio
import base64
import random
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from tests.support.corpora import rows
from tests.support.raw import RawUpstream, Received, Wire, whole
from tests.support.running import Running, running_gateway, settings_for

# Answers that say "this is no request that we take", and not "there is no such thing here".
REFUSALS = frozenset((400, 408, 413, 414, 431, 501, 505))
# Where refusing is right too (README); so is a 405 for a method that is never forwarded.
MAY_REFUSE = frozenset((
    "many_hosts", "te_not_plain_chunked", "method_connect", "upgrade", "other_version", "target_not_origin_form",
    "underscore_name", "cl_and_te", "size_limit", "proxy_protocol", "non_ascii",
))  # fmt: skip
# Refused by the source for reasons that are not ours: fields that only its own scheme logic reads, and trailer fields,
# which we drop whatever they hold.
NOT_OURS = frozenset(("gunicorn/invalid/019", "gunicorn/invalid/rfc9110_trailer_forbidden_host_01"))
_METHOD = re.compile(rb"(?:GET|POST|PUT|PATCH|DELETE|HEAD|OPTIONS) ")
_TARGET = re.compile(rb"^[A-Z]+ (/[^ ?#]*)", re.MULTILINE)


@dataclass
class Verdict:
    """What a connection's bytes came to."""

    statuses: list[int] = field(default_factory=list)
    is_closed: bool = False
    forwarded: list[tuple[str, str, bytes]] = field(default_factory=list)

    @property
    def taken(self) -> int:
        return sum(status not in REFUSALS for status in self.statuses)


def wire_bytes(row: dict[str, Any]) -> bytes:
    """The row's bytes, with the Host and the body that its source leaves out."""
    data = base64.b64decode(row["bytes_b64"])
    if "no_host" in row["flags"]:
        line, end, rest = data.partition(b"\r\n")
        data = line + end + b"Host: gateway.test\r\n" + rest if end else data
    needed = row.get("body_needed")
    if needed == "chunked":
        data += b"0\r\n\r\n"
    elif needed:
        data += b"a" * int(needed)
    return data


def corpus_of(name: str) -> list[dict[str, Any]]:
    """The rows of a corpus; none where it is absent."""
    return [row for parameter in rows(name) for row in parameter.values if isinstance(row, dict) and row]


def targets() -> list[str]:
    """Every target of the corpora that an opened path can have."""
    found: set[str] = {"/"}
    for name in CORPORA:
        for row in corpus_of(name):
            found |= {match.decode("latin-1") for match in _TARGET.findall(base64.b64decode(row["bytes_b64"]))}
    return sorted(found)


CORPORA = ["http_gunicorn.jsonl", "http_desync_guardian.jsonl", "http_llhttp_requests.jsonl"]


class Probe(asyncio.Protocol):
    """A client connection that keeps what came, also what came before a reset."""

    def __init__(self) -> None:
        self.received = b""
        self.is_closed = False

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> None:
        self.is_closed = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True


async def settle(running: Running, probe: Probe, address: object) -> None:
    """Waits until the gateway has read everything and owes no answer."""
    calm = 0
    for turn in range(20_000):
        await asyncio.sleep(0 if turn % 4 else 0.0002)
        connections: Any = running.server.server_state.connections
        mine = next((connection for connection in connections if connection.client == address), None)
        if mine is None and not probe.is_closed:
            continue  # not accepted yet
        # a request whose body has not come stays as it is, and that is its verdict
        is_busy = mine is not None and mine._is_busy and not mine.cycle.more_body
        calm = 0 if is_busy else calm + 1
        if probe.is_closed or calm > 12:
            return


async def verdict_of(running: Running, upstream: RawUpstream, pieces: list[bytes]) -> Verdict:
    verdict = Verdict()
    upstream.requests.clear()
    transport, probe = await asyncio.get_running_loop().create_connection(Probe, "127.0.0.1", running.port)
    for piece in pieces:
        if transport.is_closing() or probe.is_closed:
            break
        transport.write(piece)
        await asyncio.sleep(0)
    await settle(running, probe, transport.get_extra_info("sockname"))
    received, verdict.is_closed = probe.received, probe.is_closed
    transport.abort()
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        status = int(head.split(b" ")[1])
        if status >= 200:
            verdict.statuses.append(status)
            length = re.search(rb"content-length: (\d+)", head)
            rest = rest[int(length[1]) :] if length else rest
        received = rest
    for _ in range(200):
        if not running.server.server_state.connections and not running.gateway.proxy.running:
            break
        await asyncio.sleep(0)
    verdict.forwarded = [(r.method, r.target, r.body) for r in upstream.requests]
    return verdict


def splits(data: bytes, source: random.Random) -> list[list[bytes]]:
    found = []
    if len(data) < 3000:
        found.append([data[i : i + 1] for i in range(len(data))])
    for _ in range(2):
        cuts = sorted(source.sample(range(1, len(data)), min(4, len(data) - 1)))
        edges = [0, *cuts, len(data)]
        found.append([data[a:b] for a, b in pairwise(edges)])
    return found


def complaint(row: dict[str, Any], data: bytes, verdict: Verdict) -> str | None:
    """What is wrong with a verdict, if anything."""
    most = row.get("requests")
    most = 1 if most is None else most
    expect, flags = row["expect"], frozenset(row["flags"])
    if row["id"] in NOT_OURS or "size_limit" in flags:
        return None
    if len(verdict.forwarded) > most and expect != "unknown":
        return f"{len(verdict.forwarded)} requests reached the upstream, not {most}"
    if any(status == 500 for status in verdict.statuses):
        return "an internal error"
    may_refuse = flags & MAY_REFUSE or ("no_host" in flags and most > 1) or not _METHOD.match(data)
    if expect == "accept" and verdict.taken < most and not may_refuse:
        return f"refused: {verdict.statuses}"
    if expect == "reject" and not row.get("incomplete"):
        if sum(status < 400 for status in verdict.statuses) > most:
            return f"taken: {verdict.statuses}"
        if not verdict.is_closed:
            return f"the connection stays open after {verdict.statuses}"
    if expect == "ambiguous" and verdict.taken and not verdict.is_closed and verdict.taken > 1:
        return f"ambiguous, and {verdict.statuses} on an open connection"
    return None


def same(a: Verdict, b: Verdict) -> bool:
    """Equal, or one is the other up to an answer that closed the connection before the rest had come."""
    for short, long in ((a, b), (b, a)):
        is_part = (
            short.statuses == long.statuses[: len(short.statuses)]
            and short.forwarded == long.forwarded[: len(short.forwarded)]
        )
        if short == long or (short.is_closed and is_part):
            return True
    return False


@pytest.mark.parametrize("name", CORPORA)
async def test_a_corpus_of_hostile_requests_has_one_verdict_at_every_split(name: str) -> None:
    """E6, C146: 4xx and close, or exactly one request upstream with our own framing."""
    corpus = corpus_of(name)
    if not corpus:
        pytest.skip(f"{name} is not here; FIRSTTOKEN_SHARED names the folder that holds data/")

    async def play(request: Received, wire: Wire) -> None:
        assert request.header("transfer-encoding") is None
        assert len([1 for key, _ in request.headers if key.lower() in ("content-length", "host")]) <= 2
        await wire.send(whole(b"{}"))

    source = random.Random(1)
    problems: dict[str, object] = {}
    async with RawUpstream(play) as upstream:
        settings = settings_for(upstream.url, route={"open_paths": targets()})
        async with running_gateway(settings) as running:
            for row in corpus:
                data = wire_bytes(row)
                verdict = await verdict_of(running, upstream, [data])
                if (wrong := complaint(row, data, verdict)) is not None:
                    problems[row["id"]] = (wrong, verdict, data[:120])
                for pieces in splits(data, source):
                    other = await verdict_of(running, upstream, pieces)
                    if not same(verdict, other):
                        problems[row["id"] + " split"] = (verdict, other, data[:200])
                        break
            await running.settled()
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())


async def test_most_of_what_is_good_reaches_the_model_server() -> None:
    """Strictness is no excuse: requests that every parser takes are forwarded, each with its body and one framing."""
    corpus = [row for name in CORPORA for row in corpus_of(name)]
    good = [
        row for row in corpus
        if row["expect"] == "accept" and row.get("requests", 1) == 1 and not set(row["flags"]) & MAY_REFUSE
    ]  # fmt: skip
    if not good:
        pytest.skip("the corpora are not here; FIRSTTOKEN_SHARED names the folder that holds data/")

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(b"{}"))

    forwarded = 0
    async with RawUpstream(play) as upstream:
        async with running_gateway(settings_for(upstream.url, route={"open_paths": targets()})) as running:
            for row in good:
                data = wire_bytes(row)
                verdict = await verdict_of(running, upstream, [data])
                forwarded += len(verdict.forwarded)
                for message in row.get("messages", []):
                    if verdict.forwarded:
                        assert verdict.forwarded[0][2] == base64.b64decode(message["body_b64"]), row["id"]
    assert forwarded > len(good) // 2

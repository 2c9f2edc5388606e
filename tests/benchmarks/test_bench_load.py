"""The load generator and the simulated upstream tell the truth: what they count is what went over the wire."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import measure, native
from benchmarks.measure import Bench
from benchmarks.native import Programs
from benchmarks.processes import ROOT
from benchmarks.workloads import Workload

HAS_COMPILER = shutil.which("gcc") is not None or shutil.which("cc") is not None
PYTHON = Programs((sys.executable, "-m", "benchmarks.upstream"), (sys.executable, "-m", "benchmarks.load"), False)
EVENT = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler here")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture(params=[pytest.param("c", marks=needs_compiler), "python"])
def around(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """The upstream in C, and the one in Python, each with its own load generator."""
    if request.param == "python":
        monkeypatch.setattr(native, "programs", lambda: PYTHON)
    with measure.bench() as found:
        yield found


def test_every_event_of_a_paced_stream_is_counted(around: Bench) -> None:
    work = Workload("x", "", "chunk", clients=4, requests=12, chunks=7, pause_ms=2, limit_s=20)
    sample = measure.measure(around, around.direct(), work)
    assert sample.failures == {}
    assert sample.units == 12 * 7
    assert (sample.ttft_ms["count"], sample.gap_ms["count"], sample.e2e_ms["count"]) == (12, 12 * 6, 12)
    assert sample.e2e_ms["p50"] >= 5 * 2  # uvloop counts whole milliseconds


def test_plain_answers_have_no_first_token(around: Bench) -> None:
    work = Workload("x", "", "plain request", clients=2, requests=20, limit_s=20)
    sample = measure.measure(around, around.direct(), work)
    assert (sample.units, sample.failures, sample.ttft_ms) == (20, {}, {"count": 0})


def test_a_large_prompt_arrives_whole(around: Bench) -> None:
    work = Workload("x", "", "streamed request", requests=3, chunks=2, pause_ms=1, prompt_bytes=1 << 20, limit_s=20)
    assert measure.measure(around, around.direct(), work).failures == {}


@needs_compiler
def test_open_streams_are_held_and_then_left() -> None:
    work = Workload("x", "", "chunk", "hold", clients=30, chunks=10_000, pause_ms=50, hold_s=0.5, limit_s=20)
    with measure.bench() as around:
        sample = measure.measure(around, around.direct(), work)
    assert sample.failures == {}
    assert sample.units >= 30 * 5  # chunks while all were open


@needs_compiler
def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    plan = tmp_path / "plan.txt"
    plan.write_text("0 100 3\n20000 5000 2\n20000 10 1\n60000 10 4\n")
    with measure.bench() as around:
        told = generated(around.upstream_port, "--mode=trace", f"--trace={plan}", "--clients=8")
    assert (told["requests"], told["events"]) == (4, 10)
    assert float(str(told["wall_s"])) >= 0.06


# Answers that are not as they should be


@contextmanager
def answering(answer: bytes, *, byte_by_byte: bool = False) -> Iterator[int]:
    """A server that gives one client this answer and closes."""

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.recv(65536)
            for piece in [answer[i : i + 1] for i in range(len(answer))] if byte_by_byte else [answer]:
                connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(10)


def generated(port: int, *arguments: str) -> dict[str, object]:
    """What the load generator in C tells."""
    command = [*native.programs().load, f"--port={port}", "--limit-s=20", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=30)
    told: dict[str, object] = json.loads(done.stdout)
    return told


def failures(told: dict[str, object]) -> dict[str, int]:
    kinds = told["failures"]
    assert isinstance(kinds, dict)
    return {kind: count for kind, count in kinds.items() if count}


STREAM = HEAD + chunk(EVENT) + chunk(b": comment\n\n" + EVENT + EVENT) + chunk(DONE) + b"0\r\n\r\n"


@needs_compiler
@pytest.mark.parametrize("byte_by_byte", [False, True])
def test_events_are_found_however_the_bytes_are_cut(byte_by_byte: bool) -> None:
    with answering(STREAM, byte_by_byte=byte_by_byte) as port:
        told = generated(port, "--requests=1", "--chunks=3")
    assert (failures(told), told["events"]) == ({}, 3)
    if not byte_by_byte:
        assert (told["reads"], told["coalesced"]) == (1, 2)


@needs_compiler
@pytest.mark.parametrize(
    "answer,kind",
    [
        (HEAD + chunk(EVENT), "cut_short"),
        (HEAD + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n", "wrong_events"),
        (HEAD + chunk(EVENT * 3) + b"0\r\n\r\n", "wrong_events"),  # never said that it was done
        (HEAD + b"zz\r\n", "bad_bytes"),
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "bad_status"),
        (b"", "cut_short"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(answer: bytes, kind: str) -> None:
    with answering(answer) as port:
        told = generated(port, "--requests=1", "--chunks=3")
    assert (failures(told), told["requests"]) == ({kind: 1}, 0)


@needs_compiler
def test_nobody_listening_is_told_and_not_hammered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told = generated(port, "--requests=100000", "--clients=3")
    assert failures(told) == {"no_connection": 3}

"""Runs one real client in an environment of its own: a job per line on stdin, its outcome as one line on stdout.

    ENVIRONMENT/bin/python serve.py openai_sdk

A job is JSON: `url` (of the gateway, without `/v1`), `stream`, `retries` (null: as many as the client makes by itself),
`headers`, `body` (fields added to the request), `leave_after` (pieces of text, then the client leaves), `chunk_timeout`
(seconds; LangChain). This file is run by the client's own Python: it knows nothing of the gateway or its tests.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Said:
    """What the user of a client got to see."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    pieces: int = 0  # of text
    error: dict[str, str] | None = None
    has_left: bool = False
    ended_ns: int = 0  # monotonic, the same clock in all processes of a machine

    def add(self, text: str | None, reasoning: str | None = None) -> None:
        if text:
            self.text += text
            self.pieces += 1
        if reasoning:
            self.reasoning += reasoning

    def leaves(self, job: dict[str, Any]) -> bool:
        """Whether the user has had enough, as the job says."""
        self.has_left = job.get("leave_after") is not None and self.pieces >= job["leave_after"]
        return self.has_left


def outcome_of(client: Any, job: dict[str, Any]) -> Said:
    said = Said()
    try:
        client.run(job, said)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is what its user sees
        said.error = {"class": type(error).__name__, "message": str(error)}
    said.ended_ns = time.monotonic_ns()
    if said.has_left:
        gc.collect()  # LlamaIndex lets go of its connection when the generator is collected, and not before
    return said


def main() -> None:
    jobs = sys.stdin  # taken before a client's library puts its own in place
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not look like an outcome
    client = importlib.import_module(sys.argv[1])
    os.write(answers, b"ready\n")
    for line in jobs:
        outcome = asdict(outcome_of(client, json.loads(line)))
        data = json.dumps(outcome).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]


if __name__ == "__main__":
    main()

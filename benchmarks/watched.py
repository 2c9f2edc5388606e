"""The gateway's command line in a process that tells how many tasks and objects it holds. For soak.py.

Asyncio tasks cannot be counted from outside. A thread answers each connection to BENCH_WATCH_PORT with one JSON object;
beside that the process is what `firsttoken` is.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import threading
from collections import Counter

from gateway.cli import main

MOST_TYPES = 12


def counts() -> dict[str, object]:
    """Live tasks, and objects that the collector knows, the most frequent types by name."""
    gc.collect()  # what is still there after it is held by something
    objects = gc.get_objects()
    types = Counter(type(thing).__qualname__ for thing in objects)
    tasks = sum(1 for thing in objects if isinstance(thing, asyncio.Task) and not thing.done())
    return {"tasks": tasks, "objects": len(objects), "types": dict(types.most_common(MOST_TYPES))}


def answer_all(listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(json.dumps(counts()).encode())


if __name__ == "__main__":
    watch = socket.create_server(("127.0.0.1", int(os.environ["BENCH_WATCH_PORT"])))
    threading.Thread(target=answer_all, args=(watch,), daemon=True, name="watch").start()
    sys.exit(main(sys.argv[1:]))

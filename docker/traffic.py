"""Callers for the demo profile of docker/compose.yaml: `python docker/traffic.py URL [SECONDS]`.

Some ask as they are, some on the route without thinking, some with too few tokens, some leave before the end.
Needs nothing but Python; not a load test.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import threading
import time
from urllib.parse import urlsplit

CALLERS = 6  # more than the simulated server has places, so that a queue is seen
PAUSE_S = (0.2, 2.0)
TIMEOUT_S = 60
MODEL = "deepseek-v4"
PROMPTS = (
    "你好",
    "为什么第一个字这么慢？———— 请用一句话回答。",
    "Why is it slow?",
    "Sort these numbers: " + " ".join(map(str, range(400))),
)


def call(address: str, path: str, fields: dict[str, object], leave_after_s: float | None) -> None:
    """One request, read to its end or for so many seconds."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": random.choice(PROMPTS)}], **fields}
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        began = time.monotonic()
        while response.readline():
            if leave_after_s is not None and time.monotonic() - began > leave_after_s:
                return
    finally:
        connection.close()


def calls(address: str, until: float) -> None:
    """One caller: request after request with pauses, whatever comes back."""
    plain = "/v1/chat/completions"
    kinds: list[tuple[str, dict[str, object], float | None]] = [
        ("/fast" + plain, {"stream": True}, None),
        ("/fast" + plain, {"stream": True}, None),
        ("/fast" + plain, {}, None),
        (plain, {"stream": True}, None),
        (plain, {"stream": True, "max_tokens": 64}, None),  # thinking uses it up
        (plain, {"stream": True}, 1.0),  # leaves
    ]
    while time.monotonic() < until:
        path, fields, leave_after_s = random.choice(kinds)
        try:
            call(address, path, fields, leave_after_s)
        except (OSError, http.client.HTTPException) as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        time.sleep(random.uniform(*PAUSE_S))  # noqa: TID251 - threads; there is no event loop to block


def main() -> int:
    """Until the time is over; for ever without one."""
    url = urlsplit(sys.argv[1])
    until = time.monotonic() + float(sys.argv[2]) if len(sys.argv) > 2 else float("inf")
    threads = [threading.Thread(target=calls, args=(url.netloc, until), daemon=True) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())

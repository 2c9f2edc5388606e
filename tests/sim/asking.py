"""Asking the simulated server in memory, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.sim.client import Client, Response
from gateway.sim.profiles import FAST
from gateway.sim.transport import Server

Serving = Callable[..., Server]

PACED = FAST.with_fields(overhead_s=0.5, decode_tokens_per_s=10, answer_tokens=(4, 4))
HELLO = [{"role": "user", "content": "hello"}]
OFF = {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}


async def asked(server: Server, path: str, body: dict[str, object] | bytes | None = None, **options: Any) -> Response:
    """The answer to one request on a connection of its own."""
    _, client = await server.connect(Client)
    client.ask(path, body, **options)
    response = await client.response()
    client.transport.close()
    return response


async def chat(server: Server, **body: object) -> Response:
    """The answer to a chat request with these further fields."""
    return await asked(server, "/v1/chat/completions", {"model": server.profile.models[0], "messages": HELLO, **body})


def delta(chunk: Any) -> Any:
    """The delta of a chunk's first choice."""
    return chunk["choices"][0]["delta"]

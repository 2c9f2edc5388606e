"""`anthropic` for Python: `messages.create`, whole and as raw events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anthropic import Anthropic

if TYPE_CHECKING:
    from tests.clients.drivers.serve import Said


def run(job: dict[str, Any], said: Said) -> None:
    more = {} if job["retries"] is None else {"max_retries": job["retries"]}
    with Anthropic(
        base_url=job["url"], api_key="EMPTY", default_headers=job["headers"], timeout=job["timeout"], **more
    ) as client:
        answer: Any = client.messages.create(
            model="m",
            max_tokens=64,
            messages=[{"role": "user", "content": "hi"}],
            stream=job["stream"],
            extra_body=job["body"],
        )
        if job["stream"]:
            _read(answer, job, said)
        else:
            for block in answer.content:
                said.add(getattr(block, "text", None), getattr(block, "thinking", None))
            said.finish = answer.stop_reason


def _read(stream: Any, job: dict[str, Any], said: Said) -> None:
    for event in stream:
        if event.type == "content_block_delta":
            said.add(getattr(event.delta, "text", None), getattr(event.delta, "thinking", None))
        elif event.type == "message_delta":
            said.finish = event.delta.stop_reason
        if said.leaves(job):
            stream.close()
            return

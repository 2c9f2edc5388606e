"""`openai` for Python, whichever version is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openai import OpenAI

if TYPE_CHECKING:
    from tests.clients.drivers.serve import Said


def run(job: dict[str, Any], said: Said) -> None:
    retries = {} if job["retries"] is None else {"max_retries": job["retries"]}
    with OpenAI(
        base_url=job["url"] + "/v1", api_key="EMPTY", default_headers=job["headers"], timeout=job["timeout"], **retries
    ) as client:
        answer: Any = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            stream=job["stream"],
            extra_body=job["body"],
        )
        if job["stream"]:
            _read(answer, job, said)
        else:
            message = answer.choices[0].message
            said.add(message.content, (message.model_extra or {}).get("reasoning_content"))
            said.finish = answer.choices[0].finish_reason


def _read(stream: Any, job: dict[str, Any], said: Said) -> None:
    for chunk in stream:
        for choice in chunk.choices:
            said.add(choice.delta.content, (choice.delta.model_extra or {}).get("reasoning_content"))
            said.finish = choice.finish_reason or said.finish
        if said.leaves(job):
            stream.close()
            return

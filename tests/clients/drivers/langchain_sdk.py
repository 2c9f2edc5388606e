"""`langchain-openai`: `invoke`, `stream`, and with `"async": true` in the job `ainvoke` and `astream`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from langchain_openai import ChatOpenAI
from openai import DefaultAsyncHttpxClient

if TYPE_CHECKING:
    from tests.clients.drivers.serve import Said


def run(job: dict[str, Any], said: Said) -> None:
    if job.get("async"):
        asyncio.run(_run(job, said))
        return
    model = _model(job)
    if not job["stream"]:
        _take(model.invoke("hi"), said)
        return
    chunks = model.stream("hi")
    for chunk in chunks:
        _take(chunk, said)
        if said.leaves(job):
            chunks.close()
            return


async def _run(job: dict[str, Any], said: Said) -> None:
    async with DefaultAsyncHttpxClient(timeout=job["timeout"]) as http_client:  # its own would outlive this loop
        model = _model(job, http_async_client=http_client)
        if not job["stream"]:
            _take(await model.ainvoke("hi"), said)
            return
        chunks = model.astream("hi")
        async for chunk in chunks:
            _take(chunk, said)
            if said.leaves(job):
                await chunks.aclose()
                return


def _model(job: dict[str, Any], **more: Any) -> Any:
    if job["retries"] is not None:
        more["max_retries"] = job["retries"]
    if job.get("chunk_timeout") is not None:
        more["stream_chunk_timeout"] = job["chunk_timeout"]
    return ChatOpenAI(
        model="m",
        base_url=job["url"] + "/v1",
        api_key="EMPTY",
        timeout=job["timeout"],
        default_headers=job["headers"],
        extra_body=job["body"] or None,
        **more,
    )


def _take(message: Any, said: Said) -> None:
    said.add(message.content)
    said.finish = message.response_metadata.get("finish_reason") or said.finish

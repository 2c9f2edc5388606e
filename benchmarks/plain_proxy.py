"""What people write themselves: forty lines of FastAPI and httpx. One of the benchmark's targets; nothing of ours."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.background import BackgroundTask

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host", "content-length"}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=512)
    async with httpx.AsyncClient(base_url=os.environ["BENCH_UPSTREAM"], limits=limits, timeout=None) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


@app.api_route("/{path:path}", methods=["GET", "POST"])
async def relay(path: str, request: Request) -> Response:
    client: httpx.AsyncClient = request.app.state.client
    headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP]
    ask = client.build_request(request.method, f"/{path}", headers=headers, content=await request.body())
    answer = await client.send(ask, stream=True)
    kept = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
    return StreamingResponse(
        answer.aiter_raw(), answer.status_code, headers=kept, background=BackgroundTask(answer.aclose)
    )

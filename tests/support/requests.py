"""Requests as bytes, for tests that look at framing."""

from __future__ import annotations

from tests.support.raw import RawClient, Received, Response, Wire, answer, chat, whole

BODY = chat(stream=False)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway.test\r\n"
GOOD = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


async def answers(request: Received, wire: Wire) -> None:
    """A model server that answers everything."""
    await wire.send(whole(answer()))


async def told(client: RawClient) -> Response:
    """The answer to a request that is refused; the connection must end with it."""
    response = await client.response()
    assert response.header("connection") == "close"
    assert response.header("x-request-id")
    assert set(response.json) == {"error", "request_id"}
    assert await client.at_end()
    return response

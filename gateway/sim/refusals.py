"""Answers that are errors, in the words and envelopes of the real servers (upstream contract, section 4.2)."""

from __future__ import annotations

import orjson

from gateway.sim.profiles import EngineKind


class Refusal(Exception):
    """The request is answered with an error. `param` and `kind` are the envelope's; `retry_after` a header."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "BadRequestError",
        param: str | None = None,
        retry_after: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.retry_after = retry_after

    def body(self, engine: EngineKind = "vllm", anthropic: bool = False) -> bytes:
        """The JSON body, in the shape of the server and of the API that was asked."""
        if anthropic:
            error: dict[str, object] = {"type": _ANTHROPIC.get(self.status, self.kind), "message": self.message}
            return orjson.dumps({"type": "error", "error": error})
        if engine == "llamacpp":
            kind = _LLAMACPP.get(self.status, "server_error")
            return orjson.dumps({"error": {"code": self.status, "message": self.message, "type": kind}})
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


_ANTHROPIC = {400: "invalid_request_error", 404: "not_found_error", 503: "overloaded_error", 500: "api_error"}
_LLAMACPP = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    503: "unavailable_error",
}

NOT_FOUND = b'{"detail":"Not Found"}'  # FastAPI's own, not the envelope
METHOD_NOT_ALLOWED = b'{"detail":"Method Not Allowed"}'
UNAUTHORIZED = b'{"error":"Unauthorized"}'  # a string, no envelope


def validation(detail: str, param: str | None) -> Refusal:
    """pydantic's complaint about the body."""
    return Refusal(400, f"1 validation error:\n  {detail}", "Bad Request", param)


def invalid(message: str, param: str, value: object = None) -> Refusal:
    """vLLM's own check of one parameter."""
    suffix = f"(parameter={param})" if value is None else f"(parameter={param}, value={value})"
    return Refusal(400, f"{message} {suffix}", "BadRequestError", param)


def schema_error(kind: str, field: str, message: str) -> Refusal:
    """pydantic's complaint about one field."""
    return validation(f"{{'type': '{kind}', 'loc': 'body.{field}', 'msg': {message!r}}}", f"body.{field}")


def missing(field: str) -> Refusal:
    return schema_error("missing", field, "Field required")


def invalid_json(position: int, reason: str) -> Refusal:
    return schema_error("json_invalid", str(position), f"JSON decode error: {reason}")


def unknown_model(name: str, known: tuple[str, ...]) -> Refusal:
    message = f"The model `{name}` does not exist. Valid aliases: {', '.join(known)}."
    return Refusal(404, message, "NotFoundError", "model")


def prompt_too_long(limit: int, tokens: int) -> Refusal:
    return invalid(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {tokens} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
        "input_tokens",
        tokens,
    )


def budget_too_long(limit: int, tokens: int, max_tokens: int) -> Refusal:
    """What vLLM up to 0.30 and llama.cpp-like servers say when prompt and max_tokens do not fit together."""
    return invalid(
        f"This model's maximum context length is {limit} tokens. However, you requested {max_tokens} output tokens "
        f"and your prompt contains {tokens} input tokens, for a total of {tokens + max_tokens} tokens. "
        "Please reduce the length of the input prompt or the number of requested output tokens.",
        "input_tokens",
        tokens,
    )


def queue_full() -> Refusal:
    return Refusal(
        503, "The server is overloaded: too many queued requests. Please retry later.", "Service Unavailable"
    )

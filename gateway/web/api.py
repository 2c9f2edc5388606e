"""The control plane: health, metrics, status, timelines, reload. FastAPI; no request for a model passes here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.exceptions import HTTPException as StarletteHTTPException

from gateway import __version__
from gateway.reload import reload_now
from gateway.upstream.standing import OTHER
from gateway.web.exposition import page_of
from gateway.web.pending import add_pending
from gateway.web.status import breakers_of, status_of

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.config import Key


def control_plane(gateway: Gateway) -> FastAPI:
    """The application for one gateway."""
    app = FastAPI(
        title="Firsttoken",
        version=__version__,
        description="Control plane of the gateway.",
        docs_url=None,  # with keys set they are for admins, see `_add_docs`
        openapi_url=None,
        redoc_url=None,
        redirect_slashes=False,  # nothing redirects; `Gateway` takes the odd slashes out before
    )
    _add_errors(app)
    _add_health(app, gateway)
    _add_views(app, gateway)
    _add_breakers(app, gateway)
    add_pending(app, gateway, lambda request: _caller(gateway, request))
    _add_docs(app, gateway)
    return app


def _caller(gateway: Gateway, request: Request) -> Key | None:
    """The key of a request; None when the gateway is open. Raises 401."""
    runtime = gateway.runtime
    if runtime.keys.is_open:
        return None
    key = runtime.keys.find([(name.lower(), value) for name, value in request.scope["headers"]])
    if key is None:
        raise HTTPException(
            401, "This key is not known here, or none was sent.", headers={"www-authenticate": "Bearer"}
        )
    return key


def _only_admin(gateway: Gateway) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets admins pass, and everybody where there are no keys."""

    async def admin(request: Request) -> None:
        key = _caller(gateway, request)
        if key is not None and not key.admin:
            raise HTTPException(403, "This needs a key with `admin: true`.")

    return admin


def _add_health(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health", tags=["health"], summary="Is the process alive?")
    @app.get("/healthz", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.head("/healthz", include_in_schema=False)
    async def health() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    @app.get("/readyz", tags=["health"], summary="Can it serve?")
    @app.head("/readyz", include_in_schema=False)
    async def ready(response: Response) -> dict[str, object]:
        """200 while an upstream is usable and the process is not draining, else 503."""
        is_ready = gateway.runtime.is_ready and not gateway.is_draining
        response.status_code = 200 if is_ready else 503
        upstreams = {name: state.is_up for name, state in gateway.runtime.upstreams.items()}
        return {"ready": is_ready, "draining": gateway.is_draining, "upstreams": upstreams}


def _add_views(app: FastAPI, gateway: Gateway) -> None:
    only_admin = [Depends(_only_admin(gateway))]

    @app.get("/metrics", tags=["metrics"], dependencies=only_admin, response_class=Response)
    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            gateway.metrics.flush()
            page, content_type = await asyncio.to_thread(_page_of_all, accept)  # reads files, and takes its time
        else:
            page, content_type = page_of(gateway.metrics, accept)
        return Response(page, headers={"content-type": content_type})

    @app.get("/gateway/status", tags=["status"], dependencies=only_admin)
    async def status() -> dict[str, object]:
        return status_of(gateway)

    @app.get("/gateway/requests/{request_id:path}", tags=["status"])
    async def timeline(request_id: str, request: Request) -> dict[str, object]:
        """The times of a recent request. Everybody may see those of their own; admins see all."""
        key = _caller(gateway, request)
        record = gateway.account.find(request_id)
        if record is None or (key is not None and not key.admin and record["key"] != key.name):
            raise HTTPException(404, "No such request among the recent ones of this worker.")
        return record

    @app.post("/gateway/reload", tags=["admin"], dependencies=only_admin)
    async def reload(response: Response) -> dict[str, object]:
        """Reads the settings file again, in the worker that got this call. SIGHUP reaches all workers."""
        problems = reload_now(gateway)
        response.status_code = 422 if problems else 200
        return {"reloaded": not problems, "problems": problems}


def _add_breakers(app: FastAPI, gateway: Gateway) -> None:
    only_admin = [Depends(_only_admin(gateway))]

    @app.post("/gateway/upstreams/{name}/breaker/{action}", tags=["admin"], dependencies=only_admin)
    async def breaker(name: str, action: str, model: str | None = None) -> dict[str, object]:
        """Sets the circuit breakers of an upstream (of one `model`, or all) in this worker: `force_open` takes it out,
        `disable` never opens, `metrics_only` counts without opening, `reset` closes."""
        state = gateway.runtime.upstreams.get(name)
        if state is None:
            raise HTTPException(404, "There is no upstream of that name.")
        if action not in ("force_open", "disable", "metrics_only", "reset"):
            raise HTTPException(404, "The actions are force_open, disable, metrics_only and reset.")
        standing = state.standing
        labels = [standing.label(model)] if model is not None else [*standing.names, *standing.breakers, OTHER]
        for label in dict.fromkeys(labels):
            getattr(standing.breaker(standing.label(label)), action)(gateway.clock())
        return {"upstream": name, "breakers": breakers_of(state, gateway.clock())}


def _add_docs(app: FastAPI, gateway: Gateway) -> None:
    only_admin = [Depends(_only_admin(gateway))]

    @app.get("/gateway/openapi.json", include_in_schema=False, dependencies=only_admin)
    async def schema() -> dict[str, object]:
        return app.openapi()

    @app.get("/gateway/docs", include_in_schema=False, dependencies=only_admin)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(openapi_url="/gateway/openapi.json", title="Firsttoken")


def _page_of_all(accept: str) -> tuple[bytes, str]:
    """The page that adds up all workers, from the files that they share."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _add_errors(app: FastAPI) -> None:
    """Errors of the control plane in the same shape as everywhere."""

    @app.exception_handler(StarletteHTTPException)
    async def refused(_request: Request, error: StarletteHTTPException) -> JSONResponse:
        codes = {
            401: "unauthorized", 403: "route_forbidden", 404: "not_found", 405: "method_not_allowed", 410: "expired",
            503: "overloaded",
        }  # fmt: skip
        return _error(error.status_code, codes.get(error.status_code, "bad_request"), str(error.detail), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, _cause: RequestValidationError) -> JSONResponse:
        return _error(422, "bad_request", "The request is not valid.")

    @app.exception_handler(Exception)
    async def failed(_request: Request, _cause: Exception) -> JSONResponse:
        return _error(500, "internal", "The gateway failed on this request; its log says where.")


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    body = {"error": {"message": message, "type": "gateway_error", "param": None, "code": code}}
    return JSONResponse(body, status, headers=headers)

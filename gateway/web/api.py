"""The control plane: health, metrics, status, timelines, reload. FastAPI; no request for a model passes here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.exceptions import HTTPException as StarletteHTTPException

from gateway import __version__
from gateway.web.status import status_of

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.config import Key


def control_plane(gateway: Gateway) -> FastAPI:
    """The application for one gateway."""
    app = FastAPI(
        title="Firsttoken",
        version=__version__,
        description="Control plane of the gateway.",
        docs_url="/gateway/docs",
        openapi_url="/gateway/openapi.json",
        redoc_url=None,
    )
    _add_errors(app)
    _add_health(app, gateway)
    _add_views(app, gateway)
    return app


def _caller(gateway: Gateway, request: Request) -> Key | None:
    """The key of a request; None when the gateway is open. Raises 401."""
    keys = gateway.runtime.keys
    if not gateway.settings.keys:
        return None
    key = keys.find([(name.lower(), value) for name, value in request.scope["headers"]])
    if key is None:
        raise HTTPException(
            401, "This key is not known here, or none was sent.", headers={"www-authenticate": "Bearer"}
        )
    return key


def _add_health(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health", tags=["health"], summary="Is the process alive?")
    @app.get("/healthz", tags=["health"], include_in_schema=False)
    async def health() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    @app.get(
        "/readyz", tags=["health"], summary="Can it serve? 200 while an upstream is usable and it is not draining."
    )
    async def ready(response: Response) -> dict[str, object]:
        is_ready = gateway.runtime.is_ready and not gateway.is_draining
        response.status_code = 200 if is_ready else 503
        upstreams = {name: state.is_up for name, state in gateway.runtime.upstreams.items()}
        return {"ready": is_ready, "draining": gateway.is_draining, "upstreams": upstreams}


def _add_views(app: FastAPI, gateway: Gateway) -> None:
    async def admin(request: Request) -> None:
        key = _caller(gateway, request)
        if key is not None and not key.admin:
            raise HTTPException(403, "This needs a key with `admin: true`.")

    only_admin = [Depends(admin)]

    @app.get("/metrics", tags=["metrics"], dependencies=only_admin, response_class=Response)
    async def metrics(request: Request) -> Response:
        gateway.metrics.flush()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(_page(gateway.registry)), media_type=None, headers={"content-type": content_type})

    @app.get("/gateway/status", tags=["status"], dependencies=only_admin)
    async def status() -> dict[str, object]:
        return status_of(gateway)

    @app.get("/gateway/requests/{request_id}", tags=["status"])
    async def timeline(request_id: str, key: Annotated[object, Depends(caller)]) -> dict[str, object]:
        record = gateway.account.find(request_id)
        owner = getattr(key, "name", None)
        if record is None or (key is not None and not getattr(key, "admin", False) and record["key"] != owner):
            raise HTTPException(404, "No such request among the recent ones of this worker.")
        return record

    @app.post("/gateway/reload", tags=["admin"], dependencies=only_admin)
    async def reload(response: Response) -> dict[str, object]:
        from gateway.reload import reload_now

        problems = reload_now(gateway)
        response.status_code = 422 if problems else 200
        return {"reloaded": not problems, "problems": problems}

    app.dependency_overrides[caller] = lambda request: _caller(gateway, request)


async def caller(request: Request) -> object:
    """Placeholder that `control_plane` replaces with the gateway's own check."""
    raise HTTPException(500, f"no gateway behind {request.url.path}")


def _page(registry: CollectorRegistry) -> CollectorRegistry:
    """The registry of this process, or with several workers one that adds up all of theirs."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return registry
    merged = CollectorRegistry()
    MultiProcessCollector(merged)  # type: ignore[no-untyped-call]
    return merged


def _add_errors(app: FastAPI) -> None:
    """Errors of the control plane in the same shape as everywhere."""

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
        codes = {401: "unauthorized", 403: "route_forbidden", 404: "not_found", 405: "method_not_allowed"}
        code = codes.get(error.status_code, "bad_request")
        body = {"error": {"message": str(error.detail), "type": "gateway_error", "param": None, "code": code}}
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        body = {
            "error": {
                "message": "The request is not valid.",
                "type": "gateway_error",
                "param": None,
                "code": "bad_request",
            }
        }
        return JSONResponse(body, 422)

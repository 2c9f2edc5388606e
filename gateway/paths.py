"""Which paths are of the data plane, whatever route prefix stands before them, and what they are for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gateway.errors import NoRoute
from gateway.policy.routes import canonical_hint, normalise_path
from gateway.wire.kinds import Kind, kind_of

if TYPE_CHECKING:
    from gateway.config import Route
    from gateway.runtime import Runtime

METHODS: dict[str | None, tuple[str, ...]] = {
    "models": ("GET", "HEAD"),
    None: ("GET", "POST"),
    "stored": ("GET", "POST"),
}


def endpoint_of(path: str) -> Kind | Literal["models", "stored"] | None:
    """What a path is for, whatever route prefix stands before it; None when it is not of the data plane."""
    kind = kind_below(path)
    if kind is not None:
        return kind
    start = path.find("/v1/")
    below = path[start:] if start >= 0 else ""
    if below == "/v1/models" or below.startswith("/v1/models/"):
        return "models"
    return "stored" if below.startswith("/v1/responses/") else None


def kind_below(path: str) -> Kind | None:
    """The kind of a data-plane path that a route's prefix may stand before."""
    kind = kind_of(path)
    if kind is not None:
        return kind
    slash = path.find("/", 1)
    while slash > 0:  # a route's prefix may be several segments long
        kind = kind_of(path[slash:])
        if kind is not None:
            return kind
        slash = path.find("/", slash + 1)
    return None


def path_of_model(path: str) -> str | None:
    """The path of one model's entry, whose name may hold what no other path may (`org%2Fname`). It stays here."""
    before, mark, name = path.partition("/v1/models/")
    canonical = normalise_path(before + "/v1/models") if mark else None
    return f"{canonical}/{name}" if canonical is not None and name else None


def no_such_path(path: str) -> NoRoute:
    hint = canonical_hint(path) or (
        "Inference endpoints are under /v1; a server's admin paths are closed unless a route opens them."
    )
    return NoRoute(f"There is no such path here. {hint}", reason="unknown_path")


def is_served(rest: str, route: Route) -> bool:
    """Whether the path that would go upstream may: what stood before it was the route's prefix or nothing."""
    return kind_of(rest) is not None or rest.startswith("/v1/responses/") or rest in route.open_paths


def is_open(path: str, runtime: Runtime) -> bool:
    return any(path.endswith(opened) for opened in runtime.open_paths)

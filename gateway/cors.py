"""Browser pages of other origins (C139). Nothing is sent unless `cors.origins` names some, and then only to those.

Credentials in the sense of cookies are never allowed: a page sends its key as a header, which it must ask for and
which a preflight answers. Preflights are answered here and never reach a model server.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from gateway.errors import RouteForbidden
from gateway.wire.headers import first

if TYPE_CHECKING:
    from gateway.config import Cors
    from gateway.exchange import Call, Exchange
    from gateway.wire.headers import Headers

METHODS: Final = b"GET, POST, HEAD"
# What a page may read of our answers besides the few fields that every page may.
EXPOSED: Final = (
    b"x-request-id, x-gateway-route, x-gateway-upstream, x-gateway-attempts, x-gateway-changes, server-timing, "
    b"retry-after, x-should-retry, x-gateway-failures, location, preference-applied"
)
_FIELD_NAMES: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~ \t,-]{1,2048}\Z")


class CorsRules:
    """The `cors` section, ready to use."""

    def __init__(self, config: Cors) -> None:
        names = {origin.rstrip("/").lower().encode("utf-8") for origin in config.origins}
        self._is_any = b"*" in names
        self._origins = frozenset(names)
        self._max_age = b"%d" % config.max_age_s

    def __repr__(self) -> str:
        return f"CorsRules({len(self._origins)} origins)"

    def answer(self, x: Exchange, call: Call) -> bool:
        """Notes the fields that this request's answer carries; answers it when it is a preflight, and says so.

        Raises RouteForbidden for the preflight of an origin that is not listed.
        """
        origin = first(call.headers, b"origin")
        if origin is None:
            return False
        allowed = self._allowed(origin)
        x.cors = [] if self._is_any else [(b"vary", b"origin")]
        if allowed is not None:
            x.cors.append((b"access-control-allow-origin", allowed))
            x.cors.append((b"access-control-expose-headers", EXPOSED))
        if call.method != "OPTIONS" or first(call.headers, b"access-control-request-method") is None:
            return False
        if allowed is None:
            raise RouteForbidden(
                "Pages of this origin may not call the gateway; `cors.origins` lists those that may.", reason="origin"
            )
        x.status = 204
        x.settle("complete")
        call.start(204, self._preflight(x, call, allowed), None)
        call.end()
        return True

    def _allowed(self, origin: bytes) -> bytes | None:
        """The value of Access-Control-Allow-Origin, None for an origin that is not listed."""
        if self._is_any:
            return b"*"
        return origin if origin.lower() in self._origins else None

    def _preflight(self, x: Exchange, call: Call, allowed: bytes) -> Headers:
        fields = [
            (b"access-control-allow-origin", allowed),
            (b"access-control-allow-methods", METHODS),
            (b"access-control-max-age", self._max_age),
            (b"vary", b"origin, access-control-request-method, access-control-request-headers"),
            (b"x-request-id", x.request_id.encode("ascii")),
        ]
        wanted = first(call.headers, b"access-control-request-headers")
        if wanted is not None and _FIELD_NAMES.match(wanted):
            fields.append((b"access-control-allow-headers", wanted))
        return fields

"""The settings: one frozen, typed tree. `configfile.py` reads YAML into it; nothing here does I/O.

Names are those of the documentation, units are in the names (`_ms`, `_s`, `_mb`). Unknown keys are errors.
Secrets are `Secret`s: they never show in `repr`, logs or `check`.
"""

from __future__ import annotations

import hashlib
import ipaddress
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator

Secret = SecretStr
Engine = Literal["auto", "vllm", "sglang", "llamacpp", "ollama", "openai"]
OnExceed = Literal["wait", "heartbeat", "pending", "fallback", "hedge", "fail"]
Balance = Literal["auto", "round_robin", "least_inflight", "prefix"]
BreakerMode = Literal["on", "metrics_only", "off"]
Thinking = Literal["client", "off", "on"]

DEFAULT_ROUTE_NAME = "default"
MAX_ALLOWED_RUN = 512  # characters; spec.md §5: a longer run of one character is quadratic in some tokenizers


def _switch(value: object) -> object:
    """YAML 1.1 reads `off` and `on` as booleans; both spellings mean the word."""
    if value is False:
        return "off"
    if value is True:
        return "on"
    return value


ThinkingSetting = Annotated[Thinking, BeforeValidator(_switch)]


class Model(BaseModel):
    """Base of every settings object: frozen, and a key that is not known is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, str_strip_whitespace=True)


class Listen(Model):
    """Where the gateway listens, and what it takes from clients."""

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    max_body_mb: float = Field(64, gt=0, le=4096)
    max_buffered_mb: float = Field(1024, gt=0)  # request bodies held at one time, all clients together
    admin: str | None = None  # "host:port": /metrics and /gateway on a second listener
    header_timeout_s: float = Field(10, gt=0)  # whole request head; fault-catalogue 5.0
    body_idle_timeout_s: float = Field(30, gt=0)
    body_timeout_s: float = Field(120, gt=0)
    keep_alive_s: float = Field(75, gt=0)  # above every client's own idle limit, so that they close first
    write_stall_s: float = Field(30, gt=0)  # a reader that takes nothing for this long is dropped
    half_close: Literal["abort", "wait"] = "abort"  # a FIN is how most clients leave; HAProxy's abortonclose
    drain_delay_s: float = Field(0, ge=0)
    drain_timeout_s: float = Field(300, ge=0)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1024 * 1024)

    @property
    def max_buffered_bytes(self) -> int:
        return int(self.max_buffered_mb * 1024 * 1024)

    @field_validator("admin")
    @classmethod
    def _admin_is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value


class Key(Model):
    """A key that opens routes. Only its SHA-256 is kept in memory after start."""

    name: str = Field(min_length=1, max_length=64)
    key: Secret | None = None
    sha256: str | None = Field(None, pattern=r"^[0-9a-fA-F]{64}$")
    routes: tuple[str, ...] | None = None  # None: every route
    admin: bool = False
    requests_per_minute: int | None = Field(None, ge=1)
    concurrent: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either `key` (from the environment, like ${NAME}) or `sha256`")
        if self.key is not None and not self.key.get_secret_value():
            raise ValueError("the key is empty; is its environment variable set?")
        return self

    def digest(self) -> bytes:
        """SHA-256 of the key's bytes."""
        if self.sha256 is not None:
            return bytes.fromhex(self.sha256)
        assert self.key is not None
        return hashlib.sha256(self.key.get_secret_value().encode()).digest()


class Tls(Model):
    """TLS towards an upstream. There is no fallback to unverified or plain."""

    ca_file: str | None = None
    server_name: str | None = None
    verify: bool = True


class Breaker(Model):
    """Circuit breaker of one upstream, one per model (fault-catalogue 3.2); names are resilience4j's."""

    mode: Annotated[BreakerMode, BeforeValidator(_switch)] = "on"
    failure_rate_threshold: float = Field(50, gt=0, le=100)  # %; opens at or above
    slow_call_rate_threshold: float = Field(80, gt=0, le=100)  # %
    slow_call_duration_ms: int = Field(10_000, ge=1)  # TTFT; slow above this and above 3 × what was predicted
    consecutive_failures: int = Field(3, ge=1)  # ejects one upstream of several, whatever the rates
    minimum_calls: int = Field(10, ge=1)
    window_s: float = Field(30, gt=0)
    wait_open_ms: int = Field(5_000, ge=1)  # doubles each time in a row
    max_wait_open_ms: int = Field(60_000, ge=1)
    half_open_calls: int = Field(2, ge=1)  # a cold GPU must not get ten


class Warmup(Model):
    """Requests that an upstream answers before it takes live traffic (latency-methods §4)."""

    enabled: bool = False
    model: str | None = None  # None: the first of the server's own list
    prompt_tokens: tuple[int, ...] = (16, 512, 2049)
    streams: tuple[int, ...] = (1, 2, 3, 8, 16)
    decode_tokens: int = Field(32, ge=1, le=4096)
    body: dict[str, Any] = {}  # fields added to every request: tools, response_format, chat_template_kwargs …
    timeout_s: float = Field(300, gt=0)


class Upstream(Model):
    """One model server."""

    url: str
    engine: Engine = "auto"
    family: str = "auto"
    api_key: Secret | None = None
    max_inflight: int | None = Field(None, ge=1)
    max_connections: int = Field(1024, ge=1)
    max_queue: int | None = Field(None, ge=0)  # requests that wait for a slot; None: as many as `max_inflight`
    max_queue_wait_ms: int = Field(2000, ge=0)  # waiting for a slot; fault-catalogue 5.0
    keep_alive_s: float = Field(3, ge=0)  # vLLM closes idle connections at 5 s, so ours must go first; 0: no reuse
    max_connection_age_s: float = Field(300, gt=0)  # so that a changed address behind a name is found
    tls: Tls = Tls()
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    include_usage: Literal["auto", "always", "never"] = "auto"
    warmup: Warmup = Warmup()
    breaker: Breaker = Breaker()

    @field_validator("warmup", mode="before")
    @classmethod
    def _warmup_or_not(cls, value: object) -> object:
        return {"enabled": value} if isinstance(value, bool) else value

    @field_validator("url")
    @classmethod
    def _url_is_usable(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https"):
            raise ValueError("must start with http:// or https://")
        if not parts.hostname:
            raise ValueError("has no host name")
        if parts.query or parts.fragment:
            raise ValueError("must not have a query or a fragment")
        if parts.username or parts.password:
            raise ValueError("must not hold a user name or password; use `api_key`")
        _ = parts.port  # raises ValueError when it is not a number below 65536
        return value.rstrip("/").removesuffix("/v1")

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def is_tls(self) -> bool:
        return self.url.startswith("https://")

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or (443 if self.is_tls else 80)

    @property
    def base_path(self) -> str:
        """Path before `/v1`, without a slash at its end; usually empty."""
        return urlsplit(self.url).path.rstrip("/")


class Match(Model):
    """Which requests a route takes: all that are given must hold; an empty match takes everything."""

    prefix: str | None = None
    models: tuple[str, ...] = ()  # literal names or globs
    paths: tuple[str, ...] = ()  # globs over the path after the prefix
    headers: dict[str, str] = {}  # name: glob over the value
    keys: tuple[str, ...] = ()  # names of keys

    @field_validator("prefix")
    @classmethod
    def _prefix_is_a_path(cls, value: str | None) -> str | None:
        if value is None:
            return None
        value = "/" + value.strip("/")
        if value == "/":
            return None
        if value == "/gateway" or value.startswith(("/gateway/", "/v1/")) or value == "/v1":
            raise ValueError("must not begin with /v1 or /gateway, which have a meaning of their own")
        return value


class MaxTokens(Model):
    """Token budget rules; see docs/policies.md."""

    default: int | None = Field(None, ge=1)
    floor: int | None = Field(None, ge=1)
    ceiling: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.floor and self.ceiling and self.floor > self.ceiling:
            raise ValueError("`floor` is above `ceiling`")
        if self.default and self.ceiling and self.default > self.ceiling:
            raise ValueError("`default` is above `ceiling`")
        return self


class Clean(Model):
    """Which cleaning steps run on a route's prompts (spec.md §5)."""

    control: bool = True
    dashes: bool = True
    long_runs: bool = True
    roles: bool = True
    whitespace: Literal["keep", "collapse"] = "keep"

    @property
    def is_off(self) -> bool:
        return not (self.control or self.dashes or self.long_runs or self.roles or self.whitespace == "collapse")


class Budget(Model):
    """First-token budget: time from the request's arrival to the first token of any channel."""

    ttft_ms: int | None = Field(None, ge=1)
    ttfv_ms: int | None = Field(None, ge=1)
    on_exceed: OnExceed = "heartbeat"
    fallback: str | None = None  # a route or an upstream; also asked when no upstream of the route can be used
    heartbeat_ms: int = Field(10_000, ge=50)  # no interactive connection is silent longer; latency-methods §7

    @model_validator(mode="before")
    @classmethod
    def _fallback_in_one_place(cls, data: Any) -> Any:
        """`on_exceed: {fallback: NAME}` says the same as `on_exceed: fallback` with `fallback: NAME`."""
        if isinstance(data, dict) and isinstance(data.get("on_exceed"), dict):
            inner = data["on_exceed"]
            if set(inner) == {"fallback"} and "fallback" not in data:
                return {**data, "on_exceed": "fallback", "fallback": inner["fallback"]}
        return data

    @model_validator(mode="after")
    def _fallback_is_named(self) -> Self:
        if self.on_exceed == "fallback" and self.fallback is None:
            raise ValueError("`on_exceed: fallback` needs `fallback`, the name of a route or an upstream")
        return self


class Timeouts(Model):
    """Limits of one attempt at an upstream, each with an error of its own."""

    connect_ms: int = Field(2000, ge=1)
    first_token_ms: int = Field(120_000, ge=1)
    idle_ms: int = Field(60_000, ge=1)
    total_ms: int = Field(1_800_000, ge=1)


class Route(Model):
    """What happens to the requests that match."""

    name: str = Field(DEFAULT_ROUTE_NAME, min_length=1, max_length=64)
    match: Match = Match()
    upstreams: tuple[str, ...] = Field(min_length=1)
    model: str | None = None
    thinking: ThinkingSetting = "client"
    max_tokens: MaxTokens = MaxTokens()
    defaults: dict[str, Any] = {}
    override: dict[str, Any] = {}
    drop: tuple[str, ...] = ()
    clean: Clean = Clean()
    budget: Budget = Budget()
    timeouts: Timeouts = Timeouts()
    rescue: bool = False
    balance: Balance = "auto"
    idempotent: bool | None = None  # None: by endpoint; True or False: a request may, or may not, be sent twice
    pending: Literal["allow", "always", "never"] = "allow"
    stream_upstream: bool = False  # plain calls go up as streams and are put together here
    open_paths: tuple[str, ...] = ()  # server paths outside the data plane that this route lets through

    @field_validator("upstreams", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class Cors(Model):
    """Cross-origin access for browser clients; nothing is sent unless origins are named."""

    origins: tuple[str, ...] = ()
    max_age_s: int = Field(600, ge=0)


class Pending(Model):
    """Bounds of the answers that callers come back for."""

    max_result_mb: float = Field(8, gt=0)
    max_total_mb: float = Field(256, gt=0)
    max_count: int = Field(1000, ge=1)
    ttl_s: float = Field(600, gt=0)  # after the end


class Settings(Model):
    """The whole configuration."""

    listen: Listen = Listen()
    auth: Literal["keys", "none"] | None = None
    keys: tuple[Key, ...] = ()
    upstreams: dict[str, Upstream] = Field(min_length=1)
    routes: tuple[Route, ...] = ()
    pending: Pending = Pending()
    store: str = Field(
        "memory", repr=False
    )  # may hold a password; or valkey://host:6379/0, redis://… (extra `firsttoken[valkey]`)
    cors: Cors = Cors()
    log: Literal["auto", "json", "text"] = "auto"

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, value: str) -> str:
        if value == "memory":
            return value
        parts = urlsplit(value)
        if parts.scheme not in ("valkey", "valkeys", "redis", "rediss") or not parts.hostname:
            raise ValueError("must be `memory` or an address like valkey://host:6379/0 (redis:// too)")
        return value

    @model_validator(mode="before")
    @classmethod
    def _a_route_for_everything(cls, data: Any) -> Any:
        """No routes given: one that takes every request to the upstreams, in order."""
        if isinstance(data, dict) and not data.get("routes") and isinstance(data.get("upstreams"), dict):
            names = [str(name) for name in data["upstreams"]]
            if names:
                return {**data, "routes": [{"name": DEFAULT_ROUTE_NAME, "upstreams": names}]}
        return data

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> list[str]:
        found: list[str] = []
        names = [route.name for route in self.routes]
        found += [f"two routes are called `{name}`" for name in sorted({n for n in names if names.count(n) > 1})]
        keys = [key.name for key in self.keys]
        found += [f"two keys are called `{name}`" for name in sorted({n for n in keys if keys.count(n) > 1})]
        for route in self.routes:
            found += [
                f"route `{route.name}`: no upstream is called `{u}`" for u in route.upstreams if u not in self.upstreams
            ]
            found += [f"route `{route.name}`: no key is called `{k}`" for k in route.match.keys if k not in keys]
            other = route.budget.fallback
            if other is not None and (other == route.name or (other not in names and other not in self.upstreams)):
                found.append(f"route `{route.name}`: `fallback` needs another route or an upstream; `{other}` is none")
        for key in self.keys:
            found += [f"key `{key.name}`: no route is called `{r}`" for r in key.routes or () if r not in names]
        if not self.keys and self.auth is None and not is_loopback(self.listen.host):
            found.append(
                f"`listen.host` is {self.listen.host}, reachable from other machines, and no `keys` are set: "
                "add keys, or say `auth: none` if that is meant"
            )
        if self.auth == "keys" and not self.keys:
            found.append("`auth: keys` is set but there are no `keys`")
        return found


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses; a name that would need resolving is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split_address(text: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as a pair; ValueError with a sentence otherwise."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError("must look like host:port, for example 127.0.0.1:9090")
    return host.strip("[]"), int(port)

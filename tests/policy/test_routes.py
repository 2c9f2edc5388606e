"""Which route takes a request, and what a path means."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Key, Settings
from gateway.policy.routes import Found, RouteTable, canonical_hint, compile_routes, may_use, normalise_path

CHAT = "/v1/chat/completions"


def table(*routes: dict[str, object], keys: tuple[str, ...] = ()) -> RouteTable:
    return compile_routes(
        Settings.model_validate(
            {
                "upstreams": {"thor": {"url": "http://127.0.0.1:8000"}},
                "keys": [{"name": name, "sha256": "0" * 64} for name in keys],
                "routes": [{"upstreams": ["thor"], **route} for route in routes],
            }
        )
    )


def found(
    routes: RouteTable,
    path: str = CHAT,
    model: str | None = None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    key: str | None = None,
) -> str | None:
    """`name path-after-prefix` of the route that was found."""
    match = routes.find(path, model, headers, key)
    return None if match is None else f"{match.route.name} {match.rest}"


def test_without_routes_everything_goes_to_the_default_route() -> None:
    routes = compile_routes(Settings.model_validate({"upstreams": {"thor": {"url": "http://127.0.0.1:8000"}}}))
    assert found(routes, model="anything") == f"default {CHAT}"
    assert found(routes, "/", model=None) == "default /"


def test_the_first_route_that_matches_wins() -> None:
    routes = table(
        {"name": "a", "match": {"models": ["m*"]}}, {"name": "b", "match": {"models": ["mm"]}}, {"name": "c"}
    )
    assert found(routes, model="mm") == f"a {CHAT}"
    assert found(routes, model="x") == f"c {CHAT}"
    assert found(routes, model=None) == f"c {CHAT}"


@pytest.mark.parametrize(
    "path, expected",
    [
        ("/fast/v1/chat/completions", "fast /v1/chat/completions"),
        ("/fast", "fast /"),
        ("/faster/v1/models", "rest /faster/v1/models"),
        ("/fastv1/models", "rest /fastv1/models"),
        ("/Fast/v1/models", "rest /Fast/v1/models"),
        ("/team/a/v1/models", "a /v1/models"),
        ("/team/b/v1/models", "team /b/v1/models"),
        ("/team/ab/v1/models", "team /ab/v1/models"),
        ("/v1/models", "rest /v1/models"),
        ("/", "rest /"),
    ],
)
def test_a_prefix_is_whole_segments_and_is_taken_off(path: str, expected: str) -> None:
    routes = table(
        {"name": "rest"},
        {"name": "fast", "match": {"prefix": "/fast"}},
        {"name": "team", "match": {"prefix": "team/"}},
        {"name": "a", "match": {"prefix": "/team/a"}},
    )
    assert found(routes, path) == expected


def test_a_prefix_whose_conditions_fail_is_not_served_by_the_route_for_everything() -> None:
    """`/fast/v1/…` on a route without prefix would ask the model server for a path it does not have."""
    routes = table({"name": "fast", "match": {"prefix": "/fast", "paths": ["/v1/chat/*"]}}, {"name": "rest"})
    assert found(routes, "/fast/v1/embeddings") is None


def test_a_prefix_and_a_model_name_are_two_doors_to_one_route() -> None:
    """The settings of the README: `base_url: …/fast/v1` with any model, or `deepseek-v4-fast` on the plain `/v1`."""
    routes = table(
        {"name": "fast", "match": {"prefix": "/fast", "models": ["deepseek-v4-fast", "*-nothinking"]}}, {"name": "deep"}
    )
    assert found(routes, "/fast/v1/chat/completions", model="deepseek-v4") == "fast /v1/chat/completions"
    assert found(routes, "/v1/chat/completions", model="deepseek-v4-fast") == "fast /v1/chat/completions"
    assert found(routes, "/v1/chat/completions", model="qwen-nothinking") == "fast /v1/chat/completions"
    assert found(routes, "/v1/chat/completions", model="deepseek-v4") == "deep /v1/chat/completions"


def test_routes_of_one_prefix_are_told_apart_by_the_model() -> None:
    routes = table(
        {"name": "a", "match": {"prefix": "/p", "models": ["x"]}},
        {"name": "b", "match": {"prefix": "/p", "models": ["y"]}},
    )
    assert found(routes, "/p/v1/chat/completions", model="y") == "b /v1/chat/completions"
    assert found(routes, "/p/v1/chat/completions", model="z") == "a /v1/chat/completions"


def test_a_prefix_in_chinese_is_found_encoded_and_as_raw_bytes() -> None:
    """C141: nobody's route is unreachable because of the language of its name."""
    routes = table({"name": "日本", "match": {"prefix": "/日本"}})
    for spelling in (
        "/%E6%97%A5%E6%9C%AC/v1/models",
        "/%e6%97%a5%e6%9c%ac/v1/models",
        "/日本/v1/models".encode().decode("latin-1"),
    ):
        path = normalise_path(spelling)
        assert path is not None
        assert found(routes, path) == "日本 /v1/models"


@pytest.mark.parametrize(
    "globs, model, is_match",
    [
        (["deepseek-v4"], "deepseek-v4", True),
        (["deepseek-v4"], "deepseek-v4-fast", False),
        (["deepseek-v4"], "Deepseek-V4", False),
        (["*-nothinking"], "qwen3-nothinking", True),
        (["*-nothinking"], "qwen3-nothinking-x", False),
        (["a", "b?", "c[12]"], "b1", True),
        (["a", "b?", "c[12]"], "c3", False),
        (["a.c"], "abc", False),
        (["*"], "a\nb", True),
        (["*"], None, False),
        (["a"], None, False),
        (["通义*"], "通义千问", True),
    ],
)
def test_models_match_by_name_or_glob(globs: list[str], model: str | None, is_match: bool) -> None:
    assert (found(table({"name": "r", "match": {"models": globs}}), model=model) is not None) is is_match


@pytest.mark.parametrize(
    "value, is_match",
    [(b"gold", True), (b"goldfish", True), (b"silver", False), ("gold – 金".encode(), True), (b"gold\xff", True)],
)
def test_headers_match_by_glob_whatever_their_bytes(value: bytes, is_match: bool) -> None:
    routes = table({"name": "r", "match": {"headers": {"X-Tier": "gold*"}}})
    assert (found(routes, headers=((b"accept", b"*/*"), (b"x-tier", value))) is not None) is is_match


def test_every_header_condition_must_hold_and_any_of_several_values_will_do() -> None:
    routes = table({"name": "r", "match": {"headers": {"a": "1", "b": "2"}}})
    assert found(routes, headers=((b"a", b"1"),)) is None
    assert found(routes, headers=((b"a", b"0"), (b"a", b"1"), (b"b", b"2"))) == f"r {CHAT}"


def test_paths_match_after_the_prefix() -> None:
    routes = table({"name": "r", "match": {"prefix": "/x", "paths": ["/v1/embeddings", "/v1/audio/*"]}})
    assert found(routes, "/x/v1/embeddings") == "r /v1/embeddings"
    assert found(routes, "/x/v1/audio/speech") == "r /v1/audio/speech"
    assert found(routes, "/x/v1/models") is None


def test_keys_match_by_name() -> None:
    routes = table({"name": "r", "match": {"keys": ["dify"]}}, keys=("dify", "other"))
    assert found(routes, key="dify") == f"r {CHAT}"
    assert found(routes, key="other") is None
    assert found(routes, key=None) is None


def test_all_conditions_of_a_route_must_hold() -> None:
    routes = table({"name": "r", "match": {"models": ["m"], "paths": ["/v1/*"], "keys": ["k"]}}, keys=("k",))
    assert found(routes, model="m", key="k") == f"r {CHAT}"
    assert found(routes, model="x", key="k") is None
    assert found(routes, "/tokenize", model="m", key="k") is None
    assert found(routes, model="m") is None


def test_only_literal_model_names_are_listed_each_once_in_order() -> None:
    routes = table(
        {"name": "a", "match": {"models": ["fast", "*-nothinking", "b?"]}},
        {"name": "b", "match": {"models": ["deep", "fast", "[x]"]}},
    )
    assert routes.model_names() == ("fast", "deep")
    key = Key(name="k", sha256="0" * 64, routes=("b",))
    assert routes.model_names(key) == ("deep", "fast")
    assert repr(routes) == "RouteTable(a, b)"


def test_a_key_opens_the_routes_it_names_or_all() -> None:
    match = table({"name": "fast"}).find(CHAT, None, (), None)
    assert isinstance(match, Found)
    assert may_use(Key(name="k", sha256="0" * 64), match.route)
    assert may_use(Key(name="k", sha256="0" * 64, routes=("fast",)), match.route)
    assert not may_use(Key(name="k", sha256="0" * 64, routes=("deep",)), match.route)
    assert not may_use(Key(name="k", sha256="0" * 64, routes=()), match.route)


@pytest.mark.parametrize(
    "path, expected",
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat///completions//", "/v1/chat/completions"),
        ("/V1/Chat/Completions", "/V1/Chat/Completions"),
        ("/v1/models/org/name:1.5", "/v1/models/org/name:1.5"),
        ("/v1/models/...", "/v1/models/..."),
        ("/v1/models/.hidden", "/v1/models/.hidden"),
        ("/v1/models/a%20b", "/v1/models/a%20b"),
        ("/", "/"),
        ("///", "/"),
    ],
)
def test_slashes_too_many_are_served_without_a_redirect(path: str, expected: str) -> None:
    """C137: a base URL with a slash at its end, or two in the middle, works."""
    assert normalise_path(path) == expected


@pytest.mark.parametrize(
    "path",
    [
        "",
        "*",
        "v1/models",
        "http://evil/v1/models",
        "/v1/../metrics",
        "/v1/./models",
        "/v1/..",
        "/v1/%2e%2e/metrics",
        "/v1/%2E./metrics",
        "/v1/..%2fmetrics",
        "/v1%2Fmodels",
        "/v1/%5c..%5cmetrics",
        "/v1/models;x=1",
        "/v1/models%3bx=1",
        "/v1/models%00",
        "/v1/models%0d%0aX:1",
        "/v1/models%7f",
        "/v1/%6dodels",
        "/v1/%252e%252e/metrics",
        "/v1/models%",
        "/v1/models%2",
        "/v1/models%zz",
        "/v1\\models",
        "/v1/models\x00",
        "/v1/models\r\nX: 1",
        "/v1/models x",
        "/v1/models?x=1",
        "/v1/models%3fx",
        "/v1/models#x",
        "/v1/models%23x",
        "/v1/<x>",
    ],
)
def test_spellings_that_two_readers_could_take_differently_are_no_path(path: str) -> None:
    """C138: `..`, encoded dots and slashes reach no other path than the rules saw."""
    assert normalise_path(path) is None


@given(st.text(alphabet=string.printable + "é日\x80\xff" + "%./\\;", max_size=60))
def test_what_is_left_of_any_path_is_plain_and_stays_as_it_is(path: str) -> None:
    normal = normalise_path("/" + path)
    if normal is not None:
        assert normalise_path(normal) == normal
        assert normal.isascii()
        assert normal.startswith("/")
        assert "//" not in normal
        assert not {".", ".."} & set(normal.split("/"))


@pytest.mark.parametrize(
    "path, word",
    [
        ("/v1/v1/chat/completions", "without /v1"),
        ("/fast/v1/v1/messages", "without /v1"),
        ("/chat/completions", "should end in /v1"),
        ("/fast/models/", "should end in /v1"),
        ("/v2/embeddings", "should end in /v1"),
        ("/V1/Chat/Completions", "case-sensitive"),
        ("/v1/chat/Completions", "case-sensitive"),
    ],
)
def test_a_wrong_base_url_is_explained(path: str, word: str) -> None:
    """C137: `/v1/v1`, a missing `/v1` and capital letters are answered with what to change."""
    hint = canonical_hint(path)
    assert hint is not None
    assert word in hint


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1//models/", "/metrics", "/", ""])
def test_a_path_that_is_right_or_means_nothing_gets_no_hint(path: str) -> None:
    assert canonical_hint(path) is None

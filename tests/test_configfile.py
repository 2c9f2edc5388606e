"""From a YAML file to settings, and what people are told about their mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.config import Settings
from gateway.configfile import MAX_FILE_BYTES, ConfigProblems, Loaded, fingerprint, for_upstream, from_mapping, load
from gateway.mistakes import is_secret, settings_tree

UPSTREAM = "upstreams: {thor: {url: http://127.0.0.1:8000}}\n"

Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(content: str | bytes) -> Path:
        path = tmp_path / "gateway.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


def problems_of(path: Path, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        load(path, environ or {})
    return [str(problem) for problem in caught.value.problems]


def hints_of(path: Path) -> list[str | None]:
    with pytest.raises(ConfigProblems) as caught:
        load(path, {})
    return [problem.hint for problem in caught.value.problems]


SPEC_EXAMPLE = """
listen: {host: 127.0.0.1, port: 8080, max_body_mb: 64}
keys:
  - {name: dify, key: ${DIFY_KEY}, routes: [fast], requests_per_minute: 600, concurrent: 32}
upstreams:
  thor: {url: http://10.0.0.5:8000, engine: auto, family: auto, api_key: ${VLLM_KEY:-EMPTY}, max_inflight: 64, warmup: true}
routes:
  - name: fast
    match: {prefix: /fast, models: ["deepseek-v4-fast", "*-nothinking"]}
    upstreams: [thor]
    model: deepseek-v4
    thinking: off
    max_tokens: {default: 1024, floor: 256, ceiling: 8192}
    defaults: {temperature: 0.3}
    override: {}
    drop: [logit_bias]
    clean: {control: true, dashes: true, long_runs: true, roles: true, whitespace: keep}
    budget: {ttft_ms: 2000, on_exceed: heartbeat}
    timeouts: {connect_ms: 2000, first_token_ms: 120000, idle_ms: 60000, total_ms: 1800000}
  - name: deep
    upstreams: [thor]
    thinking: client
store: memory
"""


def test_the_example_of_the_contract_loads_and_says_what_is_not_enforced_yet(write: Write) -> None:
    loaded = load(write(SPEC_EXAMPLE), {"DIFY_KEY": "sk-dify"})
    fast, deep = loaded.settings.routes
    assert (fast.thinking, deep.thinking) == ("off", "client")
    assert fast.match.models == ("deepseek-v4-fast", "*-nothinking")
    assert fast.defaults == {"temperature": 0.3}
    key = loaded.settings.keys[0].key
    assert key is not None
    assert key.get_secret_value() == "sk-dify"
    assert [(warning.path, warning.line) for warning in loaded.warnings] == [
        ("keys[0].requests_per_minute", 4),
        ("keys[0].concurrent", 4),
    ]
    assert "sk-dify" not in repr(loaded)


def test_every_problem_is_told_at_once_with_path_line_and_hint(write: Write) -> None:
    path = write(
        """\
listen: {host: 0.0.0.0, prot: 1, max_body_mb: many, port: 99999}
keys:
  - {name: dify, key: ${DIFY_KEY}}
  - sk-abcdef
upstream: {}
upstreams:
  thor: {url: ftp://x, engine: vlm, api_key: 12}
  "a.b": {urll: http://x}
routes:
  - name: fast
    upstream: [thor]
    thinking: of
    budget: {ttft_ms: fast, on_exceed: hegde}
    max_tokens: {floor: 300, ceiling: 200}
    timeouts: {connect_ms: 0}
    rescue: maybe
    defaults: 3
    match: {prefix: /v1}
  - {upstreams: [], drop: x}
store: valkey://x
"""
    )
    assert problems_of(path) == [
        "line 1: listen.port: must be at most 65535",
        "line 1: listen.max_body_mb: must be a number",
        "line 1: listen: unknown key `prot`",
        "line 3: keys[0].key: the environment variable `DIFY_KEY` is not set",
        "line 4: keys[1]: must be `key: value` lines",
        "line 5: unknown key `upstream`",
        "line 7: upstreams.thor.url: must start with http:// or https://",
        "line 7: upstreams.thor.engine: must be `auto`, `vllm`, `sglang`, `llamacpp`, `ollama` or `openai`",
        "line 7: upstreams.thor.api_key: must be text",
        "line 8: upstreams['a.b'].url: is missing",
        "line 8: upstreams['a.b']: unknown key `urll`",
        "line 10: routes[0].upstreams: is missing",
        "line 11: routes[0]: unknown key `upstream`",
        "line 12: routes[0].thinking: must be `client`, `off` or `on`",
        "line 13: routes[0].budget.ttft_ms: must be a whole number",
        "line 13: routes[0].budget.on_exceed: must be `wait`, `heartbeat`, `pending`, `fallback`, `hedge` or `fail`",
        "line 14: routes[0].max_tokens: `floor` is above `ceiling`",
        "line 15: routes[0].timeouts.connect_ms: must be at least 1",
        "line 16: routes[0].rescue: must be `true` or `false`",
        "line 17: routes[0].defaults: must be `key: value` lines",
        "line 18: routes[0].match.prefix: must not begin with /v1 or /gateway, which have a meaning of their own",
        "line 19: routes[1].upstreams: must not be empty",
        "line 19: routes[1].drop: must be a list",
    ]


@pytest.mark.parametrize(
    "text, hint",
    [
        ("upstream: {}\n" + UPSTREAM, "did you mean `upstreams`?"),
        ("routes: [{name: a, upstreams: thor, Max-Tokens: {}}]\n" + UPSTREAM, "did you mean `max_tokens`?"),
        ("routes: [{name: a, upstreams: thor, max_token: {}}]\n" + UPSTREAM, "did you mean `max_tokens`?"),
        ("routes: [{name: a, upstreams: thor, budget: {ttft: 3}}]\n" + UPSTREAM, "did you mean `ttft_ms`?"),
        ("routes: [{name: a, upstreams: thor, ttft_ms: 3}]\n" + UPSTREAM, "there is such a setting elsewhere: `routes[].budget.ttft_ms`"),
        ("prefix: /x\n" + UPSTREAM, "there is such a setting elsewhere: `routes[].match.prefix`"),
        ("cors: {zzz: 1}\n" + UPSTREAM, "known here: `origins`, `max_age_s`"),
        ("upstreams: {thor: {url: http://x, tls: {verfy: false}}}\n", "did you mean `verify`?"),
        ("{}", "name at least one model server: `upstreams: {main: {url: http://127.0.0.1:8000}}`"),
        ("upstreams: {}\n", "name at least one model server: `upstreams: {main: {url: http://127.0.0.1:8000}}`"),
        ("routes: [{upstreams: [thro]}]\n" + UPSTREAM, "did you mean `thor`?"),
        ("routes: [{upstreams: [zzz]}]\n" + UPSTREAM, "there are: `thor`"),
        ("routes: [{upstreams: thor, match: {keys: [zzz]}}]\n" + UPSTREAM, "there are no `keys`"),
        ("routes: [{upstreams: thor, match: {keys: [diffy]}}]\nkeys: [{name: dify, key: x}]\n" + UPSTREAM, "did you mean `dify`?"),
    ],
)  # fmt: skip
def test_the_hint_names_what_would_be_right(write: Write, text: str, hint: str) -> None:
    assert hints_of(write(text)) == [hint]


def test_names_that_do_not_agree_are_told_beside_other_mistakes(write: Write) -> None:
    path = write(
        """\
listen: {host: 0.0.0.0, port: x}
upstreams: {thor: {url: http://x}}
routes:
  - {name: a, upstreams: [thro]}
  - {name: a, upstreams: thor}
  - {name: b, upstreams: thor, match: {keys: [k]}}
"""
    )
    assert problems_of(path) == [
        "line 1: listen.port: must be a whole number",
        "line 1: listen.host: is 0.0.0.0, reachable from other machines, and no `keys` are set: "
        "add keys, or say `auth: none` if that is meant",
        "line 4: routes[0]: no upstream is called `thro`",
        "line 5: routes[1]: two routes are called `a`",
        "line 6: routes[2]: no key is called `k`",
    ]


def test_keys_that_do_not_agree_are_told_with_their_place(write: Write) -> None:
    path = write("keys:\n  - {name: a, key: x, routes: [deflt]}\n  - {name: a, key: y}\n" + UPSTREAM)
    assert problems_of(path) == [
        "line 2: keys[0]: no route is called `deflt`",
        "line 3: keys[1]: two keys are called `a`",
    ]
    assert problems_of(write("auth: keys\n" + UPSTREAM)) == [
        "line 1: auth: `auth: keys` is set but there are no `keys`"
    ]


def test_an_unset_variable_is_one_problem_not_two(write: Write) -> None:
    path = write("upstreams: {thor: {url: ${URL}}}\nroutes: [{upstreams: ['${UP}']}]\n")
    assert problems_of(path) == [
        "line 1: upstreams.thor.url: the environment variable `URL` is not set",
        "line 2: routes[0].upstreams[0]: the environment variable `UP` is not set",
    ]


def test_problems_of_the_text_and_of_the_values_come_together(write: Write) -> None:
    assert problems_of(write("log: loud\nlog: text\nstore: x\n" + UPSTREAM)) == [
        "line 1: log: must be `auto`, `json` or `text`",
        "line 2: log: is given twice, first on line 1",
        "line 3: store: must be `memory` or an address like valkey://host:6379/0 (redis:// too)",
    ]


def test_no_message_holds_a_secret(write: Write) -> None:
    path = write(
        """\
keys:
  - {sk-wrongplace: dify}
  - sk-wrongplace
  - {name: a, sha256: sk-wrongplace}
  - {name: b, key: [sk-wrongplace]}
  - {name: c, key: ${KEY}, admin: ${KEY}}
  - {name: d, key: "${sk-wrongplace}"}
upstreams:
  a: {url: "http://user:sk-wrongplace@host"}
  b: {url: "http://host?key=sk-wrongplace"}
  c: {url: http://x, api_key: {sk: sk-wrongplace}, engine: sk-wrongplace, max_inflight: sk-wrongplace}
"""
    )
    with pytest.raises(ConfigProblems) as caught:
        load(path, {"KEY": "sk-wrongplace"})
    assert len(caught.value.problems) >= 10
    assert "wrongplace" not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"#" * (MAX_FILE_BYTES + 1), "the file is larger than 1024 KiB"),
        (UPSTREAM.encode("utf-16"), "line 1: the file is not UTF-8 text: wrong bytes begin on this line"),
        (b"# ok\n# caf\xe9\n", "line 2: the file is not UTF-8 text: wrong bytes begin on this line"),
        (b"- 1\n", "line 1: the file must hold settings, as `key: value` lines"),
        (b"\nhello\n", "line 2: the file must hold settings, as `key: value` lines"),
    ],
    ids=["large", "utf-16", "latin-1", "list", "word"],
)
def test_a_file_that_holds_no_settings_is_one_clear_problem(write: Write, content: bytes, expected: str) -> None:
    assert problems_of(write(content)) == [expected]


def test_a_file_that_cannot_be_read_is_one_clear_problem(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "nope.yaml") == ["there is no such file"]
    assert problems_of(tmp_path) == ["this is a directory, not a file"]
    assert problems_of(Path("a\0b")) == ["the file cannot be read: embedded null byte"]


def test_a_byte_order_mark_and_windows_line_ends_are_no_mistake(write: Write) -> None:
    loaded = load(write(b"\xef\xbb\xbf" + UPSTREAM.replace("\n", "\r\n").encode()), {})
    assert list(loaded.settings.upstreams) == ["thor"]


def test_sections_left_empty_keep_their_defaults(write: Write) -> None:
    loaded = load(
        write("listen:\nkeys:\nroutes:\n  - upstreams: thor\n    budget:\n    override: {stop: null}\n" + UPSTREAM), {}
    )
    assert loaded.settings.listen.port == 8080
    assert loaded.settings.routes[0].budget.on_exceed == "heartbeat"
    assert loaded.settings.routes[0].override == {"stop": None}


def test_an_upstream_left_empty_is_a_mistake(write: Write) -> None:
    assert problems_of(write("upstreams:\n  thor:\n")) == ["line 2: upstreams.thor: must be `key: value` lines"]


def test_the_command_line_overrides_host_and_port(write: Write) -> None:
    path = write("listen: {port: 1, max_body_mb: 2}\n" + UPSTREAM)
    listen = load(path, {}, listen={"port": 2, "host": None}).settings.listen
    assert (listen.host, listen.port, listen.max_body_mb) == ("127.0.0.1", 2, 2)
    with pytest.raises(ConfigProblems, match="reachable from other machines"):
        load(path, {}, listen={"host": "0.0.0.0"})
    assert load(path, {}, listen={"host": "0.0.0.0"}, auth="none").settings.auth == "none"
    assert load(write(UPSTREAM), {}, listen={"port": 2}).settings.listen.port == 2


def warnings_of(loaded: Loaded) -> list[str]:
    return [str(warning) for warning in loaded.warnings]


def test_what_is_allowed_and_probably_not_meant_is_a_warning(write: Write) -> None:
    loaded = load(
        write(
            """\
keys:
  - {name: a, key: sk-in-the-file}
  - {name: b, key: "${B}"}
upstreams:
  thor: {url: http://x}
  loki: {url: https://x, tls: {verify: false}}
routes:
  - {name: p, upstreams: thor, match: {prefix: /p}}
  - {name: all, upstreams: thor}
  - {name: q, upstreams: thor, match: {prefix: /q}}
  - {name: m, upstreams: thor, match: {models: [m]}}
"""
        ),
        {"B": "x"},
    )
    assert warnings_of(loaded) == [
        "line 2: keys[0].key: the key stands in the file",
        "line 6: upstreams.loki.tls.verify: the server's certificate is not checked",
        "line 6: upstreams.loki: no route uses this upstream",
        "line 11: routes[3]: route `m` is never reached",
    ]


def test_a_start_without_a_file_needs_only_a_url() -> None:
    settings = for_upstream("http://127.0.0.1:8000/v1/")
    assert settings.upstreams["upstream"].url == "http://127.0.0.1:8000"
    assert [route.name for route in settings.routes] == ["default"]
    assert for_upstream("http://x", listen={"port": 0}, api_key="k").upstreams["upstream"].api_key is not None
    assert for_upstream("http://x", listen={"host": "0.0.0.0"}, auth="none").listen.host == "0.0.0.0"


@pytest.mark.parametrize(
    "url, listen, expected",
    [
        ("127.0.0.1:8000", {}, "upstreams.upstream.url: must start with http:// or https://"),
        ("http://x", {"port": 70000}, "listen.port: must be at most 65535"),
        ("http://x:99999", {}, "upstreams.upstream.url: Port out of range 0-65535"),
        ("http://x", {"host": "0.0.0.0"}, "listen.host: is 0.0.0.0, reachable from other machines, and no `keys` are set: "
                                          "add keys, or say `auth: none` if that is meant"),
    ],
)  # fmt: skip
def test_a_wrong_start_without_a_file_is_told_without_a_line(
    url: str, listen: dict[str, object], expected: str
) -> None:
    with pytest.raises(ConfigProblems) as caught:
        for_upstream(url, listen=listen)
    assert str(caught.value) == expected


def test_plain_values_make_settings_too() -> None:
    assert isinstance(from_mapping({"upstreams": {"a": {"url": "http://x"}}}), Settings)
    with pytest.raises(ConfigProblems, match=r"unknown key `lisen`\n  hint: did you mean `listen`"):
        from_mapping({"lisen": {}, "upstreams": {"a": {"url": "http://x"}}})


def test_the_fingerprint_changes_with_the_content_and_only_with_it(write: Write, tmp_path: Path) -> None:
    path = write(UPSTREAM)
    before = load(path, {}).fingerprint
    path.touch()
    assert fingerprint(path) == before
    write(UPSTREAM + "\n")
    assert fingerprint(path) != before
    assert fingerprint(tmp_path / "nope") is None


def test_the_tree_of_settings_names_each_place_and_knows_the_secrets() -> None:
    tree = dict(settings_tree())
    assert {"listen.port", "upstreams.NAME.tls.verify", "routes[].match.prefix", "keys[].sha256"} <= set(tree)
    assert [path for path, field in tree.items() if is_secret(field)] == ["keys[].key", "upstreams.NAME.api_key"]

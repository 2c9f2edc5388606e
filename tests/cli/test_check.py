"""`firsttoken check`, as somebody at a terminal or a script sees it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main

Check = Callable[..., tuple[int, str, str]]

GOOD = """\
keys:
  - {name: dify, key: "${DIFY_KEY}", routes: [fast]}
upstreams:
  thor: {url: http://10.0.0.5:8000, engine: vllm, api_key: sk-upstream}
routes:
  - name: fast
    match: {prefix: fast, models: [a, "[b]*"], headers: {x-team: sk-header}, keys: [dify]}
    upstreams: thor
    thinking: off
    model: deepseek-v4
    max_tokens: {default: 1024, floor: 256}
    budget: {ttft_ms: 2000, ttfv_ms: 3000}
    defaults: {temperature: 0.25}
    override: {user: sk-override}
    clean: {dashes: false, whitespace: collapse}
  - name: deep
    upstreams: thor
    clean: {control: false, dashes: false, long_runs: false, roles: false}
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs `firsttoken check` in an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIFY_KEY", "sk-dify")
    monkeypatch.delenv("FIRSTTOKEN_CONFIG", raising=False)

    def run(*arguments: str, config: str | None = None, name: str = "gateway.yaml") -> tuple[int, str, str]:
        if config is not None:
            Path(name).write_text(config, encoding="utf-8")
        code = main(["check", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_good_file_is_shown_as_a_table_of_routes_on_stdout(check: Check) -> None:
    code, out, err = check(config=GOOD)
    assert code == 0
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]
    assert [
        "fast",
        "prefix /fast; model a, [b]*; header x-team; key dify",
        "thor",
        "deepseek-v4",
        "off",
        "default 1024, floor 256",
        "control, long_runs, roles, whitespace",
        "ttft 2000 ms, ttfv 3000 ms: heartbeat",
    ] in rows
    assert ["deep", "everything", "thor", "as asked", "client", "as asked", "off", "none"] in rows
    assert ["thor", "http://10.0.0.5:8000", "vllm", "auto", "set", "fast, deep"] in rows
    assert err == "gateway.yaml can be used (chosen by default)\n"


@pytest.mark.parametrize(
    "route, upstreams, budget",
    [
        ("upstreams: [a]", "a", "none"),
        ("upstreams: [a], balance: prefix", "a", "none"),
        ("upstreams: [a, b]", "a, b (auto)", "none"),
        ("upstreams: [a, b], balance: round_robin", "a, b (round_robin)", "none"),
        ("upstreams: [a], budget: {ttft_ms: 9, on_exceed: fail}", "a", "ttft 9 ms: fail"),
        ("upstreams: [a], budget: {ttft_ms: 9, on_exceed: {fallback: b}}", "a", "ttft 9 ms: fallback b"),
        ("upstreams: [a], budget: {fallback: b}", "a", "none; fallback b"),
        ("upstreams: [a], pending: always, stream_upstream: true", "a", "none; pending always; plain calls as streams"),
        ("upstreams: [a], pending: never, budget: {ttft_ms: 9}", "a", "ttft 9 ms: heartbeat; pending never"),
    ],
)
def test_what_happens_to_a_late_or_failed_request_is_shown(
    check: Check, route: str, upstreams: str, budget: str
) -> None:
    servers = "upstreams: {a: {url: http://a}, b: {url: http://b}}\n"
    code, out, _ = check(config=f"{servers}routes: [{{name: late, {route}}}]\n")
    assert code == 0
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]
    (shown,) = (row for row in rows if row and row[0] == "late")
    assert (shown[2], shown[-1]) == (upstreams, budget)


def test_an_upstream_names_the_routes_that_fall_back_to_it(check: Check) -> None:
    servers = "upstreams: {a: {url: http://a}, b: {url: http://b}, c: {url: http://c}}\n"
    routes = "{name: x, match: {prefix: x}, upstreams: [a], budget: {fallback: b}}, {name: c, upstreams: [c, a]}"
    more = "{name: y, match: {prefix: y}, upstreams: [a], budget: {fallback: c}}"
    _, out, _ = check(config=f"{servers}routes: [{routes}, {more}]\n")
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]
    users = {row[0]: row[-1] for row in rows if any("http://" in cell for cell in row)}
    assert users == {"a": "x, c, y", "b": "x (fallback)", "c": "c"}


def test_every_problem_goes_to_stderr_with_line_and_hint(check: Check) -> None:
    code, out, err = check(config="listen: {prot: 1}\nupstreams: {thor: {url: x}}\n")
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "error: gateway.yaml: line 1: listen: unknown key `prot`",
        "  hint: did you mean `port`?",
        "error: gateway.yaml: line 2: upstreams.thor.url: must start with http:// or https://",
    ]


def test_warnings_do_not_fail_the_check(check: Check) -> None:
    code, out, err = check(config="upstreams: {thor: {url: https://x, tls: {verify: false}}}\n")
    assert code == 0
    assert err.startswith("warning: gateway.yaml: line 1: upstreams.thor.tls.verify: the server's certificate")
    assert "default" in out


def test_a_script_gets_everything_as_json(check: Check) -> None:
    code, out, _ = check("--json", config=GOOD)
    report = json.loads(out)
    assert code == 0
    assert (report["file"], report["ok"], report["problems"], report["warnings"]) == ("gateway.yaml", True, [], [])
    assert [route["name"] for route in report["routes"]] == ["fast", "deep"]
    assert report["routes"][0]["override"] == ["user"]
    assert report["routes"][0]["match"]["headers"] == ["x-team"]
    assert report["upstreams"]["thor"]["has_api_key"] is True

    code, out, _ = check("--json", config="upstreams: {}")
    assert code == 1
    assert json.loads(out) == {
        "file": "gateway.yaml",
        "ok": False,
        "problems": [
            {
                "path": "upstreams",
                "line": 1,
                "message": "must not be empty",
                "hint": "name at least one model server: `upstreams: {main: {url: http://127.0.0.1:8000}}`",
            }
        ],
    }


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_no_secret_is_shown(check: Check, arguments: tuple[str, ...]) -> None:
    _, out, err = check(*arguments, config=GOOD)
    assert "sk-" not in out + err
    assert hashlib.sha256(b"sk-dify").hexdigest() not in out + err
    assert "0.25" not in out


def test_the_file_is_the_argument_then_the_variable_then_gateway_yaml(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = "upstreams: {one: {url: http://x}}\n"
    assert check("other.yaml", config=good, name="other.yaml")[2] == "other.yaml can be used\n"
    monkeypatch.setenv("FIRSTTOKEN_CONFIG", "third.yaml")
    assert check(config=good, name="third.yaml")[2] == "third.yaml can be used (chosen by $FIRSTTOKEN_CONFIG)\n"
    assert check("other.yaml")[2] == "other.yaml can be used\n"


def test_a_missing_file_is_one_line_and_a_hint(check: Check) -> None:
    assert check() == (
        1,
        "",
        "error: gateway.yaml: there is no such file\n"
        "  hint: name another file, or start without one: `firsttoken serve --upstream URL`\n",
    )


# -- what cleaning would change ----------------------------------------------------------------------------------------


def changes_of(out: str) -> list[tuple[str, int, str]]:
    report: list[dict[str, Any]] = json.loads(out)
    return [(change["place"], change["line"], change["step"]) for change in report]


def test_the_changes_to_a_prompt_are_listed_by_line(check: Check, tmp_path: Path) -> None:
    Path("prompt.txt").write_text("first\na ———— b\x07\n", encoding="utf-8")
    code, out, err = check("--prompt", "prompt.txt")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("line 2: dashes: ")
    assert "——" in lines[0]
    assert lines[1].startswith("line 2: control: ")
    assert "\x07" not in out
    assert err == "prompt.txt: 2 change(s)\n"


def test_a_clean_prompt_is_said_to_be_clean(check: Check) -> None:
    Path("prompt.txt").write_text("[bold]nothing — to do[/bold]\n", encoding="utf-8")
    assert check("--prompt", "prompt.txt") == (0, "", "prompt.txt: nothing to clean\n")


def test_the_rules_are_those_of_the_route_that_is_named(check: Check) -> None:
    Path("prompt.txt").write_text("a ———— b\n", encoding="utf-8")
    assert check("--prompt", "prompt.txt", "--json", config=GOOD)[1] == "[]\n"
    assert check("--prompt", "prompt.txt", "--route", "deep")[2] == "prompt.txt: nothing to clean\n"
    code, _, err = check("--prompt", "prompt.txt", "--route", "depp")
    assert (code, err) == (1, "error: no route is called `depp`\n  hint: there are: fast, deep\n")


DASHES = "a ———— b"


@pytest.mark.parametrize(
    "body, expected",
    [
        (
            {
                "system": [{"type": "text", "text": DASHES}],
                "messages": [
                    {"role": "Human", "content": f"x\n{DASHES}"},
                    {"role": "user", "content": [{"type": "text", "text": DASHES}, {"type": "image_url"}]},
                    {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": DASHES}}]},
                    "?",
                ],
            },
            [
                ("system[0].text", 1, "dashes"),
                ("messages[0].role", 1, "roles"),
                ("messages[0].content", 2, "dashes"),
                ("messages[1].content[0].text", 1, "dashes"),
            ],
        ),
        ({"prompt": [DASHES, "-"]}, [("prompt[0]", 1, "dashes")]),
        ({"input": DASHES, "instructions": DASHES}, [("input", 1, "dashes"), ("instructions", 1, "dashes")]),
    ],
    ids=["messages", "prompt", "input"],
)
def test_a_request_body_is_looked_at_as_the_gateway_would(
    check: Check, body: dict[str, object], expected: list[tuple[str, int, str]]
) -> None:
    Path("body.json").write_text(json.dumps(body), encoding="utf-8")
    assert changes_of(check("--prompt", "body.json", "--json")[1]) == expected
    assert check("--prompt", "body.json")[1].startswith(f"{expected[0][0]}, line 1: dashes: ")


@pytest.mark.parametrize("content", ["[1, 2]", "{}", '"a"', "{not json"])
def test_any_other_json_is_a_text(check: Check, content: str) -> None:
    Path("x").write_text(content + DASHES, encoding="utf-8")
    assert changes_of(check("--prompt", "x", "--json")[1]) == [("", 1, "dashes")]
    Path("x").write_text(content, encoding="utf-8")
    assert changes_of(check("--prompt", "x", "--json")[1]) == []


def test_a_prompt_that_cannot_be_read_is_one_line(check: Check) -> None:
    assert check("--prompt", "nope")[::2] == (1, "error: nope: No such file or directory\n")
    Path("latin1").write_bytes(b"caf\xe9")
    assert check("--prompt", "latin1")[::2] == (1, "error: `latin1` is not UTF-8 text\n  hint: save it as UTF-8\n")

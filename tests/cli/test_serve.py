"""`firsttoken serve`: what it says before it serves. The serving itself is tested in tests/serving."""

from __future__ import annotations

import pickle
import socket
import sys
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.cli.serve import Plan, _announce, settings_of

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--workers", "0"], "`--workers` must be 1 or more"),
        (["a.yaml", "--upstream", "http://a"], "not both"),
        (["--sim", "no-such-profile"], "there is no profile `no-such-profile`"),
        (["--upstream", "http://a", "--api-key", "FIRSTTOKEN_TEST_UNSET"], "`FIRSTTOKEN_TEST_UNSET` is not set"),
        ([], "there is no settings file"),
        (["--upstream", "ftp://a"], "http://"),
        (["--upstream", "http://a", "--host", "0.0.0.0"], "auth: none"),
        (
            ["--upstream", "http://a", "--auth", "none", "--host", "no.such.host.invalid"],
            "cannot listen on no.such.host.invalid",
        ),
        (["none.yaml"], "there is no such file"),
    ],
)
def test_a_mistake_is_one_line_and_a_hint(
    arguments: list[str], words: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F11."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FIRSTTOKEN_CONFIG", raising=False)
    assert main(["serve", *arguments]) == 1
    output = capsys.readouterr().err
    assert words in output
    assert output.startswith("error: ")


def test_a_port_in_use_is_told_before_anything_starts(capsys: Captured) -> None:
    """F11."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--upstream", "http://127.0.0.1:9", "--port", str(taken.getsockname()[1])]) == 1
    output = capsys.readouterr().err
    assert "Address already in use" in output
    assert "choose another `--port`" in output


def plan(**more: object) -> Plan:
    given: dict[str, object] = {
        "config": None, "upstream": None, "api_key": None, "listen": {}, "auth": None, "log": None, **more,
    }  # fmt: skip
    return Plan(**given)  # type: ignore[arg-type]


def test_a_plan_can_be_handed_to_a_worker_and_shows_no_key() -> None:
    made = plan(upstream="http://a", api_key="secret-of-upstream", listen={"port": 1}, log="json")
    assert pickle.loads(pickle.dumps(made)) == made
    assert "secret-of-upstream" not in repr(made)
    settings = settings_of(made)
    assert (settings.listen.port, settings.log) == (1, "json")
    assert "secret-of-upstream" not in repr(settings)


def test_the_command_line_goes_before_the_file(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "listen: {port: 1, host: 0.0.0.0}\nupstreams: {a: {url: http://a}, b: {url: http://b}}\nroutes: [{upstreams: [a]}]"
    )
    settings = settings_of(plan(config=str(path), listen={"port": 2}, auth="none"), warn=True)
    assert (settings.listen.port, settings.listen.host, settings.auth) == (2, "0.0.0.0", "none")
    assert "warning: line 2: upstreams.b: no route uses this upstream" in capsys.readouterr().err


def test_a_store_whose_package_is_missing_is_one_line_and_a_hint(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("listen: {port: 0}\nupstreams: {a: {url: http://127.0.0.1:9}}\nstore: valkey://127.0.0.1:9/0\n")
    monkeypatch.setitem(sys.modules, "valkey.asyncio.connection", None)  # as import sees a package that is not there
    assert main(["serve", str(path), "--log", "json"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["error", "hint"]
    assert "firsttoken[valkey]" in lines[1]


@pytest.mark.parametrize(
    "workers, store, is_told",
    [(2, "memory", True), (1, "memory", False), (2, "valkey://127.0.0.1:9/0", False)],
)
def test_several_workers_without_a_shared_store_are_told_what_that_means(
    workers: int, store: str, is_told: bool, capsys: Captured
) -> None:
    settings = settings_of(plan(upstream="http://a")).model_copy(update={"store": store})
    _announce(settings, None, workers)
    output = capsys.readouterr().err
    assert ("each worker knows only its own pending requests" in output) == is_told
    assert len(output.splitlines()) == 1 + is_told

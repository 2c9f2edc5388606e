"""The command line around the commands: which one runs, and how errors end."""

from __future__ import annotations

import argparse
import errno
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway import __version__, cli
from gateway.cli import COMMANDS, CommandError, main
from gateway.configfile import ConfigProblems, Problem


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A command in place of all others; `command.run` says what happens."""
    fake = SimpleNamespace(
        add_arguments=lambda parser: parser.add_argument("--port", type=int), run=lambda args: args.port
    )
    monkeypatch.setattr(cli, "_load", lambda name: fake)
    return fake


def test_the_command_gets_its_arguments_and_gives_the_exit_code(command: SimpleNamespace) -> None:
    assert main(["serve", "--port", "7"]) == 7


def failing(error: BaseException) -> object:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    "error, expected",
    [
        (CommandError("it failed"), "error: it failed\n"),
        (CommandError("it failed", "do this"), "error: it failed\n  hint: do this\n"),
        (
            OSError(
                errno.EADDRINUSE, "error while attempting to bind on address ('127.0.0.1', 80): address already in use"
            ),
            "error: the address is already in use\n  hint: stop the other program, or choose another `--port`\n",
        ),
        (
            OSError(errno.EADDRNOTAVAIL, "x"),
            "error: this machine has no such address\n  hint: choose another `--host`, for example 127.0.0.1\n",
        ),
        (FileNotFoundError(errno.ENOENT, "x", "a.txt"), "error: a.txt: No such file or directory\n"),
        (PermissionError(errno.EACCES, "x"), "error: Permission denied\n"),
        (OSError("odd"), "error: odd\n"),
        (
            ConfigProblems([Problem("a", 2, "bad", "good"), Problem("b", 1, "bad")], Path("f.yaml")),
            "error: f.yaml: line 1: b: bad\nerror: f.yaml: line 2: a: bad\n  hint: good\n",
        ),
    ],
)
def test_what_a_person_can_cause_is_one_line_and_exit_1(
    command: SimpleNamespace, capsys: pytest.CaptureFixture[str], error: Exception, expected: str
) -> None:
    command.run = failing(error)
    assert main(["serve"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", expected)


def test_a_fault_of_ours_keeps_its_traceback(command: SimpleNamespace) -> None:
    command.run = failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["serve"])


def test_ctrl_c_ends_quietly(command: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    command.run = failing(KeyboardInterrupt())
    assert main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """`firsttoken check | head -1` prints no traceback."""
    config = tmp_path / "g.yaml"
    config.write_text("upstreams: {a: {url: http://x}}\n")
    script = f"{sys.executable} -m gateway check {config} --json | true"
    finished = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["check", "--help"]])
def test_version_and_help_go_to_stdout(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out or arguments != ["--version"]


def test_every_command_is_listed_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for name in COMMANDS:
        assert f"    {name} " in shown.err


@pytest.mark.parametrize("arguments", [["serv"], ["--nope"], ["check", "--nope"], ["check", "a", "b"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: firsttoken" in capsys.readouterr().err


def test_help_loads_no_server() -> None:
    script = (
        "import sys; from gateway.cli import main\ntry: main(['--help'])\nexcept SystemExit: print(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    loaded = done.stdout.rpartition("[")[2]
    assert "'argparse'" in loaded
    assert not [name for name in ("pydantic", "fastapi", "uvicorn", "asyncio", "rich") if f"'{name}'" in loaded]


def test_an_unencodable_terminal_still_gets_its_output(tmp_path: Path) -> None:
    config = tmp_path / "g.yaml"
    config.write_text("upstreams: {天: {url: http://x}}\n", encoding="utf-8")
    finished = subprocess.run(
        [sys.executable, "-m", "gateway", "check", str(config)],
        capture_output=True,
        timeout=30,
        check=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": "", "LANG": "C"},
    )
    assert b"\\u5929" in finished.stdout

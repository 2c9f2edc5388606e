"""The command `firsttoken`. Each subcommand is a module here with `add_arguments(parser)` and `run(args) -> exit code`.

Only the module of the command that was asked for is imported, so that `check` does not load a server. Data goes to
stdout, everything else to stderr. What a person can cause (a missing file, a port in use, an unset variable) ends in
one line and exit code 1, never in a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, cast

from gateway import __version__

COMMANDS: Final = {
    "serve": "run the gateway",
    "check": "validate a configuration and show what it means",
    "demo": "watch where the time of a thinking model goes, in under 30 seconds",
    "sim": "run the simulated model server alone",
}

DEFAULT_CONFIG: Final = Path("gateway.yaml")
CONFIG_VARIABLE: Final = "FIRSTTOKEN_CONFIG"

_EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells count

_BIND_ERRORS: Final = {
    errno.EADDRINUSE: ("the address is already in use", "stop the other program, or choose another `--port`"),
    errno.EADDRNOTAVAIL: ("this machine has no such address", "choose another `--host`, for example 127.0.0.1"),
}


class CommandError(Exception):
    """Ends a command with one line for people, a hint where there is one, and exit code 1."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Command(Protocol):
    """What a command's module has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Does the work; returns the exit code. May raise CommandError, ConfigProblems, OSError."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Wrong usage exits with 2, as argparse does."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode is no reason to stop
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = command_parser(name)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return _load(args.command).run(args)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return 1
    except (CommandError, OSError) as error:
        return _fail(error)
    except Exception as error:
        from gateway.configfile import ConfigProblems

        if not isinstance(error, ConfigProblems):
            raise
        return _fail(error)


def command_parser(name: str | None = None) -> argparse.ArgumentParser:
    """The whole command line, with the arguments of the command `name` only (its module is imported)."""
    parser = argparse.ArgumentParser(prog="firsttoken", description="A latency-aware gateway for self-hosted models.")
    parser.add_argument("--version", action="version", version=f"firsttoken {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command, summary in COMMANDS.items():
        description = summary[0].upper() + summary[1:] + "."
        subparser = commands.add_parser(command, help=summary, description=description)
        if command == name:
            _load(command).add_arguments(subparser)
    return parser


def config_path(argument: str | None, environ: Mapping[str, str]) -> tuple[Path, str]:
    """The configuration file to use and who chose it: the argument, else $FIRSTTOKEN_CONFIG, else ./gateway.yaml."""
    if argument:
        return Path(argument), "argument"
    if environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE]), f"${CONFIG_VARIABLE}"
    return DEFAULT_CONFIG, "default"


def _load(command: str) -> Command:
    return cast(Command, importlib.import_module(f"gateway.cli.{command}"))


def _fail(error: Exception) -> int:
    """Says what happened on stderr."""
    lines = str(error).splitlines() or [type(error).__name__]
    hint = None
    if isinstance(error, CommandError):
        hint = error.hint
    elif isinstance(error, OSError):
        lines, hint = _os_sentence(error)
    for line in lines:
        print(line if line.startswith(" ") else f"error: {line}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)
    return 1


def _os_sentence(error: OSError) -> tuple[list[str], str | None]:
    """asyncio words a failed bind as `[Errno 98] error while attempting to bind on address (…)`; people need less."""
    code = error.errno or 0
    if code in _BIND_ERRORS:
        message, hint = _BIND_ERRORS[code]
        return [message], hint
    reason = os.strerror(code) if code > 0 else str(error) or type(error).__name__
    return [f"{error.filename}: {reason}" if error.filename else reason], None


def _drop_stdout() -> None:
    """Nobody reads any more (`firsttoken check | head -1`): what is still buffered must not fail at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

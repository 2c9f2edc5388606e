"""`firsttoken sim`: the simulated model server alone, over a socket, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import errno
import signal
import sys
from typing import TYPE_CHECKING

import uvloop

from gateway.cli import CommandError

if TYPE_CHECKING:
    from gateway.sim.profiles import Profile
    from gateway.sim.transport import Server

DEFAULT_PORT = 8000  # vLLM's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    from gateway.sim.faults import describe
    from gateway.sim.profiles import PROFILES

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "faults:\n" + "\n".join(f"  {text}" for _, text in describe())
    parser.add_argument("--profile", default="demo", choices=sorted(PROFILES), help="what it is like (default: demo)")
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="served name instead of the profile's; again for more"
    )
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help="another value for a field of the profile")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0 takes a free one (default: {DEFAULT_PORT})")
    parser.add_argument("--seed", type=int, default=0, help="other words, ids and noise (default: 0)")
    parser.add_argument("--speed", type=float, default=1.0, metavar="FACTOR", help="so many times as fast (default: 1)")
    parser.add_argument("--api-key", metavar="KEY", help="answer 401 to /v1 requests without it")
    parser.add_argument("--fault", metavar="NAME[=ARG]", help="play a fault on every inference request; see below")


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM, then returns 0."""
    uvloop.run(_serve(args, profile_of(args)))
    return 0


def profile_of(args: argparse.Namespace) -> Profile:
    """The profile that the arguments describe; CommandError for one that cannot be."""
    from gateway.sim.faults import parse_fault
    from gateway.sim.profiles import PROFILES

    profile = PROFILES[args.profile]
    try:
        if args.fault:
            parse_fault(args.fault)
        if args.model:
            profile = dataclasses.replace(profile, models=tuple(args.model))
        for assignment in args.set or ():
            profile = profile.with_text(assignment)
        return profile.scaled(args.speed)
    except ValueError as error:
        raise CommandError(str(error), "`firsttoken sim --help` lists profiles and faults") from None


async def _serve(args: argparse.Namespace, profile: Profile) -> None:
    from gateway.sim.transport import serve

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        server = await serve(
            profile, args.host, args.port, seed=args.seed, api_key=args.api_key, fault=args.fault or None
        )
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise CommandError(
            f"port {args.port} of {args.host} is already in use", "choose another `--port`, or 0 for a free one"
        ) from None
    _announce(server)
    try:
        await stopped.wait()
    finally:
        await server.close()


def _announce(server: Server) -> None:
    model = server.profile.models[0]
    body = f'{{"model":"{model}","stream":true,"messages":[{{"role":"user","content":"你好"}}]}}'
    curl = f"curl -N {server.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    print(f"simulated {server.profile.name} at {server.url}/v1, try: {curl}", file=sys.stderr, flush=True)

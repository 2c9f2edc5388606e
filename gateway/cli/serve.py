"""`firsttoken serve`: the gateway."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.cli import CommandError, config_path

if TYPE_CHECKING:
    from gateway.config import Settings


@dataclass(frozen=True, slots=True)
class Plan:
    """What to serve, in a form that a worker process can be given."""

    config: str | None
    upstream: str | None
    api_key: str | None = field(repr=False)
    listen: Mapping[str, object]
    auth: str | None
    log: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="settings file (default: $FIRSTTOKEN_CONFIG, else ./gateway.yaml)")
    parser.add_argument("--upstream", metavar="URL", help="a model server; enough to start without a file")
    parser.add_argument(
        "--api-key", metavar="NAME", help="environment variable with the upstream's key, for --upstream"
    )
    parser.add_argument("--sim", metavar="PROFILE", help="start a simulated model server and serve it")
    parser.add_argument("--host", help="address to listen on (overrides the file)")
    parser.add_argument("--port", type=int, help="port to listen on (overrides the file)")
    parser.add_argument("--auth", choices=["none"], help="`none`: no keys, also on an address others can reach")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that share the port (default: 1)"
    )
    parser.add_argument("--log", choices=["auto", "json", "text"], help="form of the log (overrides the file)")


def run(args: argparse.Namespace) -> int:
    if args.workers < 1:
        raise CommandError("`--workers` must be 1 or more")
    with _simulated(args.sim) as sim_url:
        plan = _plan(args, sim_url)
        settings = settings_of(plan, warn=True)
        if settings.listen.port == 0:  # one number for all workers, and one to tell
            plan = replace(plan, listen={**plan.listen, "port": _free_port(settings.listen.host)})
            settings = settings_of(plan)
        _check_port(settings)
        _check_certificates(settings)
        _check_store(settings)
        _announce(settings, sim_url, args.workers)
        if args.workers == 1:
            return serve_one(plan)
        return _serve_many(plan, settings, args.workers)


def _plan(args: argparse.Namespace, sim_url: str | None) -> Plan:
    upstream = sim_url or args.upstream
    if upstream is not None and args.config is not None:
        raise CommandError("give either a settings file or `--upstream`, not both")
    listen = {key: value for key, value in (("host", args.host), ("port", args.port)) if value is not None}
    config = None
    if upstream is None:
        path, chosen_by = config_path(args.config, os.environ)
        if chosen_by == "default" and not path.exists():
            raise CommandError(
                "there is no settings file (./gateway.yaml)",
                "name one, or start with `firsttoken serve --upstream http://127.0.0.1:8000`, "
                "or try `firsttoken serve --sim demo`",
            )
        config = str(path)
    api_key = None
    if args.api_key is not None:
        api_key = os.environ.get(args.api_key)
        if not api_key:
            raise CommandError(f"the environment variable `{args.api_key}` is not set")
    return Plan(config, upstream, api_key, listen, args.auth, args.log)


def settings_of(plan: Plan, *, warn: bool = False) -> Settings:
    """Reads the settings. Raises ConfigProblems."""
    from gateway.configfile import for_upstream, load

    if plan.upstream is not None:
        settings = for_upstream(plan.upstream, listen=plan.listen, api_key=plan.api_key, auth=plan.auth)
    else:
        assert plan.config is not None
        loaded = load(Path(plan.config), os.environ, listen=plan.listen, auth=plan.auth)
        settings = loaded.settings
        for warning in loaded.warnings if warn else ():
            print(f"warning: {warning}", file=sys.stderr)
    return settings if plan.log is None else settings.model_copy(update={"log": plan.log})


def serve_one(plan: Plan, worker: int = 0, *, shared: bool = False) -> int:
    """One process, until it is told to stop."""
    from prometheus_client import disable_created_metrics

    from gateway.app import Gateway
    from gateway.lifecycle import GatewayServer
    from gateway.logs import set_up

    disable_created_metrics()  # type: ignore[no-untyped-call]  # one `_created` series per counter and histogram would double the page
    settings = settings_of(plan)
    log = set_up(settings.log)
    source = Path(plan.config) if plan.config is not None else None
    try:
        gateway = Gateway(
            settings,
            source=source,
            listen_arguments=plan.listen,
            auth=plan.auth,
            write_log=log.write,
            worker=worker,
        )
        server = GatewayServer(gateway)
        server.run(sockets=_sockets(settings, shared=shared))
    finally:
        log.close()
    return 0


def _sockets(settings: Settings, *, shared: bool) -> list[socket.socket]:
    from gateway.config import split_address
    from gateway.lifecycle import listening_socket

    addresses = [(settings.listen.host, settings.listen.port)]
    if settings.listen.admin is not None:
        addresses.append(split_address(settings.listen.admin))
    return [listening_socket(host, port, shared=shared) for host, port in addresses]


def _check_port(settings: Settings) -> None:
    from gateway.config import split_address
    from gateway.lifecycle import listening_socket

    addresses = [(settings.listen.host, settings.listen.port)]
    if settings.listen.admin is not None:
        addresses.append(split_address(settings.listen.admin))
    for host, port in addresses:
        try:
            listening_socket(host, port).close()
        except OSError as error:
            raise CommandError(
                f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}",
                "stop the other program, or choose another `--port`",
            ) from None


def _free_port(host: str) -> int:
    from gateway.lifecycle import listening_socket

    sock = listening_socket(host, 0)
    port: int = sock.getsockname()[1]
    sock.close()
    return port


def _check_certificates(settings: Settings) -> None:
    """A file that is not there would end every worker; here it is one line."""
    import ssl

    for name, upstream in settings.upstreams.items():
        if upstream.is_tls and upstream.tls.ca_file is not None:
            try:
                ssl.create_default_context(cafile=upstream.tls.ca_file)
            except OSError as error:  # also ssl.SSLError
                what = (
                    os.strerror(error.errno or 0)
                    if isinstance(error, FileNotFoundError)
                    else "it holds no certificates"
                )
                raise CommandError(f"upstreams.{name}.tls.ca_file: {upstream.tls.ca_file}: {what}") from None


def _check_store(settings: Settings) -> None:
    """A missing package or a wrong address would end every worker; here it is one line. Connects to nothing."""
    from gateway.store import StoreUnusable, make_store

    try:
        make_store(settings.store, settings.pending)
    except StoreUnusable as error:
        message, _, hint = str(error).partition("; hint: ")
        raise CommandError(message, hint or None) from None


def _serve_many(plan: Plan, settings: Settings, count: int) -> int:
    from gateway.logs import set_up
    from gateway.workers import MetricsFolder, Supervisor, spawn

    def start(index: int, parent: int) -> BaseProcess:
        return spawn(_worker, plan, index, parent)

    log = set_up(settings.log)
    try:
        with MetricsFolder():
            return Supervisor(count, start, settings.listen.drain_timeout_s).run()
    finally:
        log.close()


def _worker(plan: Plan, index: int, parent: int) -> None:
    """Entry of a worker process."""
    import threading
    import time

    def follow_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)  # the parent was killed: nobody would replace or stop us

    threading.Thread(target=follow_parent, daemon=True, name="follow-parent").start()
    sys.exit(serve_one(plan, index, shared=True))


def _announce(settings: Settings, sim_url: str | None, workers: int) -> None:
    listen = settings.listen
    url = f"http://{'[' + listen.host + ']' if ':' in listen.host else listen.host}:{listen.port}"
    behind = ", ".join(f"{name} ({upstream.url})" for name, upstream in settings.upstreams.items())
    many = f", {workers} workers" if workers > 1 else ""
    print(f"Firsttoken on {url}/v1 → {behind}{many}", file=sys.stderr)
    if workers > 1 and settings.store == "memory":
        print(
            "note: with `store: memory` each worker knows only its own pending requests, so a poll that reaches "
            "another worker is answered 404; name a Valkey in `store` (extra `firsttoken[valkey]`) to share them",
            file=sys.stderr,
        )
    if sim_url is not None:
        print(
            f"""Try:  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
        -d '{{"model": "{_sim_model(sim_url)}", "stream": true,
             "messages": [{{"role": "user", "content": "你好"}}]}}'""",
            file=sys.stderr,
        )


def _sim_model(url: str) -> str:
    from gateway.sim.profiles import PROFILES

    name = url.rpartition("#")[2]
    return PROFILES[name].models[0] if name in PROFILES else PROFILES["demo"].models[0]


@contextmanager
def _simulated(profile: str | None) -> Iterator[str | None]:
    """A simulated model server in a process of its own, while the block runs; None without a profile."""
    if profile is None:
        yield None
        return
    from gateway.sim.profiles import PROFILES
    from gateway.workers import spawn

    if profile not in PROFILES:
        raise CommandError(f"there is no profile `{profile}`", f"choose one of {', '.join(sorted(PROFILES))}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = spawn(_run_sim, profile, port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join(5)


def _run_sim(profile: str, port: int) -> None:
    import signal

    from gateway.sim.profiles import PROFILES
    from gateway.sim.transport import serve

    async def main() -> None:
        server = await serve(PROFILES[profile], "127.0.0.1", port)
        try:
            await asyncio.Event().wait()
        finally:
            await server.close()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends us
    asyncio.run(main())

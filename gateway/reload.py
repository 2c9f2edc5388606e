"""Reading the configuration again while serving. A bad file changes nothing."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from gateway.configfile import ConfigProblems, load

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.config import Listen, Settings

log = logging.getLogger("gateway.reload")


def reload_now(gateway: Gateway) -> list[str]:
    """Takes the file's present content, or keeps the old settings; returns the problems found (logged as well)."""
    if gateway.source is None:
        return ["this gateway was started without a file: there is nothing to reload"]
    bound = gateway.settings.listen
    try:
        # Judged by the address that is really bound: a file must not open an address to everybody by naming another.
        listen = {"host": bound.host, "port": bound.port, "admin": bound.admin}
        loaded = load(gateway.source, os.environ, listen=listen, auth=gateway.auth)
        wanted = load(gateway.source, os.environ, listen=gateway.listen_arguments, auth="none").settings.listen
        store = gateway.settings.store
        gateway.apply(_bound(loaded.settings, bound).model_copy(update={"store": store}))
    except ConfigProblems as bad:
        return _refused(gateway, [str(problem) for problem in bad.problems])
    except (OSError, ValueError) as error:  # a certificate file that is not there, or is none
        reason = getattr(error, "strerror", None) or type(error).__name__
        return _refused(gateway, [f"the settings cannot be used: {reason}"])
    for warning in loaded.warnings:
        log.warning("%s", warning)
    if (wanted.host, wanted.port, wanted.admin) != (bound.host, bound.port, bound.admin):
        log.warning("`listen.host`, `listen.port` and `listen.admin` take effect after a restart")
    if loaded.settings.store != store:
        log.warning("`store` takes effect after a restart: requests that run are known to the one in use")
    return []


def _refused(gateway: Gateway, problems: list[str]) -> list[str]:
    gateway.reload_failed()
    for problem in problems:
        log.error("configuration not reloaded: %s: %s", gateway.source, problem)
    return problems


def _bound(settings: Settings, old: Listen) -> Settings:
    """The settings with the addresses that are in use, also where the file now has none (`admin`)."""
    listen = settings.listen.model_copy(update={"host": old.host, "port": old.port, "admin": old.admin})
    return settings.model_copy(update={"listen": listen})

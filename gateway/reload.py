"""Reading the configuration again while serving. A bad file changes nothing."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from gateway.configfile import ConfigProblems, load

if TYPE_CHECKING:
    from gateway.app import Gateway

log = logging.getLogger("gateway.reload")


def reload_now(gateway: Gateway) -> list[str]:
    """Takes the file's present content, or keeps the old settings; returns the problems found (logged as well)."""
    if gateway.source is None:
        return ["this gateway was started without a file: there is nothing to reload"]
    try:
        loaded = load(gateway.source, os.environ)
    except ConfigProblems as bad:
        gateway.reload_failed()
        for problem in bad.problems:
            log.error("configuration not reloaded: %s: %s", gateway.source, problem)
        return [str(problem) for problem in bad.problems]
    old = gateway.settings.listen
    settings = loaded.settings.model_copy(update={"listen": loaded.settings.listen.model_copy(update={
        "host": old.host, "port": old.port, "admin": old.admin,
    })})  # fmt: skip
    for warning in loaded.warnings:
        log.warning("%s", warning)
    if (loaded.settings.listen.port, loaded.settings.listen.host) != (old.port, old.host):
        log.warning("`listen.host` and `listen.port` take effect after a restart")
    gateway.apply(settings)
    return []

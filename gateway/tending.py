"""What is looked after once a second beside the requests: silence, the way back of upstreams that were left out, and
what restarts and other people's load mean for predictions."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.runtime import Runtime
    from gateway.upstream.state import UpstreamState
    from gateway.upstream.watch import Watch

log = logging.getLogger("gateway.upstream")

EVERY_S: Final = 1.0
RETRY_NS: Final = 5_000_000_000  # between two probes of an upstream that was left out


async def tend(runtime: Callable[[], Runtime], watch: Watch, clock: Callable[[], int]) -> None:
    """Runs for ever; cancelled at shutdown."""
    asked: dict[str, int] = {}
    async with asyncio.TaskGroup() as probes:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                current, now = runtime(), clock()
                current.fleet.look_for_silence(now)
                for name, state in current.upstreams.items():
                    _tell_foreign(state)
                    if current.fleet.ejections.standing(name, now) != "ejected" or now - asked.get(name, 0) < RETRY_NS:
                        continue
                    asked[name] = now
                    probes.create_task(_ask(current, state, watch, clock), name=f"probe-{name}")
            except Exception as error:
                log.exception("upstreams could not be looked after", exc_info=error)


async def _ask(current: Runtime, state: UpstreamState, watch: Watch, clock: Callable[[], int]) -> None:
    """One token from an upstream that was left out is what brings it back early (C113)."""
    try:
        if await watch.generate_one(state, is_needed=True):
            current.fleet.ejections.note_back(state.name, clock())
            log.info("upstream `%s` generates again: it comes back slowly", state.name)
    except Exception as error:
        log.exception("probe of upstream `%s` failed", state.name, exc_info=error)


def _tell_foreign(state: UpstreamState) -> None:
    waiting = state.foreign_waiting
    if waiting is not None and state.foreign_waiting_at_ns:
        for predictor in state.standing.forecasts:
            predictor.note_foreign(waiting, state.foreign_waiting_at_ns)

"""Set-up that every test here shares."""

from __future__ import annotations

import asyncio

# looptime asks for "the current event loop" also before tests that are not async. Where nobody has set one, asyncio
# then makes one that nobody closes, and its ResourceWarning fails a later test. "Set to none" answers that question.
asyncio.set_event_loop(None)

"""What the clients shall see and do not see yet: by name, the precise condition under which the tests pass.

Who builds one of these takes its line out: from then on its tests must pass. Until then they must fail (strict).
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.clients.real_clients import Kind
from tests.clients.scenes import MODES, Mode

COMING: dict[str, str] = {}


def cases(kinds: Iterable[Kind], coming: str | None = None, modes: Iterable[Mode] = MODES) -> list[object]:
    """Parameters `mode, kind`, marked as failing as long as `coming` stands above."""
    marks = [pytest.mark.xfail(strict=True, reason=COMING[coming])] if coming in COMING else []
    return [pytest.param(mode, kind, marks=marks, id=f"{mode}-{kind.name}") for mode in modes for kind in kinds]

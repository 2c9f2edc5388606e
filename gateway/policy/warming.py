"""Which requests warm a model server up, and when they have (latency-methods §4; cases C149).

A server compiles for every new shape it meets: the length of a prompt decides the shape of its prefill, the number of
streams that of each decoding step. The two do not multiply, so each is warmed on its own: every length with one
stream, then every number of streams with the shortest prompt and a long decode, in which they all decode together.
Triton specialises on 1, on multiples of 16 and on the rest (vllm#49903), so one request never warms everything.

A shape is warm when it costs the same three times in a row. Its prompts differ from their start on, because a prompt
that the prefix cache holds has another shape; one shape repeats a prompt on purpose, as conversations do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from gateway.config import Warmup

PROMPT_DECODE: Final = 2  # tokens asked for where the prompt matters: more than one, so that a step follows the prefill
SPREAD: Final = 1.3  # latency-methods §4: three probes within 1.3 × of their median
SAME_S: Final = 0.025  # differences below this are a busy machine's, not a compiler's; fast servers answer in 1 ms
STEADY_ROUNDS: Final = 3
MAX_ROUNDS: Final = 10  # of one shape: what still varies then is load, since a compiler has nothing left to do
SALT_DIGITS: Final = 12  # at least four tokens in every tokenizer: some read three digits as one token
TEMPLATE_ROOM: Final = 64  # tokens that a chat template may add
FIRST_WAIT_S: Final = 1.0
MAX_WAIT_S: Final = 60.0
# Words that common tokenizers know as one token each.
_WORDS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of request: `streams` of them at a time, each of about `prompt_tokens`, for `decode_tokens`."""

    prompt_tokens: int
    streams: int
    decode_tokens: int
    is_repeated: bool = False
    """The same prompt every time, so that the prefix cache holds it from the second time on."""

    def __str__(self) -> str:
        repeated = ", repeated" if self.is_repeated else ""
        return f"{self.prompt_tokens} tokens × {self.streams}{repeated}"


def plan(settings: Warmup, max_model_len: int | None = None) -> tuple[Shape, ...]:
    """The shapes in the order in which they are asked for, each once.

    `max_model_len` is the server's own limit where it told one: longer prompts are cut to it instead of refused.
    """
    limit = None if max_model_len is None else max(1, max_model_len - settings.decode_tokens - TEMPLATE_ROOM)
    lengths = [max(1, length if limit is None else min(length, limit)) for length in settings.prompt_tokens] or [1]
    shapes = [Shape(length, 1, PROMPT_DECODE) for length in lengths]
    shapes.append(Shape(max(lengths), 1, PROMPT_DECODE, is_repeated=True))
    shapes += [Shape(min(lengths), max(1, streams), settings.decode_tokens) for streams in settings.streams]
    return tuple(dict.fromkeys(shapes))


def prompt_of(shape: Shape, number: int, chance: float) -> str:
    """A prompt of about the shape's length. Different `number`s differ from their start on.

    `chance` in [0, 1) makes it differ from those of an earlier warm-up, which the server's cache may hold.
    """
    salt = int(chance * 10**SALT_DIGITS) if shape.is_repeated else int(chance * 10**SALT_DIGITS) + number * 7919
    words = (_WORDS[index % len(_WORDS)] for index in range(max(1, shape.prompt_tokens - 4)))
    return f"{str(salt % 10**SALT_DIGITS).zfill(SALT_DIGITS)[::-1]} {' '.join(words)}"


def body_of(
    settings: Warmup,
    *,
    model: str,
    prompt: str,
    max_tokens: int,
    max_tokens_field: str = "max_tokens",
    can_ignore_end: bool = False,
) -> dict[str, object]:
    """A chat request. The fields of `warmup.body` go before ours, all but `stream`: its events are the measure.

    `can_ignore_end`: the server knows `ignore_eos`, without which a model may end before `max_tokens`.
    """
    ours: Mapping[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        max_tokens_field: max_tokens,
        "temperature": 0,
        **({"ignore_eos": True} if can_ignore_end else {}),
    }
    return {**ours, **settings.body, "stream": True}


def is_steady(costs_s: list[float]) -> bool:
    """Whether the last three of a shape's costs, in seconds, are within 1.3 × of their median (latency-methods §4)."""
    last = costs_s[-STEADY_ROUNDS:]
    if len(last) < STEADY_ROUNDS:
        return False
    middle = median(last)
    return max(last) <= max(SPREAD * middle, middle + SAME_S) and min(last) >= min(middle / SPREAD, middle - SAME_S)


def is_over(costs_s: list[float]) -> bool:
    """Whether a shape needs no further round: it is steady, or will not become so."""
    return is_steady(costs_s) or len(costs_s) >= MAX_ROUNDS


def retry_wait_s(failures: int, chance: Callable[[], float]) -> float:
    """Seconds until the next try after so many failures in a row, from 1.

    Equal jitter up to a minute: what warms up answers 503 while it loads, and full jitter's near-zero waits are
    wrong there (fault-catalogue 3.6).
    """
    whole = min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures - 1, 16))
    return whole / 2 + chance() * whole / 2


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What a warm-up found. Times are seconds to the first token; None where there was none."""

    first_s: float | None = None
    """Of the very first request: what a caller would have met."""
    last_s: float | None = None
    """Of one more request like the first, when all was done."""
    slowest_s: float | None = None
    requests: int = 0
    shapes: int = 0
    """Shapes that were finished."""
    refused: tuple[str, ...] = ()
    """Shapes that the server does not take, such as prompts beyond its limit."""
    unsteady: tuple[str, ...] = ()
    """Shapes whose cost still varied after the last round."""
    seconds: float = 0.0
    problem: str | None = None
    """Why it ended early; None when it is done."""

    def sentence(self, name: str) -> str:
        """One line for the log, about the upstream of this name."""
        if self.problem is not None:
            return f"upstream `{name}` is not warm: {self.problem}"
        count = f"{self.requests} request" if self.requests == 1 else f"{self.requests} requests"
        return (
            f"upstream `{name}` is warm: first token {_seconds(self.first_s)} before, {_seconds(self.last_s)} after, "
            f"{count} in {_seconds(self.seconds)}"
        )


def _seconds(value: float | None) -> str:
    """As many digits as a person reads: 30 s, 12.1 s, 0.05 s."""
    if value is None:
        return "unknown"
    return f"{value:.0f} s" if value >= 20 else f"{value:.1f} s" if value >= 1 else f"{value:.2g} s"

"""The reader for a kind of stream, and what to make of the answer it has seen.

`StreamReader` (stream.py) says what can be asked of a reader; openai.py, responses.py and anthropic.py know the APIs.
"""

from __future__ import annotations

from gateway.wire.answer import ServerTimes, StreamError, Usage, Verdict, judge, worst_of
from gateway.wire.anthropic import MessagesReader
from gateway.wire.kinds import Kind
from gateway.wire.openai import ChatReader, CompletionsReader
from gateway.wire.responses import ResponsesReader
from gateway.wire.stream import GAP_BOUNDS_NS, StreamReader

__all__ = [
    "GAP_BOUNDS_NS", "ServerTimes", "StreamError", "StreamReader", "Usage", "reader_for", "verdict_of", "verdicts_of",
]  # fmt: skip

_READERS: dict[Kind, type[StreamReader]] = {
    "chat": ChatReader,
    "completions": CompletionsReader,
    "responses": ResponsesReader,
    "messages": MessagesReader,
}


def reader_for(kind: Kind) -> StreamReader:
    """A fresh reader. Kinds without tokens get one that only knows events, errors and `[DONE]`."""
    return _READERS.get(kind, StreamReader)()


def verdicts_of(
    reader: StreamReader, *, max_tokens: int | None = None, is_thinking_off: bool = False
) -> dict[int, Verdict]:
    """A verdict per choice of a whole stream, by index (cases C011).

    `max_tokens` is the budget that was sent upstream; `is_thinking_off` says that the route asked for no thinking.
    Empty when the stream was cut, failed or could not be read: then there is no answer to judge.
    """
    if reader.error is not None or reader.inspect_lost or not reader.is_finished:
        return {}
    usage = reader.usage if len(reader.choices) == 1 else None
    found: dict[int, Verdict] = {}
    for index, choice in reader.choices.items():
        verdict = judge(
            finish=reader.finish_reasons.get(index),
            has_output=bool(choice.t_visible) or choice.has_tool,
            has_reasoning=choice.has_reasoning,
            usage=usage,
            max_tokens=max_tokens,
            is_thinking_off=is_thinking_off,
        )
        if verdict is not None:
            found[index] = verdict
    return found


def verdict_of(reader: StreamReader, *, max_tokens: int | None = None, is_thinking_off: bool = False) -> Verdict | None:
    """The stream's verdict: that of the first choice, by index, which is not ok; None when there is none to give."""
    return worst_of(verdicts_of(reader, max_tokens=max_tokens, is_thinking_off=is_thinking_off))

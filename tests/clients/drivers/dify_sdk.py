"""The OpenAI-compatible model of `dify-plugin`, as Dify's plugin daemon calls it, with a model that does not exist."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dify_plugin import OAICompatLargeLanguageModel
from dify_plugin.entities.model.message import UserPromptMessage

if TYPE_CHECKING:
    from tests.clients.drivers.serve import Said

_THOUGHTS = re.compile(r"<think>\n(.*?)(\n</think>|\Z)", re.DOTALL)


class Model(OAICompatLargeLanguageModel):  # type: ignore[misc]
    """Counts tokens without the tokenizer's file, which it would fetch from the net for an answer without usage."""

    def _num_tokens_from_string(self, text: Any, tools: Any = None) -> int:
        return len(text)


Model.__module__ = "gateway.models.llm.llm"  # where a plugin keeps it: its name in messages is taken from there


def run(job: dict[str, Any], said: Said) -> None:
    credentials = {
        "endpoint_url": job["url"] + "/v1",
        "api_key": "EMPTY",
        "mode": "chat",
        "extra_headers": job["headers"],
    }
    chunks = Model([]).invoke(
        model="m",
        credentials=credentials,
        prompt_messages=[UserPromptMessage(content="hi")],
        model_parameters=dict(job["body"]),
        stream=job["stream"],
    )
    shown = ""
    for chunk in chunks:
        shown += chunk.delta.message.content or ""
        said.pieces += bool(chunk.delta.message.content)
        said.text = _THOUGHTS.sub("", shown)
        said.reasoning = " // ".join(found[0] for found in _THOUGHTS.findall(shown))  # one block, or it shows
        said.finish = chunk.delta.finish_reason or said.finish
        if said.leaves(job):
            chunks.close()
            return

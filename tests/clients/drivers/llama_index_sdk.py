"""`llama-index-llms-openai-like`: `chat` and `stream_chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

if TYPE_CHECKING:
    from tests.clients.drivers.serve import Said


def run(job: dict[str, Any], said: Said) -> None:
    more = {} if job["retries"] is None else {"max_retries": job["retries"]}
    model = OpenAILike(
        model="m",
        api_base=job["url"] + "/v1",
        api_key="EMPTY",
        is_chat_model=True,
        timeout=job["timeout"],
        default_headers=job["headers"],
        reuse_client=False,
        additional_kwargs={"extra_body": job["body"]} if job["body"] else {},
        **more,
    )
    question = [ChatMessage(role="user", content="hi")]
    if not job["stream"]:
        answer = model.chat(question)
        said.add(answer.message.content, _thoughts(answer.message))
        said.finish = answer.raw.choices[0].finish_reason
        return
    parts = model.stream_chat(question)
    for part in parts:
        said.add(part.delta, part.additional_kwargs.get("thinking_delta"))
        for choice in part.raw.choices:
            said.finish = choice.finish_reason or said.finish
        if said.leaves(job):
            parts.close()
            return


def _thoughts(message: Any) -> str:
    return "".join(block.content or "" for block in message.blocks if block.block_type == "thinking")

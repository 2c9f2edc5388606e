"""From a request body to an `Ask`: validation in vLLM's order, and one reading for all four APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.sim import refusals, text
from gateway.sim.plan import Plan, Switches, Wish, make_plan, thinking_of
from gateway.sim.profiles import Profile

Api = Literal["chat", "completions", "responses", "messages"]
Body = Mapping[str, object]

COMPLETIONS_DEFAULT_MAX_TOKENS = 16  # vLLM's default on /v1/completions only
MAX_STOP_STRINGS = 4
PROMPT_FIELDS: Mapping[Api, str] = {
    "chat": "messages",
    "messages": "messages",
    "completions": "prompt",
    "responses": "input",
}
_HIGH_EFFORT = "Reasoning effort: high. Think as long as the problem needs before the answer.\n"
BUDGET_FIELDS: Mapping[Api, tuple[str, ...]] = {  # the first one that is set wins
    "chat": ("max_completion_tokens", "max_tokens"),
    "responses": ("max_output_tokens",),
}


@dataclass(slots=True)
class Ask:
    """A valid request: what to say, to which prompt, and how the answer is wanted."""

    api: Api
    model: str
    prompt: list[str]
    plans: tuple[Plan, ...]
    max_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    salt: str
    body: Body


def read_json(content_type: str, body: bytes) -> Body:
    """The body as an object; raises `Refusal` as FastAPI would."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise refusals.validation("Unsupported Media Type: Only 'application/json' is allowed", None)
    try:
        # As the real servers read it: NaN, 1e400 and integers of any size are taken, which orjson would refuse.
        value = json.loads(body)  # noqa: TID251
    except json.JSONDecodeError as error:
        raise refusals.invalid_json(error.pos, error.msg) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise refusals.invalid_json(0, type(error).__name__) from None
    if not isinstance(value, dict):
        raise refusals.validation("{'type': 'dict_type', 'loc': 'body', 'msg': 'Input should be an object'}", "body")
    return value


def read_ask(profile: Profile, api: Api, body: Body, seed: int) -> Ask:
    """Checks everything that real servers check before the headers; raises `Refusal`."""
    _check_fields(profile, api, body)
    model = served_model(profile, body.get("model"))
    switches = _switches(api, body)
    if profile.rejects_kwargs and body.get("chat_template_kwargs") is not None:
        raise refusals.Refusal(400, "chat_template is not supported for Mistral tokenizers.")
    thinks, parses = thinking_of(profile, switches) if api != "completions" else (False, False)
    prompt = render(profile, api, body, thinks)
    tokens = text.tokenize(prompt)
    max_tokens = _budget(profile, api, body, len(tokens))
    wish = Wish(
        thinks=thinks,
        parses=parses,
        max_tokens=max_tokens,
        include_reasoning=body.get("include_reasoning") is not False,
        ignore_eos=bool(body.get("ignore_eos")),
        tool=_called_tool(profile, api, body),
    )
    choices = _positive(body.get("n"), 1)
    plans = tuple(make_plan(profile, wish, prompt, seed, choice) for choice in range(choices))
    options = body.get("stream_options")
    options = options if isinstance(options, Mapping) else {}
    usage = profile.force_usage or (profile.include_usage and bool(options.get("include_usage")))
    continuous = profile.force_usage or (usage and bool(options.get("continuous_usage_stats")))
    salt = str(body.get("cache_salt") or "")
    return Ask(api, model, tokens, plans, max_tokens, body.get("stream") is True, usage, continuous, salt, body)


def served_model(profile: Profile, name: object) -> str:
    """The name the answer will carry; an absent or empty one means the first. Raises 404 for a stranger."""
    if not isinstance(name, str) or not name:
        return profile.models[0]
    if name in profile.models or "*" in profile.models:
        return name
    raise refusals.unknown_model(name, profile.models)


def _check_fields(profile: Profile, api: Api, body: Body) -> None:
    """The schema first, then what vLLM checks by hand."""
    _check_schema(profile, api, body)
    if body.get("stream_options") and body.get("stream") is not True:
        raise refusals.invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.get("tools") == []:
        hint = "Either provide at least one tool or omit the field entirely."
        raise refusals.invalid(f"`tools` must not be an empty array. {hint}", "tools")
    if not body.get("tools") and body.get("tool_choice") not in (None, "none"):
        raise refusals.invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        raise refusals.invalid(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)


def _check_schema(profile: Profile, api: Api, body: Body) -> None:
    field = PROMPT_FIELDS[api]
    if field not in body:
        raise refusals.missing(field)
    if field == "messages" and not isinstance(body[field], list):
        raise refusals.schema_error("list_type", field, "Input should be a valid list")
    if api == "messages" and body.get("max_tokens") is None:
        raise refusals.missing("max_tokens")
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in profile.efforts:
        allowed = ", ".join(repr(name) for name in profile.efforts)
        raise refusals.schema_error("literal_error", "reasoning_effort", f"Input should be {allowed}")
    stop = body.get("stop")
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        message = f"List should have at most {MAX_STOP_STRINGS} items after validation, not {len(stop)}"
        raise refusals.schema_error("too_long", "stop", message)


def _budget(profile: Profile, api: Api, body: Body, prompt_tokens: int) -> int:
    """Tokens that may be generated, thoughts included."""
    limit = profile.max_model_len
    if prompt_tokens >= limit:
        raise refusals.prompt_too_long(limit, prompt_tokens)
    fields = BUDGET_FIELDS.get(api, ("max_tokens",))
    field = next((name for name in fields if body.get(name) is not None), "max_tokens")
    asked = body.get(field)
    if asked is None:
        return COMPLETIONS_DEFAULT_MAX_TOKENS if api == "completions" else limit - prompt_tokens
    if not isinstance(asked, int) or isinstance(asked, bool):
        raise refusals.schema_error("int_type", field, "Input should be a valid integer")
    if asked < 1:
        raise refusals.invalid(f"max_tokens must be at least 1, got {asked}.", "max_tokens", asked)
    if asked > limit:
        message = (
            f"max_tokens={asked} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
        )
        raise refusals.invalid(message, "max_tokens", asked)
    if prompt_tokens + asked > limit and profile.context_overflow == "refuse":
        raise refusals.budget_too_long(limit, prompt_tokens, asked)
    return min(asked, limit - prompt_tokens)


def _switches(api: Api, body: Body) -> Switches:
    kwargs = body.get("chat_template_kwargs")
    effort = body.get("reasoning_effort")
    if api == "responses" and isinstance(reasoning := body.get("reasoning"), Mapping):
        effort = reasoning.get("effort", effort)
    thinking = body.get("thinking") if api == "messages" else None
    if isinstance(thinking, Mapping) and thinking.get("type") == "disabled":
        effort = "none"
    return Switches(kwargs if isinstance(kwargs, Mapping) else {}, effort if isinstance(effort, str) else None)


def _called_tool(profile: Profile, api: Api, body: Body) -> Mapping[str, object] | None:
    """The function of the first tool, or of the one that tool_choice names. Chat only."""
    tools = body.get("tools")
    if api != "chat" or not isinstance(tools, list):
        return None
    functions = [
        tool["function"] for tool in tools if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    ]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and isinstance(wanted := choice.get("function"), Mapping):
        return next((function for function in functions if function.get("name") == wanted.get("name")), None)
    if choice == "required" or (profile.calls_tools and choice in (None, "auto")):
        return functions[0] if functions else None
    return None


def render(profile: Profile, api: Api, body: Body, thinks: bool) -> str:
    """The prompt as the chat template writes it, with the thinking switch where the model's family has it."""
    if api == "completions":
        return _prompt_text(body["prompt"])
    source = body.get("messages") if api != "responses" else body.get("input")
    lead = body.get("system") if api == "messages" else body.get("instructions")
    messages = source if isinstance(source, list) else [{"role": "user", "content": source}]
    if lead:
        messages = [{"role": "system", "content": lead}, *messages]
    parts = [
        f"<|{m.get('role', 'user')}|>\n{content_text(m.get('content'))}\n" for m in messages if isinstance(m, Mapping)
    ]
    start = _HIGH_EFFORT if thinks and profile.switch_at == "start" else ""
    return start + "".join(parts) + ("<|assistant|>\n<think>\n" if thinks else "<|assistant|>\n</think>\n")


def content_text(content: object) -> str:
    """Text of a message's content: a string, or parts of which those with a text count."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part for part in content if isinstance(part, Mapping))
    return "".join(str(part["text"]) for part in parts if isinstance(part.get("text"), str))


def _prompt_text(prompt: object) -> str:
    if isinstance(prompt, list):
        return "".join(piece if isinstance(piece, str) else f" {piece}" for piece in prompt)
    return str(prompt)


def _positive(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

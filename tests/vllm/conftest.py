"""A real vLLM and a gateway before it, both processes of their own, for all tests of this folder.

Every file says `pytestmark = pytest.mark.vllm`. Tests of a server with other flags come last, so that each is started
once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.vllm.gateway_process import GatewayProcess, serving
from tests.vllm.real_vllm import RealVllm, Servers, Unavailable, shared_folder

# One route per policy, chosen by the URL's prefix; what no prefix claims is left as the caller sent it.
CONFIG = """\
upstreams:
  vllm: {url: "%s"}
routes:
  - {name: quick, match: {prefix: /quick}, upstreams: [vllm], thinking: off}
  - {name: deep, match: {prefix: /deep}, upstreams: [vllm], thinking: on}
  - {name: floor, match: {prefix: /floor}, upstreams: [vllm], max_tokens: {floor: 2048}}
  - {name: too-high, match: {prefix: /too-high}, upstreams: [vllm], max_tokens: {floor: 10000}}
  - {name: filled-in, match: {prefix: /filled-in}, upstreams: [vllm], max_tokens: {default: 32}}
  - {name: ceiling, match: {prefix: /ceiling}, upstreams: [vllm], max_tokens: {ceiling: 48}}
  - {name: rescue, match: {prefix: /rescue}, upstreams: [vllm], rescue: true}
  - {name: client, upstreams: [vllm]}
"""


# Servers that are not the ordinary one, in the order in which their tests run.
OTHER_SERVERS = ("tool_vllm", "one_slot_vllm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stable: only the tests that need another server move."""

    def place(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        return max((1 + index for index, name in enumerate(OTHER_SERVERS) if name in names), default=0)

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> Iterator[None]:
    """The clients read proxy variables; nothing here goes further than this machine or `VLLM_URL`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "*")
        patch.setenv("OPENAI_API_KEY", "none")
        yield


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with Servers() as found:
        yield found


@pytest.fixture
def vllm(servers: Servers) -> RealVllm:
    """An ordinary server."""
    try:
        return servers.ordinary()
    except Unavailable as reason:
        pytest.skip(f"needs a real vLLM: {reason}")


@pytest.fixture(scope="module")
def tool_vllm(servers: Servers) -> RealVllm:
    """A server that reads tool calls."""
    try:
        return servers.with_flags("--enable-auto-tool-choice", "--tool-call-parser", "deepseek_v4")
    except Unavailable as reason:
        try:
            return servers.ordinary()  # the one that VLLM_URL names, which may read them
        except Unavailable:
            pytest.skip(f"needs a real vLLM: {reason}")


@pytest.fixture(scope="module")
def one_slot_vllm(servers: Servers) -> RealVllm:
    """A server that serves one request at a time."""
    try:
        return servers.with_flags("--max-num-seqs", "1")
    except Unavailable as reason:
        pytest.skip(f"needs a server with --max-num-seqs 1: {reason}")


@pytest.fixture(scope="session")
def _gateway(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    try:
        url = servers.ordinary().url
    except Unavailable as reason:
        pytest.skip(f"needs a real vLLM: {reason}")
    with serving(CONFIG % url, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.fixture
def gateway(_gateway: GatewayProcess, vllm: RealVllm) -> GatewayProcess:
    """A gateway before the ordinary server."""
    _gateway.wait_ready()
    return _gateway


@pytest.fixture
def new_id() -> str:
    """A request id by which the log line of a request is found."""
    return uuid.uuid4().hex


def chat_body(model: str, content: str, **more: object) -> dict[str, Any]:
    """A chat request that gives the same answer every time."""
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "temperature": 0, **more}


@pytest.fixture
def chat(vllm: RealVllm) -> Callable[..., dict[str, Any]]:
    """Makes bodies of chat requests: `chat("hi", max_tokens=5)`."""
    return lambda content, **more: chat_body(vllm.model, content, **more)


@pytest.fixture(scope="session")
def prompts() -> list[dict[str, Any]]:
    """50 real prompts, always the same: 20 Chinese, 15 English, 15 about code. Each fits the context many times over."""
    path = shared_folder() / "data" / "prompts.jsonl"
    if not path.exists():
        pytest.skip(f"needs the prompts of {path}; set FIRSTTOKEN_SHARED")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    short = [{**row, "topic": _topic(row)} for row in rows if len(row["prompt"].encode()) <= MAX_PROMPT_BYTES]
    chosen = []
    for topic, count in (("zh", 20), ("en", 15), ("code", 15)):
        fitting = [row for row in short if row["topic"] == topic]
        chosen += [fitting[index * len(fitting) // count] for index in range(count)]
    return chosen


MAX_PROMPT_BYTES = 600  # longer ones make the test's model, which has seen few of them, think without an end


def _topic(row: dict[str, Any]) -> str | None:
    if "cod" in row["kind"]:
        return "code"
    return {"zh": "zh", "en": "en"}.get(row["lang"])

"""Which server it is, from `/v1/models`."""

from __future__ import annotations

from typing import get_args

import pytest

from gateway import config
from gateway.wire.engines import FACTS, Engine, detect_engine, wants_usage


@pytest.mark.parametrize(
    "owner, expected",
    [
        ("vllm", "vllm"), ("sglang", "sglang"), ("llamacpp", "llamacpp"), ("library", "ollama"), ("VLLM", "vllm"),
        ("openai", "openai"), ("me", "openai"), (None, "openai"),
    ],
)  # fmt: skip
def test_the_owner_of_the_models_names_the_engine(owner: object, expected: Engine) -> None:
    assert detect_engine({"object": "list", "data": [{"id": "m", "owned_by": owner}]}) == expected


@pytest.mark.parametrize("payload", [None, [], "x", {}, {"data": None}, {"data": [None, 3, {}]}])
def test_a_payload_that_tells_nothing_is_some_openai_server(payload: object) -> None:
    assert detect_engine(payload) == "openai"


def test_a_server_header_helps_where_the_payload_does_not() -> None:
    assert detect_engine({}, [(b"Date", b"x"), (b"Server", b"llama.cpp")]) == "llamacpp"
    assert detect_engine({}, [(b"server", b"uvicorn")]) == "openai"


def test_usage_is_asked_for_only_where_that_is_known_to_work_and_needed() -> None:
    """C096 (d): never on a guess."""
    assert {engine for engine in FACTS if wants_usage(engine)} == {"vllm", "sglang", "ollama"}


def test_every_engine_of_the_settings_has_facts() -> None:
    assert set(FACTS) == set(get_args(config.Engine)) - {"auto"}

"""Prompts on their way through the gateway: what cleaning must leave alone, and what it is for.

The rules themselves are tested in tests/policy; here the text goes in at one socket and out at another.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import pytest

from tests.support.playing import plain, serving
from tests.support.raw import chat

LEFT_ALONE = {
    "C058 table": "| 名前 | 値 |\n|------|-----:|\n| a | 1 |",
    "C058 grid": "+-----+-----+\n| a   | b   |\n+-----+-----+",
    "C058 tree": "├───src\n│   └───main.py\n└───────────────docs",
    "C059 front matter": "---\ntitle: t\n---\n\nTitle\n-----\ntext\n\n---\n\nend",
    "C060 diff": "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b",
    "C060 pem": "-----BEGIN CERTIFICATE-----\nMIIBszCCARyg\n-----END CERTIFICATE-----",
    "C060 boundary": "------WebKitFormBoundary7MA4\ngit log ----oneline\nSELECT 1; --- note\n<!--- x --->",
    "C061 long vowels": "ラーメン、グラントウキョウノースタワー３６階、えーーーっ！、すごーーーーーい、ｺｰﾋｰ",
    "C062 kaomoji": "キタ━━━━(゜∀゜)━━━━!! 〜〜〜 そして……",
    "C063 emoji": "👩\u200d👩\u200d👧\u200d👦 🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f ❤️ 👨🏽\u200d💻 🏳️\u200d🌈 1️⃣",
    "C064 joiners": "می\u200cروم کتاب\u200cها क्\u200dष श्री\u200cमान \u06dd \u200f\u200e\u061c\u2066a\u2069 ign\u200dore",
    "C064 spaces": "prix\u00a0: 3\u202f€\u3000日本 co\u00adoperate",
    "C065 code": (
        "Fix:\n```python\ndef f():\n    if x:\n        return  'a  b'  # ———————\n```\nMakefile:\n\tcc -c x.c\n"
        "hard break  \nnext\n    indented code\n```\nunclosed ————————"
    ),
    "C065 columns": "pid      cpu     mem\n1        0.0     1.2\n     ^         ^\n",
    "dashes": "a—b――c minus −−− hyphen ‐‐‐ range 1–2",
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
async def test_what_means_something_arrives_as_it_was_sent(name: str) -> None:
    """C058–C065: byte for byte, also when another turn of the same request needs cleaning."""
    text = LEFT_ALONE[name]
    async with serving(plain()) as (upstream, running):
        sent = chat(stream=False, content=text)
        response = await running.ask(sent)
        assert (response.status, response.header("x-gateway-changes")) == (200, None)
        assert upstream.requests[0].body == sent
        turns = [{"role": "user", "content": "bell \x07"}, {"role": "assistant", "content": text}]
        await running.ask(json.dumps({"model": "m", "messages": turns}, ensure_ascii=False).encode())
        assert [m["content"] for m in upstream.requests[1].json["messages"]] == ["bell ", text]


async def test_long_dashes_become_the_chinese_dash_and_the_header_says_so() -> None:
    """C062, C069."""
    async with serving(plain()) as (upstream, running):
        response = await running.ask(chat(stream=False, content="「そんな―――」と言って ————破折号————"))
        assert upstream.requests[0].json["messages"][0]["content"] == "「そんな——」と言って ——破折号——"
        assert response.header("x-gateway-changes") == "clean=dashes:3"
        assert await running.metric("gateway_clean_changes_total", route="main", kind="dashes") == 3
        assert (await running.last_record())["changes"] == ["clean=dashes:3"]


@pytest.mark.parametrize(
    "run", ["-" * 32_768, "ー" * 20_000, "=" * 50_000, "_" * 50_000, " " * 50_000, "^" * 1_000_000]
)
async def test_runs_that_make_tokenizers_crawl_are_cut(run: str) -> None:
    """C069: the reason why cleaning exists."""
    async with serving(plain()) as (upstream, running):
        response = await running.ask(chat(stream=False, content=f"before {run} after"))
        arrived = upstream.requests[0].json["messages"][0]["content"]
        assert len(arrived) < 100
        assert arrived.startswith("before ")
        assert arrived.endswith(" after")
        assert response.header("x-gateway-changes") == "clean=long_runs:1"


@pytest.mark.parametrize(
    "text", ["a" * 100_000, "".join(map(chr, range(0x4E00, 0x4E00 + 20_000)))], ids=["letters", "cjk"]
)
async def test_letters_are_never_cut(text: str) -> None:
    """C069: 20,000 different characters without a space are a text, and one letter repeated is somebody's data."""
    async with serving(plain()) as (upstream, running):
        await running.ask(chat(stream=False, content=text))
        assert upstream.requests[0].json["messages"][0]["content"] == text


@pytest.mark.parametrize(
    "text",
    [
        " " * 2_000_000 + "x",
        "- " * 500_000,
        "ー ー" * 200_000,
        "\n " * 250_000,
        "—" * 1_000_000,
        "`" * 300_000,
        "|-" * 300_000,
    ],
    ids=["spaces", "pairs", "vowels", "lines", "dashes", "ticks", "table"],
)
async def test_the_cleaner_is_not_the_denial_of_service(text: str) -> None:
    """C070: linear; other requests go on."""
    async with serving(plain(), route={"clean": {"whitespace": "collapse"}}) as (_, running):
        began = time.monotonic()
        slow = asyncio.create_task(running.ask(chat(stream=False, content=text)))
        assert (await running.ask(chat(stream=False))).status == 200
        assert (await slow).status == 200
        assert time.monotonic() - began < 5


async def test_earlier_turns_are_cleaned_to_the_same_text_in_every_request() -> None:
    """C071: 5.9 % prefix cache hits instead of 99.9 %."""
    odd = ["bell \x07 ———— x", *LEFT_ALONE.values(), "=" * 600, "half \ufffd", "———" + "—" * 40]
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(odd)]
    async with serving(plain()) as (upstream, running):
        for count in range(1, len(turns) + 1, 3):
            await running.ask(json.dumps({"model": "m", "messages": turns[:count]}, ensure_ascii=False).encode())
        forwarded = [request.json["messages"] for request in upstream.requests]
        for earlier, later in itertools.pairwise(forwarded):
            assert later[: len(earlier)] == earlier
        again = json.dumps({"model": "m", "messages": forwarded[-1]}, ensure_ascii=False).encode()
        await running.ask(again)
        assert upstream.requests[-1].body == again  # cleaning what is clean changes nothing


CONTENTS: list[object] = [
    None, "", [], [{"type": "text", "text": None}], [{"type": "text"}], 7, 1.5, True, [["nested"]], {}, [None],
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA\x07"}}],
]  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS, ids=repr)
async def test_content_of_any_shape_is_taken(content: object) -> None:
    """C073: no exception, and what is no text stays as it is."""
    messages = [
        {"role": "user", "content": content},
        {"role": "user"},
        "text",
        None,
        {"role": "user", "content": "a\x07"},
    ]
    async with serving(plain()) as (upstream, running):
        response = await running.ask(json.dumps({"model": "m", "messages": messages}).encode())
        assert response.status == 200
        arrived = upstream.requests[0].json["messages"]
        assert arrived[:-1] == messages[:-1]
        assert arrived[-1]["content"] == "a"


PLACES: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("/v1/completions", {"prompt": "a\x07"}, {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a\x07", "b"]}, {"prompt": ["a", "b"]}),
    ("/v1/completions", {"prompt": [1, 2, 3]}, {"prompt": [1, 2, 3]}),
    ("/v1/completions", {"prompt": [[1, 2], [3]]}, {"prompt": [[1, 2], [3]]}),
    ("/v1/embeddings", {"input": ["a\x07", [1]]}, {"input": ["a", [1]]}),
    ("/v1/embeddings", {"input": "a\x07"}, {"input": "a"}),
    ("/v1/responses", {"input": "a\x07"}, {"input": "a"}),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a\x07"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
    ),
    ("/v1/messages", {"system": "s\x07", "messages": []}, {"system": "s", "messages": []}),
    ("/v1/rerank", {"query": "a\x07", "documents": ["b\x07"]}, {"query": "a\x07", "documents": ["b\x07"]}),
]


@pytest.mark.parametrize("path, given, arrived", PLACES)
async def test_prompts_of_every_api_are_cleaned_and_token_ids_are_not(
    path: str, given: dict[str, object], arrived: dict[str, object]
) -> None:
    """C073."""
    async with serving(plain()) as (upstream, running):
        assert (await running.ask(json.dumps({"model": "m", **given}).encode(), path)).status == 200
        assert upstream.requests[0].json == {"model": "m", **arrived}


async def test_roles_of_other_frameworks_become_those_that_servers_know() -> None:
    """spec §5: LangChain sends `human` and `ai` as they are."""
    messages = [{"role": role, "content": "x"} for role in ("Human", "AI", "bot", "system", "user", "wizard")]
    async with serving(plain()) as (upstream, running):
        response = await running.ask(json.dumps({"model": "m", "messages": messages}).encode())
        roles = [message["role"] for message in upstream.requests[0].json["messages"]]
        assert roles == ["user", "assistant", "assistant", "system", "user", "wizard"]
        assert response.header("x-gateway-changes") == "clean=roles:3"

"""Words for a machine that has nothing to say: a pretend tokenizer, and seeded thoughts and answers.

Everything is a list of tokens whose texts join to the whole. The same seed gives the same words in any process.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Literal

Language = Literal["en", "zh"]

_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
# About 0.7 tokens a CJK character and 0.25 a Latin one, which is what the estimators of gateways assume.
_TOKEN = re.compile(rf"[{_CJK}]{{1,2}}| ?[^\W\d_{_CJK}]{{1,7}}|\d{{1,3}}|\s+|.", re.DOTALL)
_HAS_CJK = re.compile(rf"[{_CJK}]")

_THOUGHTS: dict[Language, tuple[str, ...]] = {
    "en": (
        "read the question once more",
        "list what is known",
        "look for a hidden condition",
        "try a small example",
        "compare the two sides",
        "check the units",
        "drop what does not matter",
        "write a draft of the answer",
    ),
    "zh": (
        "重新读一遍题目",
        "列出已知条件",
        "找找有没有隐含条件",
        "先试一个小例子",
        "比较前后两种情况",
        "检查一下单位",
        "去掉无关的内容",
        "起草一个答案",
    ),
}
# Thirty tokens each, thirty characters in Chinese: the answer of the seed experiment.
_ANSWERS: dict[Language, tuple[str, ...]] = {
    "en": (
        "Here is the short version: the first token waits for three things, the queue, the prompt and "
        "the thinking, and each can be measured apart.",
        "Yes, that works, because every part of the time has a name, all parts add up to the whole, and "
        "the longest one comes first.",
        "The result stays the same, only the order of the steps changes, so turn off what nobody asked "
        "for and the whole answer comes at once too.",
    ),
    "zh": (
        "总时间等于各段时间之和，先缩短最长的那一段，效果才会最明显。",
        "答案和之前完全一样，只是关掉多余的思考后，马上就可以看到它。",
        "这件事分三步来看，先看排队，再看思考，最后才来看生成的速度。",
    ),
}


def tokenize(text: str) -> list[str]:
    """The pretend tokens of `text`; they join to `text`. Linear in its length."""
    return _TOKEN.findall(text)


def language_of(text: str) -> Language:
    """Chinese if the text holds any CJK character, else English."""
    return "zh" if _HAS_CJK.search(text) else "en"


def thoughts(count: int, language: Language, rng: random.Random) -> list[str]:
    """Exactly `count` tokens of thinking, as numbered steps."""
    return list(itertools.islice(_endless_steps(language, rng.randrange(8)), count))


def answer(count: int, language: Language, rng: random.Random) -> list[str]:
    """Exactly `count` tokens of an answer; from three tokens on it ends with a full stop."""
    if count <= 0:
        return []
    tokens = list(itertools.islice(_endless_answer(language, rng.randrange(3)), count))
    if count >= 3:
        tokens[-1] = "。" if language == "zh" else "."
    return tokens


def _words(sentence: str, language: Language) -> list[str]:
    return list(sentence) if language == "zh" else re.findall(r" ?\w+|[^\w ]", sentence)


def _endless_steps(language: Language, start: int) -> Iterator[str]:
    sentences = [_words(sentence, language) for sentence in _THOUGHTS[language]]
    for number in itertools.count(1):
        words = sentences[(start + number) % len(sentences)]
        yield from ("Step", f" {number}", ":", *((" " + words[0], *words[1:])), ".", "\n")


def _endless_answer(language: Language, start: int) -> Iterator[str]:
    sentences = [_words(sentence, language) for sentence in _ANSWERS[language]]
    yield from sentences[start]
    for number in itertools.count(start + 1):
        words = sentences[number % len(sentences)]
        yield from words if language == "zh" else (" " + words[0], *words[1:])

"""The words of `firsttoken demo` in its two languages, and how to tell which one somebody reads.

Only text: `{…}` are filled in by `story.py`. Lines of the table must fit its first column, 31 cells at a width of 80.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Language = Literal["en", "zh"]
LANGUAGES: Final[tuple[Language, ...]] = ("en", "zh")

_VARIABLES: Final = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides, as in POSIX


def language_of(environ: Mapping[str, str]) -> Language:
    """The language of a locale: Chinese for any `zh…`, else English. `LANGUAGE` goes first, as gettext has it."""
    locale = next((value for name in _VARIABLES if (value := environ.get(name))), "C")
    if locale.partition(".")[0] in ("C", "POSIX"):
        return "en"  # such a locale switches `LANGUAGE` off, too
    wanted = environ.get("LANGUAGE", "").partition(":")[0] or locale
    return "zh" if wanted.lower().startswith("zh") else "en"


@dataclass(frozen=True, slots=True)
class Phrases:
    """Everything that is said."""

    steps: tuple[str, ...]  # while each act is played
    intro: str
    title: str
    columns: tuple[str, str, str, str, str]  # gateway + network, wait, thinking, answer, total
    scenes: Mapping[str, str]
    causes: Mapping[str, str]
    tokens: str
    compiling: str
    burnt: str
    heartbeats: str
    cached: str
    legend: tuple[str, str, str]  # wait, thinking, answering
    comeback: str
    promised: str
    estimate: str
    no_estimate: str
    phases: Mapping[str, str]
    answered: str
    followed: str
    same_words: str
    advice: str
    findings: tuple[str, str, str]
    ending: str


ENGLISH: Final = Phrases(
    steps=(
        "a thinking model, asked as it comes",
        "the same question, thinking off",
        "the same question, max_tokens 64",
        "the same again, with a second try",
        "a server that has just started, and two callers",
        "the long prompt again",
        "a busy server, and a caller that comes back",
    ),
    intro=(
        "A simulated DeepSeek V4 behind this gateway, {times} times as fast as the one that took 46.8 s for thirty "
        "characters. The figures are the gateway's own account of each call."
    ),
    title="Where the time went (ms)",
    columns=("gateway +\nnetwork", "wait for\n1st token", "thinking", "answer", "total"),
    scenes={
        "thinking": "as it comes: thinking on",
        "off": "thinking off",
        "burnt": "max_tokens 64, thinking on",
        "cold": "first call after a start",
        "queued": "long prompt, queued behind 4",
        "repeated": "the same long prompt again",
        "pending": "queued again, 202 and polls",
    },
    causes={"queue": "queue", "prefill": "prefill", "network": "network", "input": "input", "unexplained": "other"},
    tokens="{count} tok",
    compiling="compiling, counted as prefill",
    burnt="empty: burnt by thinking",
    heartbeats="{count} heartbeats kept it open",
    cached="{cached} of {prompt} cached",
    legend=("waiting", "thinking", "answering"),
    comeback="Call 7 (Prefer: respond-async, wait={wait}), with three others before it:",
    promised="202 after {after}: {estimate} ({phase})",
    estimate="about {left} to go",
    no_estimate="no estimate",
    phases={"queued": "queued", "prefill": "prefill", "reasoning": "thinking", "answering": "answering"},
    answered="200 after {after}: the answer, {size} bytes",
    followed="its stream, read from the start: {size} bytes, the same as the poll's",
    same_words="its words: those that call 6 got directly",
    advice="What was slow, and the lines of a route in gateway.yaml that change it:",
    findings=(
        "Thinking that nobody asked for: {reasoning_tokens} of {completion_tokens} tokens, and {reasoning_s} of the "
        "{total_s}, of call 1. Without it the same question took {off_s}: {ratio} times as fast.",
        "An answer that never came: all {small} tokens of call 3 went into thinking, and its caller got status 200 "
        "with nothing to read. A floor leaves room for the answer behind the thoughts; `rescue` asks a plain call "
        "once more without thinking, which here brought an answer after {rescued_s}.",
        "The wait: call 4 met a server that was still compiling and waited {cold_s}; call 5 spent {queue_s} of its "
        "{queued_s} in the queue behind it. Heartbeats keep such streams open. Send one call after every start, and "
        "keep the beginnings of prompts alike: the same long prompt waited {repeated_s} the second time.",
    ),
    ending=(
        "With your own server: firsttoken serve --upstream http://your-vllm:8000\n"
        "Then the same figures are at /metrics (Prometheus) and /gateway/status (JSON)."
    ),
)

CHINESE: Final = Phrases(
    steps=(
        "思考模型，原样提问",
        "同一个问题，关掉思考",
        "同一个问题，max_tokens 64",
        "再来一次，允许补问",
        "刚启动的服务，两个调用者",
        "同样的长提示再来一次",
        "服务忙碌，调用者稍后来取",
    ),
    intro=(
        "网关后面是模拟的 DeepSeek V4，速度是那台用 46.8 秒写三十个字的服务的 {times} 倍。"
        "下面的数字都来自网关自己对每次调用的记录。"
    ),
    title="时间花在哪里（毫秒）",
    columns=("网关 +\n网络", "等首个\ntoken", "思考", "回答", "总计"),
    scenes={
        "thinking": "原样调用：思考开着",
        "off": "关掉思考",
        "burnt": "max_tokens 64，思考开着",
        "cold": "服务刚启动后的第一次调用",
        "queued": "长提示，排在 4 后面",
        "repeated": "同样的长提示再来一次",
        "pending": "又要排队，先收 202 再来取",
    },
    causes={"queue": "排队", "prefill": "预填充", "network": "网络", "input": "输入处理", "unexplained": "其他"},
    tokens="{count} 个",
    compiling="正在编译，计入预填充",
    burnt="回答为空：额度被思考用完",
    heartbeats="靠 {count} 次心跳保持连接",
    cached="{cached}/{prompt} 命中前缀缓存",
    legend=("等待", "思考", "回答"),
    comeback="第 7 次调用（Prefer: respond-async, wait={wait}），前面还排着三个请求：",
    promised="{after}后收到 202：{estimate}（{phase}）",
    estimate="大约还要 {left}",
    no_estimate="暂时无法估计",
    phases={"queued": "排队中", "prefill": "预填充中", "reasoning": "思考中", "answering": "回答中"},
    answered="{after}后收到 200：完整回答，{size} 字节",
    followed="从头读它的流：{size} 字节，与轮询得到的完全一致",
    same_words="文字与直接调用（第 6 次）得到的一样",
    advice="慢在哪里，以及 gateway.yaml 的路由里该写哪几行：",
    findings=(
        "没人要的思考：第 1 次调用的 {completion_tokens} 个 token 里有 {reasoning_tokens} 个是思考，"
        "{total_s}里占了 {reasoning_s}。关掉思考，同一个问题只用 {off_s}，速度是原来的 {ratio} 倍。",
        "没有回答的回答：第 3 次调用的 {small} 个 token 全部用于思考，调用者收到状态 200 和空内容。"
        "floor 给思考之后的回答留出额度；rescue 会在非流式调用得到空回答时关掉思考再问一次，"
        "这里 {rescued_s}后拿到了回答。",
        "等待：第 4 次调用遇上还在编译的服务，等了 {cold_s}；第 5 次等了 {queued_s}，其中 {queue_s}排在它后面。"
        "心跳让这样的流不断开。每次启动后先发一次调用，并让提示的开头保持一致：同样的长提示第二次只等 {repeated_s}。",
    ),
    ending=(
        "换成自己的服务：firsttoken serve --upstream http://your-vllm:8000\n"
        "同样的数字在 /metrics（Prometheus）和 /gateway/status（JSON）里。"
    ),
)

PHRASES: Final[dict[Language, Phrases]] = {"en": ENGLISH, "zh": CHINESE}
SECONDS: Final[dict[Language, str]] = {"en": "{} s", "zh": "{} 秒"}

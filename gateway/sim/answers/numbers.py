"""The numbers an answer carries: usage in three dialects, and vLLM's `metrics` object."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.sim.engine import Run
from gateway.sim.profiles import Profile


@dataclass(frozen=True, slots=True)
class Numbers:
    """Tokens and times of one run so far."""

    prompt: int
    cached: int
    completion: int
    reasoning: int
    choices: int
    queue_s: float
    prefill_s: float
    decode_s: float

    @classmethod
    def of(cls, run: Run) -> Numbers:
        reasoning = sum(min(plan.reasoning_tokens, run.generated) for plan in run.job.plans)
        return cls(
            prompt=run.prompt_tokens,
            cached=run.cached_tokens,
            completion=run.generated,
            reasoning=reasoning,
            choices=len(run.job.plans),
            queue_s=run.queue_s or 0.0,
            prefill_s=run.prefill_s or 0.0,
            decode_s=run.decode_s or 0.0,
        )

    def openai_usage(self, profile: Profile, *, chat: bool = True) -> dict[str, object]:
        """The `usage` of chat and completions, as it is at the end of an answer."""
        cached = {"cached_tokens": self.cached, "created_cache_tokens": 0}
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": cached if profile.shows_cached_tokens else None,
        }
        if chat and profile.reasoning_field not in ("inline", "inline_unopened"):  # counted only with a parser
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage

    def responses_usage(self) -> dict[str, object]:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning, "tool_output_tokens": 0},
            "total_tokens": self.prompt + self.completion,
        }

    def anthropic_usage(self) -> dict[str, object]:
        return {
            "input_tokens": self.prompt - self.cached,
            "output_tokens": self.completion,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
        }

    def metrics(self) -> dict[str, object] | None:
        """vLLM's per-request metrics, milliseconds; None for several choices, as vLLM does.

        `time_to_first_token_ms` is counted from scheduling and so leaves out the queue.
        """
        if self.choices > 1:
            return None
        busy_s = self.prefill_s + self.decode_s
        gaps = self.completion - 1
        return {
            "time_to_first_token_ms": self.prefill_s * 1000,
            "generation_time_ms": self.decode_s * 1000,
            "queue_time_ms": self.queue_s * 1000,
            "mean_itl_ms": self.decode_s * 1000 / gaps if gaps > 0 else None,
            "tokens_per_second": self.completion / busy_s if busy_s > 0 else None,
        }

    def llamacpp_timings(self) -> dict[str, object]:
        """llama.cpp's `timings` of the final chunk."""
        prefilled = self.prompt - self.cached
        return {
            "cache_n": self.cached,
            "prompt_n": prefilled,
            "prompt_ms": self.prefill_s * 1000,
            "prompt_per_second": prefilled / self.prefill_s if self.prefill_s > 0 else None,
            "predicted_n": self.completion,
            "predicted_ms": self.decode_s * 1000,
            "predicted_per_second": self.completion / self.decode_s if self.decode_s > 0 else None,
        }

"""A prefix cache as vLLM's: blocks of prompt tokens, chained by hash, whole blocks only, oldest out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Remembers which beginnings of prompts were computed. A capacity of 0 remembers nothing."""

    def __init__(self, capacity_blocks: int, block_tokens: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.block_tokens = block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def chain(self, tokens: Sequence[str], salt: str = "") -> list[int]:
        """One hash per whole block, each covering all tokens before it. Another salt shares nothing."""
        if not self.capacity_blocks:
            return []
        size, parent, hashes = self.block_tokens, hash(salt), []
        for start in range(0, len(tokens) - size + 1, size):
            parent = hash((parent, *tokens[start : start + size]))
            hashes.append(parent)
        return hashes

    def cached_tokens(self, chain: Sequence[int], prompt_tokens: int) -> int:
        """How many of `prompt_tokens` need no prefill. At least one token is always computed, as in vLLM."""
        blocks = 0
        for block in chain:
            if block not in self._blocks:
                break
            blocks += 1
            self._blocks.move_to_end(block)
        if blocks and blocks * self.block_tokens >= prompt_tokens:
            blocks -= 1
        return blocks * self.block_tokens

    def remember(self, chain: Sequence[int]) -> None:
        """The blocks were computed and stay until others push them out."""
        for block in chain:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.capacity_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

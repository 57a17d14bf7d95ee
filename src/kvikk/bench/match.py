"""How far texts are those of another run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TextMatch:
    """Texts beside those of a reference.

    Args:
        compared: pairs in which neither request failed.
        identical: pairs of the same text.
        token_match: share of positions at which the tokens of the texts are equal, of the longer text's; None when
            nothing could be compared.
    """

    compared: int
    identical: int
    token_match: float | None


def match_texts(texts: Sequence[str | None], reference: Sequence[str | None], tokenizer: Any) -> TextMatch:
    """Compare texts pair by pair, as tokens of one tokenizer; None stands for a request that failed."""
    pairs = [
        (mine, theirs) for mine, theirs in zip(texts, reference, strict=True) if mine is not None and theirs is not None
    ]
    equal = total = 0
    for mine, theirs in pairs:
        tokens, others = token_ids(tokenizer, mine), token_ids(tokenizer, theirs)
        equal += sum(token == other for token, other in zip(tokens, others, strict=False))
        total += max(len(tokens), len(others))
    share = equal / total if total else 1.0  # texts that are all empty are equal
    identical = sum(mine == theirs for mine, theirs in pairs)
    return TextMatch(compared=len(pairs), identical=identical, token_match=share if pairs else None)


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """A text's tokens, no special ones around them."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids

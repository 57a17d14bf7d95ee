"""OpenAI's two forms of log-probabilities, and vLLM's of the prompt's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvikk.llm import Logprob
from kvikk.server.openai.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenBytes:
    """The bytes that a token stands for, also where they are but a part of a character.

    Args:
        tokenizer: byte-level BPE and byte-fallback vocabularies are understood; elsewhere a broken character has None.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def of(self, token_id: int, text: str) -> list[int] | None:
        """The bytes of a token whose text, decoded alone, is `text`."""
        if REPLACEMENT not in text:
            return list(text.encode())
        name = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return [int(name[3:5], 16)]
        table = _byte_of_character()
        if all(character in table for character in name):
            return [table[character] for character in name]
        return None


def chat_logprobs(
    entries: Sequence[Mapping[int, Logprob]], ids: Sequence[int], top: int, raw: TokenBytes
) -> ChatLogprobs:
    """Of the tokens `ids` of a message, with the `top` likeliest at each place."""
    return ChatLogprobs(
        content=[_chat_token(entry, token, top, raw) for entry, token in zip(entries, ids, strict=True)]
    )


def _chat_token(entry: Mapping[int, Logprob], token_id: int, top: int, raw: TokenBytes) -> TokenLogprob:
    own = entry[token_id]
    return TokenLogprob(
        token=own.decoded_token,
        logprob=finite(own.logprob),
        bytes=raw.of(token_id, own.decoded_token),
        top_logprobs=[
            TopLogprob(
                token=other.decoded_token, logprob=finite(other.logprob), bytes=raw.of(token, other.decoded_token)
            )
            for token, other in entry.items()
            if other.rank <= top
        ][:top],
    )


def completion_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None], ids: Sequence[int], texts: Sequence[str], top: int, offset: int
) -> CompletionLogprobs:
    """Of the tokens `ids`, whose own texts are `texts`; `offset` is where the first begins in the whole text.

    A place without an entry (a prompt's first token) has null.
    """
    offsets, at = [], offset
    for text in texts:
        offsets.append(at)
        at += len(text)
    return CompletionLogprobs(
        text_offset=offsets,
        tokens=list(texts),
        token_logprobs=[None if e is None else finite(e[token].logprob) for e, token in zip(entries, ids, strict=True)],
        top_logprobs=[
            None if entry is None else _top(entry, token, top) for entry, token in zip(entries, ids, strict=True)
        ],
    )


def _top(entry: Mapping[int, Logprob], token_id: int, top: int) -> dict[str, float]:
    return {
        other.decoded_token: finite(other.logprob)
        for token, other in entry.items()
        if other.rank <= top or token == token_id
    }


def prompt_logprobs(entries: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt, by token id."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": finite(found.logprob),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token, found in entry.items()
        }
        for entry in entries
    ]


def finite(logprob: float) -> float:
    """JSON has no infinity: a token that cannot come has -9999, as with OpenAI."""
    return max(logprob, -9999.0)


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes are themselves, the others follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}

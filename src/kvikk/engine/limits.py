"""What a model and a pool allow, and the refusal of requests that want more."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvikk.engine.sampling_params import SamplingParams
from kvikk.errors import InvalidRequest, PromptTooLong
from kvikk.quantities import whole_number


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """What a model and a pool allow.

    Args:
        max_model_len: tokens of a sequence, prompt and generated.
        vocabulary: token ids are below it.
        eos_token_ids: end a text unless `ignore_eos`.
        length_reason: what sets `max_model_len`, for error messages, with the way out.
    """

    max_model_len: int
    vocabulary: int
    eos_token_ids: frozenset[int] = frozenset()
    length_reason: str = "the model's maximum"

    def checked_prompt(self, token_ids: Sequence[int]) -> array[int]:
        """The prompt as int32s: a garbage collection would walk a list of them.

        Raises:
            InvalidRequest: it is empty, or holds what is no token id.
            PromptTooLong: it leaves no room for an answer.
        """
        prompt = [whole_number("token id", token) for token in token_ids]
        if not prompt:
            raise InvalidRequest("the prompt is empty: give at least one token")
        for token in prompt:
            if not 0 <= token < self.vocabulary:
                raise InvalidRequest(
                    f"token id {token} is outside the model's vocabulary: ids lie between 0 and {self.vocabulary - 1}"
                )
        if len(prompt) >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt):,} tokens, at most {self.max_model_len - 1:,} leave room for an answer "
                f"({self.length_reason})"
            )
        return array("i", prompt)

    def check_params(self, params: SamplingParams, max_num_seqs: int) -> None:
        """Refuse parameters that this model, or this many rows at once, cannot serve.

        Raises:
            InvalidRequest: with the parameter's name.
        """
        if params.n > max_num_seqs:
            raise InvalidRequest(
                f"n is {params.n}, at most --max-num-seqs {max_num_seqs} texts are written at once: ask for fewer, or "
                "raise it",
                param="n",
            )
        for name, tokens in (("stop_token_ids", params.stop_tokens), ("logit_bias", params.logit_bias or ())):
            for token in tokens:
                if token >= self.vocabulary:
                    raise InvalidRequest(
                        f"{name} names token {token}, which is outside the model's vocabulary of {self.vocabulary}: "
                        "it can never come",
                        param=name,
                    )

"""From what a request wants of its text to a grammar over the model's tokens, by llguidance.

Source: https://github.com/guidance-ai/llguidance, `docs/syntax.md` and `docs/json_schema.md`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from kvikk.errors import InvalidRequest
from kvikk.grammar.grammar import Grammar, reason_of
from kvikk.grammar.params import PARAM, StructuredOutputsParams

JSON_OPTIONS: Any = {"whitespace_flexible": False, "whitespace_pattern": " ?"}
"""At most one space between the tokens of JSON: with any number allowed, a greedy model may write spaces for ever."""
END = "<|kvikk: end of grammar|>"
"""Stands for the end of a text inside the matcher. No model has it: `Grammar` deals with end tokens itself."""
KEPT = 64
"""Compiled grammars that are kept: agents send the same tools with every request."""


def validate(params: StructuredOutputsParams) -> None:
    """Check a form without a model. Special tokens that a Lark grammar names are checked by `compile` only.

    Raises:
        InvalidRequest: with the field and llguidance's reason.
    """
    is_error, messages = LLMatcher.validate_grammar_with_warnings(_source(params), limits=_limits())
    if is_error:
        raise _invalid(params, messages[0])


class GrammarCompiler:
    """Makes grammars for one model. The tokenizer is read when the first is made, which takes some 0.4 s.

    Args:
        tokenizer: transformers' tokenizer, a fast one.
        vocabulary: how many tokens the model's head has; the tokenizer may have more, or fewer.
        eos_token_ids: tokens that end a text; there may be none.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = frozenset(token for token in eos_token_ids if token < vocabulary)
        self._tokens: LLTokenizer | None = None
        self._compiled: dict[str, LLMatcher] = {}

    def compile(self, params: StructuredOutputsParams, *, may_end_early: bool = True) -> Grammar:
        """The grammar at its start, the caller's own.

        Args:
            params: the form.
            may_end_early: end tokens may come as soon as the text satisfies the grammar, though more could follow.

        Raises:
            InvalidRequest: it is not valid, or describes no text, or this model's tokenizer cannot serve any.
        """
        source = _source(params)
        found = self._compiled.pop(source, None) or self._compile(params, source)
        self._compiled[source] = found
        if len(self._compiled) > KEPT:  # the one whose last use is longest ago goes
            del self._compiled[next(iter(self._compiled))]
        return Grammar(found.deep_copy(), self._vocabulary, self._eos if may_end_early else ())

    def _compile(self, params: StructuredOutputsParams, source: str) -> LLMatcher:
        if self._tokens is None:
            self._tokens = _read_tokens(self._tokenizer, self._vocabulary)
        matcher = LLMatcher(self._tokens, source, log_level=0, limits=_limits())
        if matcher.is_error():
            raise _invalid(params, matcher.get_error())
        if not Grammar(matcher, self._vocabulary).mask().any():
            raise _invalid(params, "no text of at least one token satisfies it")
        return matcher


def _read_tokens(tokenizer: Any, vocabulary: int) -> LLTokenizer:
    """The tokens as llguidance knows them: as many as the model has, or more, and `END`."""
    try:
        from tokenizers import Tokenizer  # here, so that engines without grammars do not need it

        copied = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        copied.no_padding()
        copied.no_truncation()
        copied.add_special_tokens([END])
        size = max(vocabulary, 1 + max(copied.get_vocab(with_added_tokens=True).values()))
        return LLTokenizer(copied.to_str(), n_vocab=size, eos_token=copied.token_to_id(END))
    except Exception as error:  # not a fast one, or of a kind that llguidance does not know
        reason = str(error) or type(error).__name__
        raise InvalidRequest(
            f"structured outputs are not available: the model's tokenizer cannot be read for them ({reason})",
            param=PARAM,
        ) from error


def _source(params: StructuredOutputsParams) -> str:
    """The form in llguidance's own notation. Raises InvalidRequest where it cannot be written in it."""
    kind = params.kind
    try:
        if kind in ("json", "json_object"):
            return LLMatcher.grammar_from_json_schema(params.schema_text, defaults=JSON_OPTIONS)
        if kind == "choice":
            return grammar_from("choice", json.dumps(params.choice, ensure_ascii=False))
        return grammar_from("grammar" if kind == "grammar" else "regex", getattr(params, kind))
    except ValueError as error:  # UnicodeEncodeError is one
        raise _invalid(params, str(error)) from None


def _invalid(params: StructuredOutputsParams, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{params.kind} cannot be used: {reason_of(reason)}", param=PARAM)


def _limits() -> LLParserLimits:
    return LLParserLimits(verbose_errors=False)  # the long form holds the parser's whole state

"""Structured output: which tokens may come next, so that a text has the form that was asked for.

- `params.StructuredOutputsParams`: the form, as a request gives it.
- `compiler`: `validate` without a model; `GrammarCompiler` makes a form into a grammar over a model's tokens.
- `grammar.Grammar`: one text's state in its grammar; read this first.

Invariants: a state moves with tokens that are committed, never with those that are only considered; it can be copied
and rolled back; end tokens may come only where the text may end. The parsing itself is llguidance's.
"""

from kvikk.grammar.compiler import GrammarCompiler, validate
from kvikk.grammar.grammar import Grammar
from kvikk.grammar.params import StructuredOutputsParams

__all__ = ["Grammar", "GrammarCompiler", "StructuredOutputsParams", "validate"]

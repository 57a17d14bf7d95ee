"""Grammars over the tokens of a real model, and over tokenizers that differ from their model's head."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvikk.errors import InvalidRequest
from kvikk.grammar import Grammar, GrammarCompiler, StructuredOutputsParams
from kvikk.grammar.compiler import KEPT
from kvikk.models import load_text_side

VOCABULARY = 49152
EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_text_side("smollm2").tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCABULARY, {EOS, 0})


def form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


def follow(grammar: Grammar, tokenizer: Any, text: str) -> Grammar:
    """Advance along a text, each of whose tokens must be allowed."""
    for token in tokenizer(text, add_special_tokens=False).input_ids:
        assert grammar.mask()[token], f"{tokenizer.decode([token])!r} of {text!r} is not allowed"
        grammar.advance(token)
    return grammar


def allowed_texts(grammar: Grammar, tokenizer: Any) -> set[str]:
    return {tokenizer.decode([token]) for token in grammar.mask().nonzero()[0]}


def random_text(grammar: Grammar, tokenizer: Any, rng: random.Random, longest: int = 400) -> str | None:
    """A text that the grammar allows, by tokens drawn among the allowed; None where it grows too long."""
    tokens: list[int] = []
    while not grammar.is_complete:
        mask = grammar.mask()
        assert grammar.failure is None
        if mask[EOS] and rng.random() < 0.5:
            break
        mask[[0, EOS]] = False
        tokens.append(int(rng.choice(mask.nonzero()[0])))
        grammar.advance(tokens[-1])
        if len(tokens) > longest:
            return None
    return str(tokenizer.decode(tokens))


@pytest.mark.parametrize(
    ("params", "complete"),
    [
        (form(json=PERSON), '{"name": "Ann", "ages": [1, 22]}'),
        (form(json=PERSON), '{"name":"Ann","ages":[]}'),
        (form(json=json.dumps(PERSON)), '{"name": "Åse 😀", "ages": []}'),
        (form(json_object=True), '{"a": {"b": [1.5e3, null, "x"]}}'),
        (form(regex=r"\d{4}-\d{2}"), "2024-07"),
        (form(choice=["yes", "no", "perhaps 😀"]), "perhaps 😀"),
        (form(grammar='start: "(" NUM ")"\nNUM: /[0-9]+/'), "(12)"),
        (form(grammar='root ::= "(" [0-9]+ ")"'), "(12)"),
    ],
)
def test_a_text_of_the_form_is_allowed_and_completes_it(
    compiler: GrammarCompiler, tokenizer: Any, params: StructuredOutputsParams, complete: str
) -> None:
    grammar = follow(compiler.compile(params), tokenizer, complete)
    assert grammar.is_complete
    grammar.rollback(1)
    assert not grammar.is_complete
    grammar.advance(tokenizer(complete).input_ids[-1])
    assert grammar.failure is None
    assert set(grammar.mask().nonzero()[0]) == {0, EOS}


def test_a_text_of_another_form_is_not_allowed(compiler: GrammarCompiler, tokenizer: Any) -> None:
    for params, text in [(form(json=PERSON), '{"age'), (form(choice=["yes", "no"]), "maybe"), (form(regex="a+"), "b")]:
        with pytest.raises(AssertionError, match="is not allowed"):
            follow(compiler.compile(params), tokenizer, text)


def test_a_token_that_is_not_allowed_fails_the_grammar_for_good(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(form(regex="a+"))
    grammar.advance(500)
    assert not grammar.mask().any()
    assert not grammar.is_complete
    assert "doesn't satisfy the grammar" in str(grammar.failure)


def test_end_tokens_may_come_only_where_the_text_may_end(compiler: GrammarCompiler, tokenizer: Any) -> None:
    grammar = compiler.compile(form(regex="(ab)+"))
    assert not grammar.mask()[[0, EOS]].any()
    follow(grammar, tokenizer, "ab")
    assert grammar.mask()[[0, EOS]].all()
    assert not grammar.is_complete
    grammar.advance(EOS)
    assert grammar.is_complete
    assert not grammar.mask().any()
    assert grammar.failure is None


def test_a_text_that_may_not_end_early_goes_on_until_nothing_can_follow(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    grammar = compiler.compile(form(regex="(ab){1,3}"), may_end_early=False)
    for is_last in (False, False, True):
        follow(grammar, tokenizer, "ab")
        assert not grammar.mask()[[0, EOS]].any()
        assert grammar.is_complete == is_last


def test_a_copy_goes_its_own_way(compiler: GrammarCompiler, tokenizer: Any) -> None:
    grammar = follow(compiler.compile(form(choice=["to the sea", "to the hills"])), tokenizer, "to the")
    other = grammar.copy()
    follow(grammar, tokenizer, " sea")
    assert grammar.is_complete
    assert not other.is_complete
    assert follow(other, tokenizer, " hills").is_complete


@pytest.mark.parametrize("back", [1, 2, 5, 11])
def test_rolling_back_gives_the_state_before(compiler: GrammarCompiler, tokenizer: Any, back: int) -> None:
    grammar = compiler.compile(form(json=PERSON))
    tokens = [*tokenizer('{"name": "Ann", "ages": [1, 22]}').input_ids, EOS]
    masks = []
    for token in tokens:
        masks.append(grammar.mask())
        grammar.advance(token)
    assert grammar.is_complete
    grammar.rollback(back)
    assert (grammar.mask() == masks[-back]).all()
    for token, mask in zip(tokens[-back:], masks[-back:], strict=True):
        assert (grammar.mask() == mask).all()
        grammar.advance(token)
    assert grammar.is_complete


def test_asking_for_a_mask_changes_nothing_and_the_mask_is_the_callers(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(form(regex="[a-z]+"))
    first = grammar.mask()
    kept = first.copy()
    first[:] = True
    assert (grammar.mask() == kept).all()


def test_json_has_at_most_one_space_in_a_row_between_its_tokens(compiler: GrammarCompiler, tokenizer: Any) -> None:
    for start in ("{", '{"name":', '{"name": "Ann",', '{"name": "Ann", "ages": [1,'):
        grammar = follow(compiler.compile(form(json=PERSON)), tokenizer, start)
        texts = allowed_texts(grammar, tokenizer)
        assert " " in texts
        assert not any("\n" in text or "\t" in text or "  " in text for text in texts)
        follow(grammar, tokenizer, " ")
        assert not any(text.startswith(" ") for text in allowed_texts(grammar, tokenizer))


def test_special_tokens_never_stand_for_text(compiler: GrammarCompiler, tokenizer: Any) -> None:
    grammar = follow(compiler.compile(form(json={"type": "string"})), tokenizer, '"a')
    special = list(tokenizer.all_special_ids)
    assert len(special) > 2
    assert not grammar.mask()[special].any()
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    named = compiler.compile(form(grammar='start: <|im_start|> "a"'))
    assert named.mask().nonzero()[0].tolist() == [start]


@pytest.mark.parametrize("fields", [{"regex": "[^\\x00-\\x{10FFFF}]"}, {"regex": "(){3}"}, {"grammar": "start: start"}])
def test_a_form_that_no_text_has_is_refused(compiler: GrammarCompiler, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="no text of at least one token satisfies it") as refusal:
        compiler.compile(form(**fields))
    assert refusal.value.param == "structured_outputs"


def test_a_special_token_that_the_model_does_not_have_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="unknown special token"):
        compiler.compile(form(grammar='start: <|nope|> "a"'))


def test_compiled_grammars_are_kept_but_not_for_ever(compiler: GrammarCompiler) -> None:
    compiler.compile(form(regex="first"))
    kept = dict(compiler._compiled)
    compiler.compile(form(regex="first"))
    assert all(compiler._compiled[source] is matcher for source, matcher in kept.items())
    for number in range(KEPT + 3):
        compiler.compile(form(regex=f"a{number}"))
        compiler.compile(form(regex="first"))
    assert len(compiler._compiled) == KEPT
    assert any("first" in source for source in compiler._compiled)


def random_schema(rng: random.Random, depth: int = 3) -> tuple[dict[str, Any], Any]:
    """A schema, and a value that it describes."""
    kind = rng.choice(["integer", "boolean", "string", "enum", *(["array", "object", "anyOf"] if depth else [])])
    inner = [random_schema(rng, depth - 1) for _ in range(3)] if kind in ("object", "anyOf") else []
    if kind == "enum":
        return {"enum": ["a", 5, None]}, rng.choice(["a", 5, None])
    if kind == "anyOf":
        return {"anyOf": [schema for schema, _ in inner]}, rng.choice([value for _, value in inner])
    if kind == "array":
        items, value = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "maxItems": 3}, [value] * rng.randrange(4)
    if kind == "object":
        names = ["a", "name", "æ"]
        properties = {name: schema for name, (schema, _) in zip(names, inner, strict=True)}
        value = {name: value for name, (_, value) in zip(names, inner, strict=True)}
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}, value
    if kind == "string":
        return {"type": "string", "maxLength": 8}, rng.choice(["", "two w.", "\n é", "\u00e5😀"])
    return {"type": kind}, rng.choice([True, False]) if kind == "boolean" else rng.randrange(-999, 999)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_allowed_is_valid_and_what_is_valid_is_allowed(
    compiler: GrammarCompiler, tokenizer: Any, seed: int
) -> None:
    rng = random.Random(seed)
    schema, value = random_schema(rng)
    text = random_text(compiler.compile(form(json=schema)), tokenizer, rng)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)
    for separators in ((", ", ": "), (",", ":")):
        example = json.dumps(value, separators=separators, ensure_ascii=False)
        follow(compiler.compile(form(json=schema)), tokenizer, example)


@pytest.mark.parametrize("seed", range(20))
def test_random_walks_match_their_regex(compiler: GrammarCompiler, tokenizer: Any, seed: int) -> None:
    pattern = r"[A-Z][a-z]{1,8}( [0-9]{2}|, [a-c]+é?){1,3}\."
    text = random_text(compiler.compile(form(regex=pattern)), tokenizer, random.Random(seed))
    if text is not None:
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("vocabulary", [VOCABULARY + 128, VOCABULARY - 1000])
def test_the_models_head_may_have_more_tokens_than_the_tokenizer_or_fewer(tokenizer: Any, vocabulary: int) -> None:
    grammar = GrammarCompiler(tokenizer, vocabulary, {EOS, VOCABULARY + 5}).compile(form(regex="[a-z ]{3,}"))
    mask = grammar.mask()
    assert mask.shape == (vocabulary,)
    assert mask[:VOCABULARY].any()
    assert not mask[VOCABULARY:].any()


def byte_level(*words: str) -> Any:
    """A tokenizer of bytes and some words, without an end token."""
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(alphabet | {word: 256 + i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_a_model_without_an_end_token_ends_where_nothing_can_follow() -> None:
    tokenizer = byte_level("yes")
    grammar = GrammarCompiler(tokenizer, 257, ()).compile(form(choice=["yes", "yesterday"]))
    grammar.advance(256)
    assert not grammar.is_complete
    assert grammar.mask().sum() == 1
    follow(grammar, tokenizer, "terday")
    assert grammar.is_complete
    assert not grammar.mask().any()


def test_a_text_that_only_tokens_beyond_the_head_could_continue_is_a_failure() -> None:
    tokenizer = byte_level("yes")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    compiler = GrammarCompiler(tokenizer, letters.index("b") + 1, ())
    grammar = compiler.compile(form(regex="a(z|zz)"))
    follow(grammar, tokenizer, "a")
    assert not grammar.mask().any()
    assert grammar.failure == "no token of the model can follow"


def test_a_tokenizer_that_llguidance_cannot_read_is_named_as_the_reason() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    for tokenizer in (PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"), object()):
        with pytest.raises(InvalidRequest, match="the model's tokenizer cannot be read for them"):
            GrammarCompiler(tokenizer, 128, ()).compile(form(regex="a"))

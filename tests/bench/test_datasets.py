"""Prompts have the length asked for, and a seed makes the same ones."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvikk.bench.datasets import DatasetConfig, Request, fingerprint, make_requests, warm_up_requests
from kvikk.bench.prompts import PromptWriter
from kvikk.configuration import build
from kvikk.errors import ConfigError


def dataset(**options: Any) -> DatasetConfig:
    return build(DatasetConfig, {"num_prompts": 8, **options})


def ids(words: Any, text: str) -> list[int]:
    found: list[int] = words(text).input_ids
    return found


def shares(tmp_path: Path, *turns: tuple[str, ...]) -> str:
    """A file in ShareGPT's form."""
    path = tmp_path / "sharegpt.json"
    speakers = ("human", "gpt", "human")
    conversations = [
        [{"from": speaker, "value": text} for speaker, text in zip(speakers, said, strict=False)] for said in turns
    ]
    path.write_text(json.dumps([{"id": "x", "conversations": turns} for turns in conversations]))
    return str(path)


def test_random_prompts_are_read_back_as_so_many_tokens(words: Any) -> None:
    for length in (1, 7, 300):
        requests = make_requests(dataset(random_input_len=length, random_output_len=5), words, seed=3)
        assert {(len(ids(words, r.prompt)), r.prompt_tokens, r.output_tokens) for r in requests} == {
            (length, length, 5)
        }
        assert len({r.prompt for r in requests}) == 8


def test_special_tokens_that_a_server_adds_are_part_of_the_length() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "<unk>": 1} | {f"w{index}": index + 2 for index in range(50)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    words = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    requests = make_requests(dataset(random_input_len=9), words, seed=0)
    assert {(len(ids(words, r.prompt)), r.prompt_tokens) for r in requests} == {(9, 9)}


def test_a_tokenizer_that_reads_nothing_back_is_refused() -> None:
    class Forgetful:
        all_special_ids = (0,)
        vocab_size = 4

        def __call__(self, text: str, **options: Any) -> Any:
            return type("Encoding", (), {"input_ids": [1]})

        def decode(self, ids: list[int], **options: Any) -> str:
            return "x"

    with pytest.raises(ConfigError, match="Forgetful reads no random text back as 3 tokens"):
        PromptWriter(Forgetful(), 0).write(3)


def test_one_seed_makes_the_same_requests_and_another_seed_others(words: Any) -> None:
    options = dataset(random_input_len=20, random_range_ratio=0.5)
    first, again, other = (fingerprint(make_requests(options, words, seed)) for seed in (1, 1, 2))
    assert first == again != other
    longer = make_requests(dataset(random_input_len=20, random_range_ratio=0.5, output_len=7), words, 1)
    assert fingerprint(longer) != first


def test_lengths_spread_over_the_whole_range_and_not_beyond(words: Any) -> None:
    options = dataset(random_input_len=10, random_output_len=20, random_range_ratio=0.3, num_prompts=200)
    requests = make_requests(options, words, seed=0)
    assert {r.prompt_tokens for r in requests} == set(range(7, 14))
    assert {r.output_tokens for r in requests} == set(range(14, 27))


def test_general_lengths_stand_for_those_of_the_dataset(words: Any) -> None:
    (request, *_) = make_requests(dataset(input_len=6, output_len=4), words, seed=0)
    assert (request.prompt_tokens, request.output_tokens) == (6, 4)


def test_a_random_prefix_comes_before_every_prompt_token_by_token(words: Any) -> None:
    requests = make_requests(dataset(random_input_len=10, random_prefix_len=30), words, seed=0)
    starts = {tuple(ids(words, r.prompt)[:30]) for r in requests}
    assert len(starts) == 1
    assert {r.prompt_tokens for r in requests} == {40}


@pytest.mark.parametrize("name", ["shared-prefix", "prefix_repetition"])
def test_beginnings_are_shared_token_by_token_by_as_many_prompts_each(words: Any, name: str) -> None:
    options = dataset(
        dataset_name=name,
        num_prompts=9,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=64,
        prefix_repetition_suffix_len=16,
        prefix_repetition_output_len=5,
    )
    requests = make_requests(options, words, seed=0)
    assert {(len(ids(words, r.prompt)), r.prompt_tokens, r.output_tokens) for r in requests} == {(80, 80, 5)}
    starts = Counter(tuple(ids(words, r.prompt)[:64]) for r in requests)
    assert sorted(starts.values()) == [3, 3, 3]
    assert len({r.prompt for r in requests}) == 9


def test_every_prompt_is_asked_though_beginnings_cannot_be_shared_out_evenly(words: Any) -> None:
    options = dataset(
        dataset_name="shared-prefix",
        num_prompts=5,
        prefix_repetition_num_prefixes=2,
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=4,
    )
    starts = Counter(tuple(ids(words, r.prompt)[:8]) for r in make_requests(options, words, seed=0))
    assert sorted(starts.values()) == [2, 3]


def test_warm_ups_are_as_long_and_share_no_beginning_with_what_is_measured(words: Any) -> None:
    options = dataset(
        dataset_name="shared-prefix",
        num_warmups=10,
        prefix_repetition_num_prefixes=2,
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=4,
    )
    requests = make_requests(options, words, seed=0)
    warm_ups = warm_up_requests(options, requests, words, seed=0)
    assert [w.prompt_tokens for w in warm_ups] == [12] * 10
    measured = {tuple(ids(words, r.prompt)[:4]) for r in requests}
    assert measured.isdisjoint(tuple(ids(words, w.prompt)[:4]) for w in warm_ups)


def test_sharegpt_asks_first_questions_for_answers_as_long_as_the_files(words: Any, tmp_path: Path) -> None:
    question, reply = "What is the capital of Norway?", "It is Oslo, by the fjord."
    path = shares(tmp_path, (question, reply, "And of Sweden?"), ("alone",), ("hi", reply), (question * 400, reply))
    requests = make_requests(dataset(dataset_name="sharegpt", dataset_path=path, num_prompts=2), words, seed=0)
    right = Request(prompt=question, prompt_tokens=len(ids(words, question)), output_tokens=len(ids(words, reply)))
    assert requests == [right, right]  # the others are too short, too long, or nobody answered them


def test_sharegpt_can_be_asked_for_a_fixed_length_and_shuffles_by_seed(words: Any, tmp_path: Path) -> None:
    path = shares(tmp_path, *((f"Question number {n} of them all?", "x") for n in range(30)))
    options = dataset(dataset_name="sharegpt", dataset_path=path, sharegpt_output_len=9)
    first, again, other = (make_requests(options, words, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert {request.output_tokens for request in first} == {9}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "must hold a list of conversations, not dict"),
        ('[{"conversations": [{"from": "human", "value": "x"}]}, 5, {"conversations": 1}]', "no conversation of two"),
        ('[{"conversations": [{"value": "x"}, {"value": "y"}]}]', "no conversation with a question of 4 to 1,024"),
    ],
)
def test_a_file_of_another_form_is_refused(words: Any, tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        make_requests(dataset(dataset_name="sharegpt", dataset_path=str(path)), words, seed=0)


def test_a_file_that_is_missing_is_named(words: Any) -> None:
    with pytest.raises(ConfigError, match=r"--dataset-path /no/such\.json cannot be read"):
        make_requests(dataset(dataset_name="sharegpt", dataset_path="/no/such.json"), words, seed=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_prompts": 0}, "--num-prompts 0 must be at least 1"),
        ({"random_input_len": 0}, "--random-input-len 0"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio 1.0"),
        ({"dataset_name": "sharegpt"}, "needs the file"),
        ({"dataset_name": "sharegpt", "dataset_path": "x", "random_input_len": 5}, "--random-input-len says nothing"),
        ({"dataset_path": "x"}, "--dataset-path says nothing about the dataset random"),
        ({"dataset_name": "shared-prefix", "input_len": 5}, "--input-len 5 is for the random dataset"),
        ({"dataset_name": "shared-prefix", "prefix_repetition_suffix_len": 0}, "--prefix-repetition-suffix-len 0"),
        ({"dataset_name": "shared-prefix", "num_prompts": 9}, "--num-prompts 9 is below"),
        ({"dataset_name": "sonnet"}, "choose from random, shared-prefix"),
    ],
)
def test_options_that_say_nothing_or_nonsense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        dataset(**options)
    assert said in str(refused.value)


def test_a_negative_seed_is_refused(words: Any) -> None:
    with pytest.raises(ConfigError, match="--seed -1 must be at least 0"):
        make_requests(dataset(), words, seed=-1)

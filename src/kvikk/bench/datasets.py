"""Which prompts are asked, and how long the answers shall be."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvikk.bench.prompts import PromptWriter
from kvikk.bench.sharegpt import read_turns
from kvikk.errors import ConfigError

log = logging.getLogger(__name__)

SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
"""Tokens: ShareGPT's conversations outside of these are left out, as in vLLM's benchmark."""
WARM_UP_SEED = 2**32
"""Added to the seed for warm-up prompts, which must not be found in a cache later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, its tokens with the special ones that a server adds, and the tokens of the answer that is asked for."""

    prompt: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class RandomConfig:
    """Dataset random: each prompt is of random tokens.

    Args:
        random_input_len: tokens of a prompt.
        random_output_len: tokens of an answer.
        random_range_ratio: both lengths lie, evenly spread, within this share above and below.
        random_prefix_len: tokens that all prompts begin with, besides those of the prompt.
    """

    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0

    def __post_init__(self) -> None:
        at_least("--random-input-len", self.random_input_len, 1)
        at_least("--random-output-len", self.random_output_len, 1)
        at_least("--random-prefix-len", self.random_prefix_len, 0)
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"--random-range-ratio {self.random_range_ratio} is not a share from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class SharedPrefixConfig:
    """Dataset shared-prefix (or prefix_repetition): few long beginnings, each with many endings.

    Args:
        prefix_repetition_num_prefixes: beginnings.
        prefix_repetition_prefix_len: tokens of a beginning.
        prefix_repetition_suffix_len: tokens of an ending.
        prefix_repetition_output_len: tokens of an answer.
    """

    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_output_len: int = 128

    def __post_init__(self) -> None:
        for option in fields(self):
            at_least("--" + option.name.replace("_", "-"), getattr(self, option.name), 1)


@dataclass(frozen=True, kw_only=True)
class ShareGptConfig:
    """Dataset sharegpt: first questions of conversations from a file.

    Args:
        dataset_path: JSON file in ShareGPT's form.
        sharegpt_output_len: tokens of an answer; as many as the file's answer has when not given.
    """

    dataset_path: str | None = None
    sharegpt_output_len: int | None = None

    def __post_init__(self) -> None:
        if self.sharegpt_output_len is not None:
            at_least("--sharegpt-output-len", self.sharegpt_output_len, 1)


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Which prompts are asked.

    Args:
        dataset_name: random, shared-prefix (also prefix_repetition, its name in vLLM) or sharegpt.
        num_prompts: requests in all.
        num_warmups: requests before the measured ones, of random tokens and the same lengths.
        input_len: instead of --random-input-len.
        output_len: instead of the dataset's own flag for the tokens of an answer.
        random: options of random.
        shared_prefix: options of shared-prefix.
        sharegpt: options of sharegpt.
    """

    dataset_name: Literal["random", "shared-prefix", "prefix_repetition", "sharegpt"] = "random"
    num_prompts: int = 1000
    num_warmups: int = 0
    input_len: int | None = None
    output_len: int | None = None
    random: RandomConfig = field(default_factory=RandomConfig)
    shared_prefix: SharedPrefixConfig = field(default_factory=SharedPrefixConfig)
    sharegpt: ShareGptConfig = field(default_factory=ShareGptConfig)

    def __post_init__(self) -> None:
        at_least("--num-prompts", self.num_prompts, 1)
        at_least("--num-warmups", self.num_warmups, 0)
        for flag, value in (("--input-len", self.input_len), ("--output-len", self.output_len)):
            if value is not None:
                at_least(flag, value, 1)
        if self.input_len is not None and self.dataset_name != "random":
            raise ConfigError(f"--input-len {self.input_len} is for the random dataset, not for {self.dataset_name}")
        used = {"random": self.random, "sharegpt": self.sharegpt}.get(self.dataset_name, self.shared_prefix)
        for options in (self.random, self.shared_prefix, self.sharegpt):
            if options is not used:
                self._refuse_unused(options)
        if self.dataset_name == "sharegpt" and self.sharegpt.dataset_path is None:
            raise ConfigError("--dataset-name sharegpt needs the file of its conversations: --dataset-path FILE")
        prefixes = self.shared_prefix.prefix_repetition_num_prefixes
        if used is self.shared_prefix and self.num_prompts < prefixes:
            raise ConfigError(
                f"--num-prompts {self.num_prompts} is below --prefix-repetition-num-prefixes {prefixes}: each "
                "beginning needs a prompt; ask more or share fewer"
            )

    @property
    def is_made_up(self) -> bool:
        """Whether prompts are random tokens, after which a model's end of text means nothing."""
        return self.dataset_name != "sharegpt"

    def _refuse_unused(self, options: Any) -> None:
        for option in fields(options):
            if getattr(options, option.name) != option.default:
                flag = "--" + option.name.replace("_", "-")
                raise ConfigError(f"{flag} says nothing about the dataset {self.dataset_name}: leave it out")


def at_least(flag: str, value: int, least: int) -> None:
    """Refuse a number that is too small.

    Raises:
        ConfigError: naming the flag, the value and the limit.
    """
    if value < least:
        raise ConfigError(f"{flag} {value} must be at least {least}")


def names_in(text: str, flag: str, known: Sequence[str] | None = None) -> list[str]:
    """The names of a list with commas, each once.

    Raises:
        ConfigError: there are none, or one is not among the known.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"{flag} {text!r} names nothing: write one or several, with commas between them")
    for name in names:
        if known is not None and name not in known:
            raise ConfigError(f"{flag} {name!r} is unknown: choose from {', '.join(known)}")
    return names


def make_requests(config: DatasetConfig, tokenizer: Any, seed: int) -> list[Request]:
    """The requests that a seed stands for.

    Raises:
        ConfigError: the file cannot be used, or the tokenizer cannot write texts of these lengths.
    """
    at_least("--seed", seed, 0)
    if config.dataset_name == "sharegpt":
        return _sharegpt(config, tokenizer, seed)
    writer = PromptWriter(tokenizer, seed)
    make = _random if config.dataset_name == "random" else _shared_prefix
    return make(config, writer, np.random.default_rng([seed, 1]))


def warm_up_requests(config: DatasetConfig, requests: Sequence[Request], tokenizer: Any, seed: int) -> list[Request]:
    """Requests as long as the first `num_warmups`, of other texts: they leave nothing of theirs in a cache."""
    writer = PromptWriter(tokenizer, WARM_UP_SEED + seed)
    alike = (requests[index % len(requests)] for index in range(config.num_warmups))
    return [
        _request(writer, max(1, request.prompt_tokens - writer.added_tokens), request.output_tokens)
        for request in alike
    ]


def fingerprint(requests: Sequence[Request]) -> str:
    """Says whether two benchmarks asked the same prompts for the same lengths, in the same order."""
    asked = json.dumps([(request.prompt, request.output_tokens) for request in requests])
    return hashlib.sha256(asked.encode()).hexdigest()


def _request(writer: PromptWriter, tokens: int, output_tokens: int, after: Sequence[int] = ()) -> Request:
    text, ids = writer.write(tokens, after)
    return Request(prompt=text, prompt_tokens=len(ids) + writer.added_tokens, output_tokens=output_tokens)


def _random(config: DatasetConfig, writer: PromptWriter, random: np.random.Generator) -> list[Request]:
    options = config.random
    wanted = (config.input_len or options.random_input_len) - writer.added_tokens
    if wanted < 1:
        raise ConfigError(f"--random-input-len {wanted + writer.added_tokens} leaves no room beside special tokens")
    prefix: list[int] = []
    if options.random_prefix_len:
        prefix = writer.write(options.random_prefix_len)[1]
    inputs = _lengths(random, wanted, options.random_range_ratio, config.num_prompts)
    answers = config.output_len or options.random_output_len
    outputs = _lengths(random, answers, options.random_range_ratio, config.num_prompts)
    return [_request(writer, length, output, prefix) for length, output in zip(inputs, outputs, strict=True)]


def _lengths(random: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    low, high = max(1, math.floor(mean * (1 - ratio))), math.ceil(mean * (1 + ratio))
    drawn: list[int] = random.integers(low, high, size=count, endpoint=True).tolist()
    return drawn


def _shared_prefix(config: DatasetConfig, writer: PromptWriter, random: np.random.Generator) -> list[Request]:
    """Prompts in random order; where they cannot be shared out evenly, the first beginnings get one more."""
    options = config.shared_prefix
    output = config.output_len or options.prefix_repetition_output_len
    count = options.prefix_repetition_num_prefixes
    prefixes = [writer.write(options.prefix_repetition_prefix_len)[1] for _ in range(count)]
    requests = [
        _request(writer, options.prefix_repetition_suffix_len, output, prefixes[index % count])
        for index in range(config.num_prompts)
    ]
    return [requests[index] for index in random.permutation(len(requests))]


def _sharegpt(config: DatasetConfig, tokenizer: Any, seed: int) -> list[Request]:
    """Conversations in random order; a file with too few is gone through again."""
    path = Path(config.sharegpt.dataset_path or "")
    turns = read_turns(path)
    fixed = config.output_len or config.sharegpt.sharegpt_output_len
    found: list[Request] = []
    for index in np.random.default_rng(seed).permutation(len(turns)):
        if len(found) == config.num_prompts:
            break
        turn = turns[index]
        prompt = len(tokenizer(turn.prompt, verbose=False).input_ids)
        output = fixed or len(tokenizer(turn.answer, add_special_tokens=False, verbose=False).input_ids)
        is_long_enough = prompt >= SHORTEST and (fixed is not None or output >= SHORTEST)
        if is_long_enough and prompt <= LONGEST_PROMPT and prompt + output <= LONGEST:
            found.append(Request(prompt=turn.prompt, prompt_tokens=prompt, output_tokens=output))
    if not found:
        raise ConfigError(
            f"--dataset-path {path} holds no conversation with a question of {SHORTEST} to {LONGEST_PROMPT:,} tokens "
            f"that has at most {LONGEST:,} with its answer"
        )
    if len(found) < config.num_prompts:
        log.warning("%s has %d usable conversations for %d prompts: they repeat", path, len(found), config.num_prompts)
    return [found[index % len(found)] for index in range(config.num_prompts)]

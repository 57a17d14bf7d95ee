"""`/v1/completions` through the official client."""

from __future__ import annotations

import math

import openai
import pytest

from server.running import Running

PROMPT = "The capital of Norway is"
MODEL = "smollm2"


def test_a_completion_is_what_the_model_says(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    assert done.choices[0].text.startswith(" Oslo")
    assert done.choices[0].finish_reason == "length"
    assert done.object == "text_completion"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (5, 8, 13)
    assert done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.cached_tokens == 0


def test_the_streamed_text_is_the_plain_text(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0.8, "seed": 5}
    plain = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == plain.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_include_usage_no_chunk_has_usage(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_a_prompt_asked_again_is_found_in_the_cache_and_usage_says_so(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "kvikk counts what it finds. " * 20, "max_tokens": 4, "temperature": 0}
    first = client.completions.create(**asked)
    again = client.completions.create(**asked)
    assert first.usage is not None
    assert again.usage is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 16
    assert again.choices[0].text == first.choices[0].text
    streamed = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert streamed[-1].usage.prompt_tokens_details == again.usage.prompt_tokens_details


def test_n_texts_for_several_prompts_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "The capital of Sweden is"]
    asked = {"model": MODEL, "max_tokens": 12, "temperature": 1, "n": 3}
    whole = client.completions.create(**asked, prompt=prompts, seed=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3, 4, 5]
    assert len({choice.text for choice in whole.choices}) > 3
    second = client.completions.create(**asked, prompt=prompts[1], seed=3)
    assert [choice.text for choice in second.choices] == [choice.text for choice in whole.choices[3:]]
    texts = [""] * 6
    for chunk in client.completions.create(**asked, prompt=prompts, seed=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_a_prompt_of_token_ids_is_the_same_prompt(server: Running, client: openai.OpenAI) -> None:
    ids = server.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    asked = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    of_text = client.completions.create(**asked, prompt=PROMPT).choices[0].text
    assert client.completions.create(**asked, prompt=ids).choices[0].text == of_text
    both = client.completions.create(**asked, prompt=[ids, ids])
    assert [choice.text for choice in both.choices] == [of_text, of_text]


def test_echo_puts_the_prompt_before_the_text_streamed_or_not(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == PROMPT + text
    chunks = client.completions.create(**asked, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + text


def test_logprobs_are_of_the_tokens_and_their_offsets_lead_into_the_text(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3)
    found = done.choices[0].logprobs
    assert found is not None
    assert "".join(found.tokens) == done.choices[0].text
    for offset, token, logprob, top in zip(
        found.text_offset, found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert done.choices[0].text[offset:].startswith(token)
        assert len(top) == 3
        assert logprob == max(top.values()) == top[token]


def test_echo_with_logprobs_scores_the_prompt_also_when_it_is_cached(client: openai.OpenAI) -> None:
    prompt = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen."
    asked = {"model": MODEL, "prompt": prompt, "logprobs": 2, "echo": True, "temperature": 0}
    cold = client.completions.create(**asked, max_tokens=0)
    assert cold.choices[0].text == prompt
    assert cold.choices[0].finish_reason == "length"
    scored = cold.choices[0].logprobs
    assert scored is not None
    assert "".join(scored.tokens) == prompt
    assert scored.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in scored.token_logprobs[1:])
    client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    warm = client.completions.create(**asked, max_tokens=4)
    assert warm.choices[0].logprobs is not None
    for was, now in zip(scored.token_logprobs[1:], warm.choices[0].logprobs.token_logprobs[1:], strict=False):
        assert math.isclose(was, now, abs_tol=0.15)  # bf16
    assert len(warm.choices[0].logprobs.tokens) == len(scored.tokens) + 4


def test_stop_strings_are_cut_off_and_kept_when_asked_for(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Count: 1, 2, 3, 4,", "max_tokens": 30, "temperature": 0}
    free = client.completions.create(**asked).choices[0].text
    stop = free[8:11]
    cut = client.completions.create(**asked, stop=[stop])
    assert cut.choices[0].text == free[: free.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].model_extra["stop_reason"] == stop
    kept = client.completions.create(**asked, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == free[: free.index(stop) + len(stop)]


def test_logit_bias_and_penalties_change_what_is_said(server: Running, client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "la la la la la la la", "max_tokens": 16, "temperature": 0}
    free = client.completions.create(**asked, extra_body={"return_token_ids": True})
    token = free.choices[0].model_extra["token_ids"][0]
    barred = client.completions.create(**asked, logit_bias={str(token): -100}, extra_body={"return_token_ids": True})
    assert token not in barred.choices[0].model_extra["token_ids"]
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"extra_body": {"repetition_penalty": 2.0}}):
        assert client.completions.create(**asked, **penalty).choices[0].text != free.choices[0].text


def test_one_seed_gives_one_text_alone_and_among_others(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "max_tokens": 24, "temperature": 1.2, "top_p": 0.9, "extra_body": {"min_p": 0.02}}
    alone = client.completions.create(**asked, prompt=PROMPT, seed=11).choices[0].text
    among = client.completions.create(**asked, prompt=["Hello", PROMPT, "One, two"], seed=11)
    assert among.choices[1].text == alone
    assert client.completions.create(**asked, prompt=PROMPT, seed=12).choices[0].text != alone


def test_best_of_is_refused_with_what_to_use_instead(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(model=MODEL, prompt=PROMPT, best_of=3, n=1)

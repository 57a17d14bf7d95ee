"""`LLM` with the bundled model, as people use it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvikk import LLM, CompletionOutput, SamplingParams
from kvikk.errors import ConfigError, InvalidRequest, PromptTooLong

pytestmark = pytest.mark.usefixtures("everything_comes_back")

GREEDY = SamplingParams(temperature=0, max_tokens=24)
STORY = "Once upon a time there was a small robot who"


@pytest.fixture(scope="module")
def told(llm: LLM) -> CompletionOutput:
    """What follows STORY."""
    return llm.generate(STORY, GREEDY)[0].outputs[0]


def text_of(llm: LLM, prompt: object, params: SamplingParams = GREEDY) -> str:
    return llm.generate(prompt, params)[0].outputs[0].text  # type: ignore[arg-type]


def test_prompts_may_be_text_ids_or_vllms_dictionaries(llm: LLM, told: CompletionOutput) -> None:
    ids = llm.get_tokenizer()(STORY).input_ids
    for prompt in (STORY, ids, {"prompt": STORY}, {"prompt_token_ids": ids}):
        assert told.text.startswith(text_of(llm, prompt, replace(GREEDY, max_tokens=6)))
    outputs = llm.generate([STORY, ids, {"prompt": STORY}], GREEDY)
    assert [output.outputs[0].text for output in outputs] == [told.text] * 3
    assert outputs[0].prompt == STORY
    assert outputs[1].prompt is None
    assert outputs[1].prompt_token_ids == ids


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (20, 1, 7)]
    outputs = llm.generate(["One", "Two", "Three"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 1, 7]
    assert [output.prompt for output in outputs] == ["One", "Two", "Three"]


def test_the_deltas_of_a_stream_joined_are_the_text(llm: LLM) -> None:
    expected = llm.generate([STORY, "The sea"], GREEDY)
    texts, tokens = ["", ""], [[], []]  # type: ignore[var-annotated]
    for delta in llm.stream([STORY, "The sea"], GREEDY):
        texts[delta.prompt_index] += delta.text
        tokens[delta.prompt_index] += delta.token_ids
    assert texts == [output.outputs[0].text for output in expected]
    assert tokens == [output.outputs[0].token_ids for output in expected]


def test_closing_a_stream_gives_its_blocks_back_at_once(llm: LLM) -> None:
    stream = llm.stream([STORY] * 3, SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
    next(stream)
    assert llm.engine.pool.held > 0
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.pool.held == 0


def test_a_stream_that_is_never_read_starts_nothing(llm: LLM) -> None:
    llm.stream(STORY, GREEDY)
    assert not llm.engine.has_work


def test_interleaved_streams_each_get_their_own_text(llm: LLM) -> None:
    prompts, params = [STORY, "The sea", "In Norway"], replace(GREEDY, max_tokens=10)
    expected = [text_of(llm, prompt, params) for prompt in prompts]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    texts = [""] * 3
    open_streams = dict(enumerate(streams))
    while open_streams:
        for index in list(open_streams):
            delta = next(open_streams[index], None)
            if delta is None:
                del open_streams[index]
            else:
                texts[index] += delta.text
    assert texts == expected


def test_a_stop_string_ends_the_text_before_it_and_usage_counts_to_the_token_that_completed_it(
    llm: LLM, told: CompletionOutput
) -> None:
    whole, stop = told, told.text[20:26]
    found = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=24, stop=[stop, "never there"]))[0]
    text = found.outputs[0]
    assert text.text == whole.text[: whole.text.index(stop)]
    assert (text.finish_reason, text.stop_reason) == ("stop", stop)
    decoded = llm.get_tokenizer().decode(text.token_ids)
    assert stop in decoded
    assert stop not in llm.get_tokenizer().decode(text.token_ids[:-1])
    assert found.usage["completion_tokens"] == len(text.token_ids) < 24
    kept = SamplingParams(temperature=0, max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert text_of(llm, STORY, kept) == whole.text[: whole.text.index(stop) + len(stop)]


def test_streaming_with_a_stop_string_never_shows_a_part_of_it(llm: LLM, told: CompletionOutput) -> None:
    whole, stop = told.text, told.text[20:26]
    shown = "".join(delta.text for delta in llm.stream(STORY, SamplingParams(temperature=0, max_tokens=24, stop=stop)))
    assert shown == whole[: whole.index(stop)]


def test_a_stop_token_ends_the_text_without_its_own(llm: LLM, told: CompletionOutput) -> None:
    token = told.token_ids[6]
    first = told.token_ids.index(token)
    found = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[token]))[0].outputs[0]
    assert found.token_ids == told.token_ids[: first + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", token)
    assert found.text == llm.get_tokenizer().decode(found.token_ids[:-1])


def test_n_texts_share_one_prompt_and_each_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=12)
    before = llm.engine.computed_tokens
    (output,) = llm.generate(STORY, params)
    texts = [text.text for text in output.outputs]
    assert len(set(texts)) == 4
    assert llm.engine.computed_tokens - before <= len(output.prompt_token_ids) + 4 * 11
    assert [text.text for text in llm.generate(STORY, params)[0].outputs] == texts
    mixed = llm.generate(["Noise", STORY, STORY], [SamplingParams(max_tokens=20), params, params])
    assert [text.text for text in mixed[1].outputs] == [text.text for text in mixed[2].outputs] == texts


def test_logprobs_have_vllms_shape_and_add_up(llm: LLM) -> None:
    text = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=5, logprobs=3))[0].outputs[0]
    assert text.logprobs is not None
    assert len(text.logprobs) == 5
    for token, found in zip(text.token_ids, text.logprobs, strict=True):
        assert len(found) == 3
        assert found[token].rank == 1
        assert found[token].decoded_token == llm.get_tokenizer().decode([token])
    total = sum(found[token].logprob for token, found in zip(text.token_ids, text.logprobs, strict=True))
    assert text.cumulative_logprob == pytest.approx(total)
    chosen_only = llm.generate(STORY, SamplingParams(temperature=1.0, seed=1, max_tokens=5, logprobs=0))[0].outputs[0]
    assert all(list(found) == [token] for token, found in zip(chosen_only.token_ids, chosen_only.logprobs, strict=True))  # type: ignore[arg-type]


def test_logprobs_equal_those_of_transformers(llm: LLM) -> None:
    from transformers import AutoModelForCausalLM

    (output,) = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=6, logprobs=1))
    model = AutoModelForCausalLM.from_pretrained(llm.loaded.folder, dtype=torch.float32)
    ids = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
    with torch.inference_mode():
        expected = model(ids).logits[0].log_softmax(-1)
    assert output.outputs[0].logprobs is not None
    for index, token in enumerate(output.outputs[0].token_ids):
        position = len(output.prompt_token_ids) + index - 1
        assert math.isclose(
            output.outputs[0].logprobs[index][token].logprob, float(expected[position, token]), abs_tol=1e-4
        )


def test_chat_goes_through_the_template_and_ends_at_the_end_of_the_turn(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of Norway? Answer with one word."}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>assistant\n")
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text
    both = llm.chat([messages, messages], SamplingParams(temperature=0, max_tokens=40))
    assert [found.outputs[0].text for found in both] == [output.outputs[0].text] * 2


def test_kv_usage_says_what_the_request_held(llm: LLM) -> None:
    (output,) = llm.generate(STORY * 4, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    tokens = len(output.prompt_token_ids) + 9
    assert output.kv is not None
    assert output.kv.blocks == -(-tokens // 16)
    assert output.kv.size_bytes == output.kv.blocks * llm.capacity.geometry.block_bytes
    again = llm.generate(STORY * 4, GREEDY)[0]
    assert again.num_cached_tokens == again.usage["cached_tokens"] == len(output.prompt_token_ids) // 16 * 16


def test_a_request_that_fails_before_it_forks_gives_a_result_with_the_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(plan: object) -> list[object]:
        raise RuntimeError("injected")

    monkeypatch.setattr(llm.engine._runner, "execute", fail)
    (output,) = llm.generate(STORY, SamplingParams(n=2, max_tokens=4))
    assert output.finished
    assert [text.finish_reason for text in output.outputs] == ["error", "error"]
    assert "injected" in str(output.outputs[1].error)


def test_a_request_aborted_in_the_engine_ends_its_stream(llm: LLM) -> None:
    stream = llm.stream([STORY, "The sea"], SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, n=1))
    next(stream)
    victims = list(llm.engine._requests)
    for victim in victims:
        llm.engine.abort(victim)
    rest = list(stream)
    assert [delta.finish_reason for delta in rest if delta.output is not None] == ["abort", "abort"]


def test_a_request_of_the_engines_own_does_not_disturb_the_front(llm: LLM, told: CompletionOutput) -> None:
    own = llm.engine.add([5, 6, 7], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    assert text_of(llm, STORY) == told.text
    assert llm.engine.abort(own.id)


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_counts(llm: LLM, told: CompletionOutput) -> None:
    whole, decode = told, llm.get_tokenizer().decode
    border = len(decode(whole.token_ids[:8]))
    stop = whole.text[border - 2 : border + 2]
    assert whole.text.count(stop) == 1
    found = SamplingParams(temperature=0, max_tokens=24, stop=stop, min_tokens=8)
    assert text_of(llm, STORY, found) == whole.text[: border - 2]
    early = whole.text[border - 4 : border - 1]
    ended_before = SamplingParams(temperature=0, max_tokens=24, stop=early, min_tokens=12)
    assert early not in whole.text[border:]
    assert text_of(llm, STORY, ended_before) == whole.text


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        ("", GREEDY, InvalidRequest, "the prompt is empty"),
        ([[]], GREEDY, InvalidRequest, "the prompt is empty"),
        (["fine", ""], GREEDY, InvalidRequest, "prompt 1 of 2: the prompt is empty"),
        ([[1, 99999]], GREEDY, InvalidRequest, "token id 99999"),
        ("word " * 2000, GREEDY, PromptTooLong, "at most 1,023 leave room"),
        ({"text": "x"}, GREEDY, InvalidRequest, "give prompt or prompt_token_ids"),
        ([3.5], GREEDY, InvalidRequest, "a prompt is float"),
        (5, GREEDY, InvalidRequest, "prompts are int"),
        (None, GREEDY, InvalidRequest, "prompts are NoneType"),
        ({"prompt": None}, GREEDY, InvalidRequest, "a prompt is NoneType"),
        ("lone \ud800 surrogate", GREEDY, InvalidRequest, "not valid Unicode"),
        ("a", 5, InvalidRequest, "sampling_params is int"),
        ("a", {"temperature": 0}, InvalidRequest, "sampling_params is dict"),
        (["ok", "lone \ud800"], GREEDY, InvalidRequest, "not valid Unicode"),
        (
            "a",
            SamplingParams(stop_token_ids=[999_999]),
            InvalidRequest,
            "stop_token_ids names token 999999, which is outside",
        ),
        (["a", "b"], [GREEDY], InvalidRequest, "2 prompts came with 1 sampling_params"),
        ("a", [{"temperature": 0}], InvalidRequest, "sampling_params is dict"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_is_started(
    llm: LLM, prompts: object, params: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompts, params)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [[], "hello", None, [{"role": "nobody"}]])
def test_bad_messages_are_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(InvalidRequest):
        llm.chat(messages, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_memry": "1GiB"}, "unknown option 'kv_memry': did you mean 'kv_memory'"),
        ({"max_model_len": "4096"}, "max_model_len is '4096': it must be a whole number"),
        ({"device": "tpu"}, "device is 'tpu': choose from auto, cpu, cuda"),
        ({"numerics": "strict"}, "numerics is 'strict': choose from fast, exact"),
        ({"kv_memory": "1GiB", "gpu_memory_utilization": 0.5}, "exclude each other"),
        ({"device": "cpu", "gpu_memory_utilization": 0.5}, "needs a GPU"),
        ({"admission_reserve": float("nan")}, "admission-reserve"),
        ({"no_progress_steps": 0}, "no-progress-steps"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvikk.engine.build.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_the_defaults_are_what_the_models_authors_suggest(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    suggestions = {"temperature": 0.3, "top_k": 7, "do_sample": True}
    monkeypatch.setattr(llm, "loaded", replace(llm.loaded, generation_defaults=suggestions))
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p) == (0.3, 7, 1.0)

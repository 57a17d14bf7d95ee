"""Structured outputs, penalties and prompt log-probabilities through `LLM`, with the bundled model."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace

import jsonschema
import pytest
import torch

from kvikk import LLM, SamplingParams, StructuredOutputsParams
from kvikk.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("everything_comes_back")

STORY = "Once upon a time there was a small robot who"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "small", "fast"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = SamplingParams(temperature=0, max_tokens=100, structured_outputs=StructuredOutputsParams(json=SCHEMA))
CHOICE = StructuredOutputsParams(choice=["the hills", "the sea"])


def test_a_schema_gives_json_that_it_describes_greedy_and_sampled(llm: LLM) -> None:
    sampled = replace(PERSON, temperature=1.2, n=4, seed=3)
    outputs = llm.generate([STORY, "A robot as JSON: ", STORY], [PERSON, PERSON, sampled])
    texts = [text for output in outputs for text in output.outputs]
    assert len({text.text for text in texts}) > 3
    for text in texts:
        assert text.finish_reason == "stop"
        jsonschema.validate(json.loads(text.text), SCHEMA)


def test_beside_others_and_in_a_stream_it_gives_the_text_that_it_gives_alone(llm: LLM) -> None:
    params = replace(PERSON, temperature=1.0, seed=5, frequency_penalty=0.3, logit_bias={260: -3.0})
    alone = llm.generate(STORY, params)[0].outputs[0].text
    streamed = {0: "", 1: "", 2: ""}
    others = SamplingParams(temperature=0, max_tokens=60)
    for delta in llm.stream([STORY, STORY, "The sea"], [params, others, PERSON]):
        streamed[delta.prompt_index] += delta.text
    assert streamed[0] == alone


def test_a_regex_and_a_grammar_shape_the_whole_text(llm: LLM) -> None:
    date = StructuredOutputsParams(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
    sums = StructuredOutputsParams(grammar='root ::= [0-9] [0-9]? " + " [0-9] " = " [0-9] [0-9]')
    for form, pattern in ((date, r"\d{4}-\d{2}-\d{2}"), (sums, r"\d{1,2} \+ \d = \d\d")):
        (output,) = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=40, structured_outputs=form))
        assert re.fullmatch(pattern, output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"min_tokens": 9}])
def test_a_text_ends_when_nothing_can_follow_and_keeps_its_last_token(llm: LLM, options: dict[str, object]) -> None:
    params = SamplingParams.from_dict({"temperature": 0, "max_tokens": 50, "structured_outputs": CHOICE, **options})
    for text in (llm.generate(STORY, params)[0].outputs[0], *llm.generate(STORY, replace(params, n=2))[0].outputs):
        assert text.text in ("the hills", "the sea")
        assert (text.finish_reason, text.stop_reason) == ("stop", None)
        assert llm.get_tokenizer().decode(text.token_ids) == text.text


def test_a_form_that_never_ends_ends_at_max_tokens(llm: LLM) -> None:
    letters = StructuredOutputsParams(regex="[a-z ]+")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, structured_outputs=letters)
    (output,) = llm.generate(STORY, params)
    assert output.outputs[0].finish_reason == "length"
    assert re.fullmatch("[a-z ]+", output.outputs[0].text)


def test_a_stop_string_in_the_last_token_of_a_complete_text_ends_it_once(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, structured_outputs=CHOICE, stop=["sea", "hills"])
    deltas = list(llm.stream(STORY, params))
    assert "".join(delta.text for delta in deltas) == "the "
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert deltas[-1].output is not None
    assert deltas[-1].output.outputs[0].stop_reason in ("sea", "hills")


def test_a_form_that_cannot_be_followed_is_refused_and_nothing_is_started(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(?=a)b"))
    with pytest.raises(InvalidRequest, match=r"prompt 1 of 2: regex cannot be used: .* look-around"):
        llm.generate([STORY, STORY], [PERSON, params])


def test_logprobs_are_of_the_model_not_of_the_form(llm: LLM) -> None:
    free = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=1, logprobs=1))[0].outputs[0]
    params = SamplingParams(temperature=0, max_tokens=50, structured_outputs=CHOICE, logprobs=1)
    held = llm.generate(STORY, params)[0].outputs[0]
    assert free.logprobs is not None
    assert held.logprobs is not None
    assert held.token_ids[0] != free.token_ids[0]
    assert held.logprobs[0].keys() == {free.token_ids[0], held.token_ids[0]}
    assert held.logprobs[0][free.token_ids[0]].rank == 1 < held.logprobs[0][held.token_ids[0]].rank


def test_penalties_end_repetition_and_a_bias_can_forbid_a_token(llm: LLM) -> None:
    loop = "red blue red blue red blue red blue red"
    free = llm.generate(loop, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    assert len(set(free.token_ids)) < 6
    for name, value in [("frequency_penalty", 2.0), ("presence_penalty", 2.0), ("repetition_penalty", 1.5)]:
        params = SamplingParams.from_dict({"temperature": 0, "max_tokens": 12, name: value})
        assert len(set(llm.generate(loop, params)[0].outputs[0].token_ids)) > len(set(free.token_ids)), name
    barred = SamplingParams(temperature=0, max_tokens=12, logit_bias={free.token_ids[0]: -100})
    assert free.token_ids[0] not in llm.generate(loop, barred)[0].outputs[0].token_ids


def test_a_repetition_penalty_gives_the_text_that_transformers_gives(llm: LLM) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llm.loaded.folder, dtype=torch.float32)
    (output,) = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3))
    ids = torch.tensor([output.prompt_token_ids])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, repetition_penalty=1.3,
        pad_token_id=0,
    )[0, ids.shape[1] :].tolist()  # fmt: skip
    assert output.outputs[0].token_ids == theirs
    assert theirs != llm.generate(STORY, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].token_ids


def test_prompt_logprobs_equal_those_of_transformers(llm: LLM) -> None:
    from transformers import AutoModelForCausalLM

    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, n=1)
    first, again = (llm.generate(STORY * 8, params)[0] for _ in range(2))
    assert first.prompt_logprobs == again.prompt_logprobs
    assert again.num_cached_tokens == 0
    assert llm.generate(STORY * 8, SamplingParams(max_tokens=1))[0].prompt_logprobs is None
    model = AutoModelForCausalLM.from_pretrained(llm.loaded.folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([first.prompt_token_ids])).logits[0].log_softmax(-1)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
    for position, entries in enumerate(first.prompt_logprobs[1:]):
        assert entries is not None
        token = first.prompt_token_ids[position + 1]
        assert entries[token].decoded_token == llm.get_tokenizer().decode([token])
        assert {token, *expected[position].topk(2).indices.tolist()} == entries.keys()
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(float(expected[position, token_id]), abs=1e-3)


def test_what_a_generation_config_suggests_is_honoured(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    suggestions = {"temperature": 0.5, "min_p": 0.1, "repetition_penalty": 1.2}
    monkeypatch.setattr(llm, "loaded", replace(llm.loaded, generation_defaults=suggestions))
    with caplog.at_level(logging.WARNING):
        params = llm.get_default_sampling_params()
    assert (params.temperature, params.min_p, params.repetition_penalty) == (0.5, 0.1, 1.2)
    assert not caplog.records

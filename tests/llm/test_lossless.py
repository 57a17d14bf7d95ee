"""A real model that drafts on a small part of its cache writes what it writes with the whole one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvikk import LLM, SamplingParams
from kvikk.grammar import StructuredOutputsParams

pytestmark = pytest.mark.usefixtures("everything_comes_back")

HARBOURS = " ".join(f"The {n}th harbour lies {n * 7} miles north of the lighthouse." for n in range(1, 16))
QUESTION = [
    {"role": "user", "content": f"{HARBOURS}\n\nHow far north does the 12th harbour lie? Then list five others."}
]
FORM = r'\{"harbour": \d{1,3}, "miles": \d{1,4}, "direction": "(north|south|east|west)"\}'
EIGHTH: dict[str, Any] = {"policy": "snapkv", "budget": "12.5%", "window": 16}
LOSSLESS: dict[str, Any] = {"lossless": True, "draft_tokens": 4}


def answer(llm: LLM, kv_cache: dict[str, Any] | None, **options: Any) -> Any:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24} | options, kv_cache=kv_cache)
    (output,) = llm.chat(QUESTION, params)
    return output


JSON: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(regex=FORM), "max_tokens": 64}
NGRAM: dict[str, Any] = {"drafter": "ngram"}


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        (EIGHTH, {"repetition_penalty": 1.2, "logprobs": 3}),
        (EIGHTH, {"temperature": 0.8, "top_p": 0.9, "seed": 5, "n": 2, "stop": ["north", " miles"]}),
        (EIGHTH, JSON | {"temperature": 1.0, "seed": 1}),
        (NGRAM, {"logprobs": 1}),
        (NGRAM, JSON),
    ],
    ids=["greedy with a penalty", "two seeded texts with stop strings", "seeded json", "looked up", "json looked up"],
)
def test_its_answers_are_those_of_the_whole_cache(llm: LLM, drafter: dict[str, Any], options: dict[str, Any]) -> None:
    plain, found = answer(llm, None, **options), answer(llm, drafter | LOSSLESS, **options)
    assert found.kv_cache.drafted > 0
    for ours, whole in zip(found.outputs, plain.outputs, strict=True):
        assert (ours.text, ours.token_ids) == (whole.text, whole.token_ids)
        assert (ours.finish_reason, ours.stop_reason) == (whole.finish_reason, whole.stop_reason)
        assert (ours.logprobs is None) == (whole.logprobs is None)
        for at_ours, at_whole in zip(ours.logprobs or (), whole.logprobs or (), strict=True):
            assert [at_ours[t].logprob for t in at_ours] == pytest.approx(
                [at_whole[t].logprob for t in at_ours], abs=1e-4
            )
    if "structured_outputs" in options:
        assert json.loads(found.outputs[0].text).keys() == {"harbour", "miles", "direction"}


def test_what_was_kept_drafted_and_accepted_is_told(llm: LLM) -> None:
    lossy, found = answer(llm, EIGHTH), answer(llm, EIGHTH | LOSSLESS)
    assert lossy.outputs[0].text != answer(llm, None).outputs[0].text, "an eighth of the cache alone says other things"
    assert (lossy.kv_cache.rounds, lossy.kv_cache.drafted, lossy.kv_cache.accepted) == (0, 0, 0)
    usage = found.kv_cache
    assert usage.policy == "snapkv"
    assert usage.kept_tokens == pytest.approx(len(found.prompt_token_ids) / 8, abs=1)
    assert usage.drafted >= usage.accepted > 0
    assert usage.rounds + usage.accepted <= len(found.outputs[0].token_ids)
    assert (usage.frames_freed, usage.blocks_freed, usage.moved_bytes) == (0, 0, 0), "the whole cache stays"


def test_what_is_verified_behind_a_stop_string_is_counted_and_is_no_text(llm: LLM) -> None:
    prompt = "One, two, three, four. " * 12
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "stop": ["three"]}
    (plain,) = llm.generate(prompt, SamplingParams(**options))
    (found,) = llm.generate(prompt, SamplingParams(**options, kv_cache=NGRAM | LOSSLESS | {"draft_tokens": 32}))
    assert found.outputs == plain.outputs
    assert found.outputs[0].stop_reason == "three"
    assert found.usage["completion_tokens"] == len(plain.outputs[0].token_ids) < 10
    assert found.kv_cache is not None
    assert found.kv_cache.accepted > 10

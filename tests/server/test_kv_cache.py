"""A cache that is kept small, over HTTP: what a client may ask, what it is told, and what it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from server.running import Running, serving

MODEL = "smollm2"
DOCUMENT = " ".join(f"The {number}th harbour lies {number * 7} miles north of the lighthouse." for number in range(60))
QUARTER = {"policy": "snapkv", "budget": "25%"}


@pytest.fixture(scope="module")
def compressing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    arguments = ("--kv-memory", "96MiB", "--max-model-len", "2048", "--kv-policy", "knorm", "--kv-budget", "50%")
    with serving(tmp_path_factory.mktemp("compressing"), MODEL, *arguments) as running:
        yield running


def asked(kv_cache: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": DOCUMENT, "max_tokens": 12, "temperature": 0}
    return body | ({} if kv_cache is None else {"extra_body": {"kv_cache": kv_cache}}) | options


def kept(answer: Any) -> dict[str, Any] | None:
    return answer.usage.model_dump().get("kv_cache")


def test_a_request_says_what_to_keep_and_is_told_what_was_freed(compressing: Running) -> None:
    client = compressing.client()
    answer = client.completions.create(**asked(QUARTER))
    told = kept(answer)
    assert told is not None
    prompt = answer.usage.prompt_tokens  # type: ignore[union-attr]
    assert (told["policy"], told["compactions"], told["tokens"]) == ("snapkv", 1, prompt)
    assert told["kept_tokens"] == prompt // 4
    block_size = compressing.get("/v1/cache")["block_size"]
    assert told["blocks_freed"] >= 0.7 * (prompt // block_size)
    assert compressing.wait_until_idle()["held_blocks"] == 0


def test_the_operators_choice_holds_for_requests_that_say_nothing_and_full_takes_it_back(compressing: Running) -> None:
    client = compressing.client()
    told = kept(client.completions.create(**asked()))
    assert told is not None
    assert told["policy"] == "knorm"
    assert told["kept_tokens"] == told["tokens"] // 2
    full = client.completions.create(**asked({"policy": "full"}))
    assert kept(full) is None
    half = kept(client.completions.create(**asked({"budget": "12.5%"})))
    assert half is not None
    assert (half["policy"], half["kept_tokens"]) == ("knorm", half["tokens"] // 8)


def test_a_lossless_request_gets_the_text_of_the_whole_cache_and_is_told_what_was_drafted(compressing: Running) -> None:
    client = compressing.client()
    whole = client.completions.create(**asked({"policy": "full"}, max_tokens=24))
    for method in (QUARTER, {}, {"drafter": "ngram"}):
        answer = client.completions.create(**asked(method | {"lossless": True, "draft_tokens": 3}, max_tokens=24))
        assert answer.choices[0].text == whole.choices[0].text
        told = kept(answer)
        assert told is not None
        assert (told["lossless"], told["blocks_freed"]) == (True, 0)
        assert told["drafted"] >= told["accepted"] > 0
        assert told["accepted"] + told["rounds"] <= answer.usage.completion_tokens  # type: ignore[union-attr]
    lossy = kept(client.completions.create(**asked(QUARTER)))
    assert lossy is not None
    counts = ("lossless", "rounds", "drafted", "accepted", "moved_bytes")
    assert [lossy[name] for name in counts] == [False, 0, 0, 0, 0]
    drafted, accepted = (compressing.metric(f"spec_decode_num_{of}_tokens_total") for of in ("draft", "accepted"))
    assert drafted >= accepted > 0
    assert 0 < compressing.metric("spec_decode_num_accepted_tokens_per_pos_total", position="0") <= accepted


def test_what_went_to_the_host_and_back_is_told_and_counted(tmp_path: Path) -> None:
    memory = ("--kv-memory", "24MiB", "--max-model-len", "600", "--kv-host-memory", "64MiB", "--kv-host-use", "always")
    memory += ("--numerics", "exact")  # so that no near-tie can part the texts
    prompts = [f"Story {number}. {DOCUMENT[:1300]}" for number in range(4)]
    with serving(tmp_path, MODEL, *memory) as running:
        assert running.metric("kv_host_limit_bytes") == 64 * 2**20 // 368640 * 368640
        client = running.client()
        whole = client.completions.create(**asked(prompt=prompts, max_tokens=24))
        assert kept(whole) is None
        lossless = QUARTER | {"lossless": True, "draft_tokens": 3}
        answer = client.completions.create(**asked(lossless, prompt=prompts, max_tokens=24))
        assert [choice.text for choice in answer.choices] == [choice.text for choice in whole.choices]
        told = kept(answer)
        assert told is not None
        saved, loaded = (running.metric(f"kv_host_{what}_bytes_total") for what in ("saved", "loaded"))
        assert told["moved_bytes"] == saved + loaded
        assert min(saved, loaded) > 0
        assert running.metric("kv_host_partings_total") > 0
        assert running.metric("kv_host_refusals_total") == 0
        running.wait_until_idle()
        assert (running.metric("kv_host_used_bytes"), running.metric("kv_host_parted")) == (0, 0)


def test_streams_chats_and_several_prompts_carry_the_same_news(compressing: Running) -> None:
    client = compressing.client()
    *_, last = client.completions.create(**asked(QUARTER, stream=True, stream_options={"include_usage": True}))
    assert kept(last) == kept(client.completions.create(**asked(QUARTER)))
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": DOCUMENT}], max_tokens=4, extra_body={"kv_cache": QUARTER}
    )
    told = kept(chat)
    assert told is not None
    assert told["policy"] == "snapkv"
    both = kept(client.completions.create(**asked(QUARTER, prompt=[DOCUMENT, DOCUMENT])))
    assert both is not None
    assert both["compactions"] == 2


def test_texts_beside_compressed_ones_are_what_they_are_alone(compressing: Running) -> None:
    client = compressing.client()
    alone = client.completions.create(**asked({"policy": "full"}, n=1)).choices[0].text
    prompts = [DOCUMENT] * 3
    together = client.completions.create(**asked(QUARTER, prompt=prompts)).choices
    assert len({choice.text for choice in together}) == 1
    assert client.completions.create(**asked({"policy": "full"})).choices[0].text == alone


@pytest.mark.parametrize(
    ("kv_cache", "param", "says"),
    [
        ({"policy": "snapvk", "budget": 0.5}, "kv_cache.policy", "did you mean 'snapkv'"),
        ({"budget": "0%"}, "kv_cache.budget", "above 0"),
        ({"budget": 8}, "kv_cache.budget", "sinks"),
        ({"trigger": "sometimes"}, "kv_cache.trigger", "every:128"),
        ({"polcy": "snapkv"}, "kv_cache.polcy", "did you mean 'policy'"),
        ({"rest": "burn"}, "kv_cache.rest", "drop"),
        ({"lossless": "yes"}, "kv_cache.lossless", "true or false"),
        ({"drafter": "ngram"}, "kv_cache.drafter", "add kv_cache.lossless"),
        ({"lossless": True, "drafter": "eagle"}, "kv_cache.drafter", "cache, ngram"),
        ({"lossless": True, "drafter": "cache", "policy": "full"}, "kv_cache.drafter", "name a policy and a budget"),
        ({"lossless": True, "draft_tokens": 33}, "kv_cache.draft_tokens", "between 0 and 32"),
        ({"draft_tokens": 4}, "kv_cache.draft_tokens", "add kv_cache.lossless"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_the_field_and_the_way_out(
    compressing: Running, kv_cache: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        compressing.client().completions.create(**asked(kv_cache))
    assert caught.value.body["param"] == param  # type: ignore[index]


def test_a_kv_cache_that_is_no_object_is_refused(compressing: Running) -> None:
    response = compressing.post("/v1/completions", json=asked() | {"kv_cache": "snapkv"})
    assert response.status_code == 400
    assert "kv_cache" in response.json()["error"]["message"]

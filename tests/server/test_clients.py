"""Many clients at once: some hang up, some send nonsense, and the others notice nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import httpx
import openai
import psutil
import pytest

from kvikk.engine.padding import padded_size
from kvikk.models.bundled import bundled_folder
from server.running import Running, serving

MODEL = "smollm2"
WORDS = ["Oslo", "fjord", "winter", "harbour", "mountain", "light", "copper", "silent", "engine", "memory"]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """In fp32, where a text does not hang on its company in the batch."""
    arguments = ("--kv-memory", "96MiB", "--max-model-len", "512", "--dtype", "float32", "--max-num-seqs", "24")
    with serving(tmp_path_factory.mktemp("exact"), "smollm2", *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With a random model so small that the servers' own work is most of a request."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("light")
    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled_folder()).save_pretrained(folder)
    with serving(folder, str(folder), "--served-model-name", MODEL, "--kv-memory", "768KiB") as running:
        yield running


def asked(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    return {
        "model": MODEL,
        "prompt": " ".join(draw.choices(WORDS, k=draw.randrange(4, 40))),
        "max_tokens": 20,
        "temperature": 0.0 if number % 2 else 0.9,
        "seed": number,
    }


def test_fifty_clients_of_whom_twenty_hang_up_and_ten_send_nonsense(exact: Running) -> None:
    client = exact.async_client(timeout=300)
    http = httpx.AsyncClient(timeout=300)
    baseline = exact.wait_until_idle()

    async def stays(number: int) -> str:
        if number % 3:
            return (await client.completions.create(**asked(number))).choices[0].text
        return "".join([c.choices[0].text async for c in await client.completions.create(**asked(number), stream=True)])

    async def hangs_up(number: int) -> None:
        if number % 4 == 0:  # before there is an answer
            task = asyncio.create_task(client.completions.create(**(asked(number) | {"max_tokens": 400})))
            await asyncio.sleep(0.2 + number % 5 / 10)
            task.cancel()
            return
        body = asked(number) | {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(**body, stream=True)
        for _ in range(number % 7 + 1):
            await anext(aiter(stream))
        await stream.close()

    async def sends_nonsense(number: int) -> int:
        body = [b"{", b"\xff" * 50, json.dumps({"prompt": "x", "n": -1}).encode(), b'{"prompt": 7}'][number % 4]
        answer = await http.post(
            exact.url + "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        return answer.status_code

    async def everyone() -> tuple[list[str], list[int]]:
        alone = [await stays(number) for number in range(20)]
        exact.post("/v1/cache/reset")
        texts, _, statuses = await asyncio.gather(
            asyncio.gather(*(stays(number) for number in range(20))),
            asyncio.gather(*(hangs_up(number) for number in range(100, 120))),
            asyncio.gather(*(sends_nonsense(number) for number in range(10))),
        )
        assert texts == alone
        return texts, statuses

    texts, statuses = asyncio.run(everyone())
    assert len(set(texts)) > 15
    assert set(statuses) == {400}
    after = exact.wait_until_idle()
    assert after["held_blocks"] == baseline["held_blocks"] == 0
    exact.post("/v1/cache/reset")
    assert exact.get("/v1/cache")["free_blocks"] == after["total_blocks"]


def test_a_client_that_hangs_up_frees_its_memory_within_a_step_streaming_or_not(exact: Running) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}

    async def hang_up(stream: bool) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            task = asyncio.create_task(http.post(exact.url + "/v1/completions", json=body | {"stream": stream}))
            while not exact.get("/v1/cache")["running"]:
                await asyncio.sleep(0.02)
            task.cancel()
        exact.wait_until_idle()

    before = exact.metric("request_aborts_total", cause="client_gone")
    for stream in (True, False):
        asyncio.run(hang_up(stream))
        assert exact.get("/v1/cache")["held_blocks"] == 0
    assert exact.metric("request_aborts_total", cause="client_gone") == before + 2
    assert exact.metric("generation_tokens_total") > 0


def test_memory_of_both_processes_is_flat_over_5000_tiny_requests(light: Running) -> None:
    processes = [psutil.Process(light.process.pid), light.engine]
    client = light.async_client(timeout=300)

    async def ask(count: int, seed: int) -> None:
        draw = random.Random(seed)
        gate = asyncio.Semaphore(32)

        async def one(prompt: str) -> None:
            async with gate:
                await client.completions.create(model=MODEL, prompt=prompt, max_tokens=draw.randrange(1, 4))

        prompts = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 20))) for _ in range(count)]
        await asyncio.gather(*map(one, prompts))

    async def meet_every_size() -> None:
        """Each size of a step is compiled once: that is no leak."""
        for size in sorted({padded_size(tokens) for tokens in range(1, 960)}):
            await client.completions.create(model=MODEL, prompt=[7 + size] * size, max_tokens=1)

    async def soak() -> list[list[int]]:
        await meet_every_size()
        await ask(500, seed=0)
        seen = []
        for round_number in range(1, 9):
            await ask(560, seed=round_number)
            seen.append([process.memory_info().rss for process in processes])
        await client.close()
        return seen

    seen = asyncio.run(soak())
    for name, sizes in zip(("front", "engine"), zip(*seen, strict=True), strict=True):
        # A heap breathes by tens of MiB and may grow once, meeting a larger step; what leaks grows in most rounds and
        # lifts the lowest reading too
        half = len(sizes) // 2
        typical = median(after - before for before, after in pairwise(sizes))
        grown = min(typical, (min(sizes[half:]) - min(sizes[:half])) / half)
        readings = [size >> 20 for size in sizes]
        assert grown < 6 * 2**20, f"the {name} grows by {grown / 2**20:.1f} MiB in 560 requests: {readings}"
    assert light.wait_until_idle()["held_blocks"] == 0


def test_an_error_to_one_client_is_none_to_another(exact: Running) -> None:
    async def story() -> list[Any]:
        client = exact.async_client(timeout=120)
        good = [client.completions.create(**asked(number)) for number in range(4)]
        bad = [
            client.completions.create(model=MODEL, prompt="word " * 2000),
            client.completions.create(model="nobody", prompt="x"),
            client.completions.create(model=MODEL, prompt="x", extra_body={"guided_json": {"type": "nonsense"}}),
        ]
        return list(await asyncio.gather(*good, *bad, return_exceptions=True))

    results = asyncio.run(story())
    assert all(result.choices[0].text for result in results[:4])
    assert [type(result) for result in results[4:]] == [
        openai.BadRequestError,
        openai.NotFoundError,
        openai.BadRequestError,
    ]

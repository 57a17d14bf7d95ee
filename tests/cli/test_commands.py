"""The commands as a new user types them, with the bundled model."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from kvikk.cli import main
from kvikk.cli.demo import QUESTIONS

SMALL = ["--kv-memory", "64MiB", "--max-model-len", "1024", "--log-level", "warning"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_generate_streams_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "generate", "The capital of Norway is", "--max-tokens", "4", *SMALL)
    assert out.startswith(" Oslo")


def test_generate_json_is_one_object_with_usage_and_kv(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "The capital of Norway is " * 5
    out = printed(capsys, "generate", prompt, "--max-tokens", "12", "--ignore-eos", "--json", *SMALL)
    found = json.loads(out)
    assert out.count("\n") == 1
    assert {"text", "token_ids", "finish_reason", "usage", "kv"} <= found.keys()
    assert found["finish_reason"] == "length"
    assert len(found["token_ids"]) == found["usage"]["completion_tokens"] == 12
    assert found["usage"]["cached_tokens"] == 0
    tokens = found["usage"]["prompt_tokens"] + 11  # the last token's KV is never computed
    blocks = -(-tokens // 16)
    assert found["kv"] == {"blocks": blocks, "size_bytes": blocks * 16 * 23040, "tokens": blocks * 16}


def test_generate_n_prints_all_texts_and_one_seed_repeats_them(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "Once upon a time", "--n", "3", "--temperature", "1", "--seed", "5", "--max-tokens", "8"]
    first = json.loads(printed(capsys, *arguments, "--json", *SMALL))
    again = json.loads(printed(capsys, *arguments, "--json", *SMALL))
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert first["choices"] == again["choices"]


def test_generate_with_a_schema_from_a_file_prints_json_that_it_describes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    out = printed(capsys, "generate", "A person:", "--json-schema", str(tmp_path / "schema.json"), *SMALL)
    assert json.loads(out).keys() == {"name"}


def test_generate_takes_all_sampling_flags_and_prints_the_prompts_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--min-p", "0.1", "--presence-penalty", "0.5", "--frequency-penalty", "0.5", "--repetition-penalty", "1.1"]
    flags += [
        "--logit-bias",
        "5=-3",
        "--logit-bias",
        "7=1.5",
        "--prompt-logprobs",
        "1",
        "--choice",
        "a",
        "--choice",
        "b",
    ]
    found = json.loads(printed(capsys, "generate", "Pick a letter:", "--json", *flags, *SMALL))
    assert found["text"] in "ab"
    assert found["finish_reason"] == "stop"
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
    assert all(1 <= len(entries) <= 2 for entries in found["prompt_logprobs"][1:])


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "word " * 3000, *SMALL]) == 2
    assert re.search(r"the prompt has 3,\d+ tokens, at most 1,023 leave room", capsys.readouterr().err)


def test_a_length_that_does_not_fit_names_the_largest_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--kv-memory", "64MiB", "--max-model-len", "8000"]) == 2
    assert "the largest that fits is --max-model-len 2896" in capsys.readouterr().err
    assert main(["generate", "x", "--kv-memory", "500KiB"]) == 2
    assert "at least 720.0 KiB" in capsys.readouterr().err


def test_at_start_it_says_how_much_fits(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "x", "--max-tokens", "1", "--kv-memory", "64MiB", "--max-model-len", "1024"])
    assert "2,896 tokens in 181 blocks of 16; 2 requests of 1,024 tokens fit" in capsys.readouterr().err


def test_chat_keeps_the_conversation_and_finds_it_cached(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "Name the capital of Norway.\nAnd of Sweden?\n/reset\nHello!\n/exit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", "--max-tokens", "24", *SMALL]) == 0
    captured = capsys.readouterr()
    notes = re.findall(r"\[(\d+) prompt tokens, (\d+) of them cached\]", captured.err)
    assert len(notes) == 3
    assert int(notes[1][1]) > 32 - 16
    assert "Oslo" in captured.out


def test_chat_says_what_failed_and_forgets_that_turn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 3000 + "\nHello!\n"))
    assert main(["chat", "--max-tokens", "4", *SMALL]) == 0
    err = capsys.readouterr().err
    assert "kvikk: error: the prompt has 3,0" in err
    assert err.count("prompt tokens,") == 1


def test_demo_computes_the_document_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvikk.cli.demo.DOCUMENT_TOKENS", 900)
    monkeypatch.setattr("kvikk.cli.demo.ANSWER_TOKENS", 8)
    monkeypatch.setenv("COLUMNS", "200")
    out = printed(capsys, "demo", "--kv-memory", "64MiB", "--log-level", "warning")
    assert all(question.split("`")[0] in out for question in QUESTIONS)
    prompt, cached, computed = (
        int(re.search(rf"│ +{name} +│ +([\d,]+) ", out)[1].replace(",", ""))  # type: ignore[index]
        for name in ("prompt tokens", "found cached", "computed")
    )
    assert prompt == computed + cached
    assert cached >= 2 * 880
    assert computed < 1300
    assert "exactly the answer of the whole cache; " in out
    assert "pool check" in out


def test_doctor_names_versions_device_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "doctor")
    for name in ("kvikk", "torch", "transformers", "numba", "memory", "cuda", "compiled attention", "model cache"):
        assert re.search(rf"^{name} +\S", out, flags=re.MULTILINE), name

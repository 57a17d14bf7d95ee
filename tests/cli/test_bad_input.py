"""What a person sees who types something wrong: one line that names it, exit code 2, and no traceback."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from kvikk.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(arguments)
    captured = capsys.readouterr()
    assert code in (1, 2)
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("kvikk: error:")]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "max_tokens is 0: it must lie between 1"),
        (["--max-tokens", "-5"], "max_tokens is -5"),
        (["--max-tokens", "many"], "--max-tokens is 'many': it must be a whole number"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "7"], "top_p is 7.0"),
        (["--stop", ""], "0 characters"),
        ([item for i in range(1000) for item in ("--stop", f"s{i}")], "stop holds 1000 strings, at most 64"),
        (["--kv-memory", "lots"], "--kv-memory 'lots' is not a size"),
        (["--kv-memory", "1GiB", "--gpu-memory-utilization", "0.5"], "exclude each other"),
        (["--block-size", "7"], "--block-size 7 is not supported: choose 16 or 32"),
        (["--block-size", "x"], "--block-size is 'x': it must be a whole number"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0 must be at least 1"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "is below --max-num-seqs 64"),
        (["--numerics", "strict"], "--numerics is 'strict': choose from fast, exact"),
        (["--dtype", "int3"], "--dtype is 'int3': choose from auto"),
        (["--max-model-len", "1"], "--max-model-len 1 leaves no room"),
        (["--logprobs", "3"], "--logprobs has nowhere to show without --json"),
        (["--prompt-logprobs", "3"], "--prompt-logprobs has nowhere to show without --json"),
        (["--presence-penalty", "3"], "presence_penalty is 3.0: it must lie between -2 and 2"),
        (["--repetition-penalty", "much"], "--repetition-penalty is 'much': it must be a number"),
        (["--logit-bias", "5"], "--logit-bias is '5': it must be ID=X"),
        (["--logit-bias", "a=1"], "--logit-bias is 'a': it must be a whole number"),
        (["--regex", "(a"], "regex cannot be used"),
        (["--regex", "a", "--json-object"], "json_object and regex are given"),
        (["--choice", ""], "choice holds an empty string"),
        (["--json-schema", "/no/such/schema.json"], "cannot be read"),
        (["--gpu-memory-utilization", "0.5", "--device", "cpu"], "needs a GPU"),
        (["--config", "/no/such/file.toml"], "cannot be read"),
    ],
)
def test_a_wrong_option_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refused(capsys, "generate", "hello", *arguments)


def test_cuda_without_a_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert "--device cuda: this machine has no CUDA device" in refused(capsys, "generate", "x", "--device", "cuda")


def test_an_empty_prompt_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the prompt is empty" in refused(capsys, "generate", "")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "the prompt is empty" in refused(capsys, "generate")


def test_a_folder_that_is_no_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert str(tmp_path) in refused(capsys, "generate", "hello", "--model", str(tmp_path))


def test_an_unknown_flag_and_an_abbreviated_one_end_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--kv-memoryy", "--kv-mem"):
        with pytest.raises(SystemExit) as ended:
            main(["generate", "hello", flag, "1GiB"])
        assert ended.value.code == 2
        assert flag in capsys.readouterr().err


def test_an_environment_variable_is_checked_like_a_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIKK_BLOCK_SIZE", "17")
    assert "--block-size 17" in refused(capsys, "generate", "hello")

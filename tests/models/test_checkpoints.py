"""Checkpoints in every form give the same model; broken ones give an error that names what is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import config, load, module, own_logits, random_rows, save

from kvikk.errors import ModelError
from kvikk.models.llama import LlamaModel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(module(config("Llama")), tmp_path / "plain")


def edit(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_shards_a_bin_file_and_one_file_give_the_same_model(folder: Path, tmp_path: Path) -> None:
    made = module(config("Llama"))
    sharded = save(made, tmp_path / "sharded", max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    pickled = save(made, tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(made.state_dict(), pickled / "pytorch_model.bin")

    rows = random_rows(9)
    plain = load(folder).model
    for other in (load(sharded).model, load(pickled).model):
        assert isinstance(other, LlamaModel)
        assert torch.equal(own_logits(other, rows), own_logits(plain, rows))
        assert other.spec.fingerprint == plain.spec.fingerprint


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has shape \[63\], the config asks for \[64\]"):
        load(folder)


def test_a_tensor_that_the_config_has_no_place_for_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"no place for, such as 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        load(folder)


def test_rotary_buffers_of_old_checkpoints_are_no_error(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match="quantised weights are not supported"):
        load(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors .* is truncated"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save(module(config("Llama")), tmp_path, max_shard_size="50KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"names the shard {gone.name}, which is missing"):
        load(folder)


def test_a_broken_index_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="no safetensors index"):
        load(folder)


@pytest.mark.parametrize("kind", ["Llama", "Gemma"])
def test_a_folder_without_weights_is_an_error(kind: str, tmp_path: Path) -> None:
    folder = save(module(config(kind)), tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot read the weights"):
        load(folder)


def test_a_weight_missing_from_transformers_own_module_is_named(tmp_path: Path) -> None:
    folder = save(module(config("Gemma", head_dim=16)), tmp_path)
    edit(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"missing keys, 1 in all, such as model\.norm\.weight"):
        load(folder)


def test_a_config_that_names_no_class_is_taken_for_the_language_model_of_its_type(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    del settings["architectures"]
    (folder / "config.json").write_text(json.dumps(settings))
    assert load(folder).model.spec.architecture == "LlamaForCausalLM"


def test_a_broken_config_is_an_error(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        load(folder)


def test_a_folder_without_a_tokenizer_is_an_error_and_another_can_be_named(folder: Path, tmp_path: Path) -> None:
    other = save(module(config("Llama")), tmp_path / "other")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="--tokenizer"):
        load(folder)
    assert load(folder, tokenizer=str(other)).tokenizer.eos_token_id == 2


def test_end_tokens_are_those_of_generation_config_config_and_tokenizer_together(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], "temperature": 0.6}))
    loaded = load(folder)
    assert loaded.model.spec.eos_token_ids == {2, 5, 7}
    assert loaded.generation_defaults == {"temperature": 0.6}


def test_fingerprints_tell_fine_tunes_dtypes_and_configs_apart(folder: Path) -> None:
    def digest(**options: Any) -> str:
        return load(folder, **options).model.spec.fingerprint

    first = digest()
    assert first == digest()
    found = {first, digest(dtype="bfloat16")}

    def touch_one_weight(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][5, 7] += 1e-3

    edit(folder, touch_one_weight)
    found.add(digest())

    def swap_two_rows(tensors: dict[str, torch.Tensor]) -> None:
        rows = tensors["lm_head.weight"]
        rows[[0, 1]] = rows[[1, 0]]

    edit(folder, swap_two_rows)
    found.add(digest())
    settings = json.loads((folder / "config.json").read_text())
    settings["rms_norm_eps"] = 1e-3
    (folder / "config.json").write_text(json.dumps(settings))
    found.add(digest())
    assert len(found) == 5

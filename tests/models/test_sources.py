"""What a user names is found, or the error says what was looked for."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from tiny import config, load, module, own_logits, random_rows, reference_logits, save, save_tokenizer

from kvikk.errors import ModelError
from kvikk.models.llama import LlamaModel
from kvikk.models.sources import locate

GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path, made: Any, architecture: str = "llama") -> None:
    """A Llama as llama.cpp stores it: other names, and Q and K rows in the order of interleaved rotation."""
    writer = gguf.GGUFWriter(path, architecture)
    settings = made.config
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_rope_freq_base(settings.rope_parameters["rope_theta"])
    writer.add_vocab_size(settings.vocab_size)
    fixed = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    for name, tensor in made.state_dict().items():
        array = tensor.float().numpy()
        if name in fixed:
            writer.add_tensor(f"{fixed[name]}.weight", array)
            continue
        layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = settings.num_attention_heads if "q_proj" in part else settings.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[part]}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_gguf_file_gives_the_model_it_was_made_from(form: str, tmp_path: Path) -> None:
    made = module(config("Llama"))
    write_gguf(tmp_path / "tiny.gguf", made)
    words = tmp_path / "words"
    save_tokenizer(words)
    named = tmp_path / "tiny.gguf" if form == "file" else tmp_path
    loaded = load(named, tokenizer=str(words), dtype="float32")
    rows = random_rows(20, 8)

    assert isinstance(loaded.model, LlamaModel)
    torch.testing.assert_close(own_logits(loaded.model, rows), reference_logits(made, rows), atol=2e-5, rtol=1e-5)


def test_a_gguf_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", module(config("Llama")), architecture="rwkv9")
    with pytest.raises(ModelError, match="'rwkv9'"):
        load(tmp_path / "tiny.gguf")


def test_a_truncated_gguf_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, module(config("Llama")))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelError, match=r"tiny\.gguf \(200 bytes\) is truncated"):
        load(path)


def test_a_file_that_is_no_gguf_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_bytes(struct.pack("<Q", 12345))
    with pytest.raises(ModelError, match="is no GGUF file"):
        load(path)


def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no model: it has no config\.json and no GGUF file"):
        load(tmp_path)


def test_a_folder_with_two_gguf_files_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "nothing", "org/name:file.bin"])
def test_a_name_that_is_nothing_is_an_error(name: str) -> None:
    with pytest.raises(ModelError, match="is no folder or file here"):
        load(name)


def test_a_hub_that_cannot_be_reached_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"org/name is not in the local hub cache .* local folder"):
        load("org/name")


def test_a_hub_id_downloads_what_a_model_needs_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(module(config("Llama")), tmp_path)
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("org/name", "v2").folder == folder
    ((repository, revision, patterns),) = asked
    assert (repository, revision) == ("org/name", "v2")
    assert "*.safetensors" in patterns
    assert "*.bin" not in patterns

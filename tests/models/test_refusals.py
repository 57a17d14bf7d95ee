"""What cannot be served is refused by name, with the reason, before any weight is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import config, load, module, save

from kvikk.errors import ConfigError, ModelError
from kvikk.models import load_model
from kvikk.models.rope import check_rope
from kvikk.models.support import check_config, refusal, resolve_length

MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
REFUSED: dict[str, tuple[Any, str]] = {
    "MLA": (lambda: config("DeepseekV3", **MLA), "kv_lora_rank 16"),
    "Mamba": (lambda: config("Mamba"), "recurrent state"),
    "linear attention": (lambda: config("Qwen3Next"), "recurrent state"),
    "short convolutions": (lambda: config("Lfm2"), "recurrent state"),
    "capped scores": (lambda: config("Gemma2"), "attn_logit_softcapping 50"),
    "sinks": (lambda: config("GptOss"), "sinks"),
    "encoder-decoder": (lambda: config("Bart"), "encoder-decoder"),
}


def named(made: Any, architecture: str | None = None) -> Any:
    made.architectures = [architecture or type(made).__name__.removesuffix("Config") + "ForCausalLM"]
    return made


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_architecture_is_refused_by_name_and_reason(name: str) -> None:
    make, reason = REFUSED[name]
    made = named(make())
    with pytest.raises(ModelError, match=f"{made.architectures[0]} is not supported: .*{reason}"):
        check_config(made)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("quantization_config", {"quant_method": "gptq"}, r"quantised \(gptq\)"),
        ("num_kv_shared_layers", 3, "share the KV"),
        ("alibi", True, "ALiBi"),
        ("v_head_dim", 8, "V heads are 8 wide"),
        ("layer_types", ["full_attention", "chunked_attention"], "chunked_attention"),
        ("vision_config", {"depth": 2}, "multi-modal"),
    ],
)
def test_a_feature_that_is_not_computed_is_refused(field: str, value: object, reason: str) -> None:
    made = named(config("Llama", head_dim=16))
    setattr(made, field, value)
    with pytest.raises(ModelError, match=reason):
        check_config(made)


def test_a_head_that_does_not_predict_tokens_is_refused() -> None:
    with pytest.raises(ModelError, match=r"LlamaForSequenceClassification .* no head"):
        check_config(named(config("Llama"), "LlamaForSequenceClassification"))


def test_dynamic_rope_is_refused() -> None:
    made = config("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ModelError, match="'dynamic' takes its frequencies from the longest sequence of the batch"):
        check_rope(made, 64)


def test_longrope_is_refused_past_its_original_length_with_the_way_out() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
    made = config("Phi3", rope_parameters=rope, original_max_position_embeddings=64)
    check_rope(made, 64)
    with pytest.raises(ModelError, match="--max-model-len 64"):
        check_rope(made, 65)


def test_a_smaller_sliding_window_lowers_max_model_len_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    made = config("Mistral", sliding_window=100)
    with caplog.at_level(logging.WARNING, logger="kvikk"):
        assert resolve_length(made, None) == 100
    assert "from 256 to 100" in caplog.text


def test_a_sliding_window_no_smaller_than_max_model_len_counts_as_full(caplog: pytest.LogCaptureFixture) -> None:
    made = config("Mistral", sliding_window=100)
    assert resolve_length(made, 100) == 100
    assert not caplog.records


def test_a_window_that_no_layer_uses_does_not_count() -> None:
    assert resolve_length(config("Qwen2", use_sliding_window=False, sliding_window=32), None) == 256


def test_a_length_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 257 is more than the model's 256 positions: at most 256"):
        resolve_length(config("Llama"), 257)


def test_a_model_without_a_length_is_refused() -> None:
    with pytest.raises(ModelError, match=r"BloomForCausalLM .* names no max_position_embeddings"):
        check_config(named(transformers.BloomConfig()))


def test_layers_of_different_shapes_are_refused() -> None:
    made = named(config("Llama"))
    made.per_layer_config = {0: {"head_dim": 8}}
    with pytest.raises(ModelError, match="its layers differ in head_dim"):
        check_config(made)


def test_what_a_config_allows_is_not_refused() -> None:
    assert refusal(named(config("Llama"))) is None


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    folder = save(module(config("Llama")), tmp_path)
    (folder / "configuration_own.py").write_text("raise SystemExit('this ran')\n")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}})
    )
    with pytest.raises(ModelError, match="never run"):
        load(folder)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    folder = save(module(config("Llama")), tmp_path)
    with pytest.raises(ModelError, match="dtype 'int8' is not one of auto, bfloat16, float16, float32"):
        load(folder, dtype="int8")


def test_fp16_checkpoints_become_bf16_on_the_cpu(tmp_path: Path) -> None:
    folder = save(module(config("Llama")).half(), tmp_path)
    assert load(folder).model.spec.dtype == torch.bfloat16
    assert load(folder, dtype="float32").model.spec.dtype == torch.float32


def test_exact_numerics_are_refused_where_they_cannot_be_kept_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, llama = (
        save(module(config("Gemma", head_dim=16)), tmp_path / "a"),
        save(module(config("Llama")), tmp_path / "b"),
    )
    monkeypatch.setattr("kvikk.models.load.read_module", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr("kvikk.models.load.SafetensorsFolder", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"GemmaForCausalLM runs on transformers' own module.* use --numerics fast"):
        load(other, numerics="exact")
    with pytest.raises(ConfigError, match=r"not in torch.float16: pass --dtype bfloat16"):
        load(llama, numerics="exact", dtype="float16")
    with pytest.raises(ConfigError, match="not available on mps: use --device cpu or cuda"):
        load_model(str(llama), device=torch.device("mps"), numerics="exact")
    monkeypatch.setattr("kvikk.models.load.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs triton: pip install 'kvikk\[cuda\]'"):
        load_model(str(llama), device=torch.device("cuda"), numerics="exact")

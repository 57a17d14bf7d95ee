"""What `kvikk models` knows is what loading decides."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny import config, module, save

from kvikk.models.catalogue import Architecture, CachedModel, architectures, cached_models
from kvikk.models.family import FAMILIES
from kvikk.models.support import Refused


@pytest.fixture(scope="module")
def known() -> list[Architecture]:
    return architectures()


def of(known: list[Architecture], model_type: str) -> Architecture:
    (found,) = (each for each in known if model_type in each.model_types)
    return found


def test_the_own_module_serves_the_families_and_no_others(known: list[Architecture]) -> None:
    assert {each.name for each in known if each.way == "own"} == set(FAMILIES)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma", "mixtral", "opt", "granite"])
def test_other_decoders_run_on_transformers_module(known: list[Architecture], model_type: str) -> None:
    assert of(known, model_type).way == "transformers"


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("deepseek_v3", Refused.LATENT),
        ("mamba", Refused.RECURRENT),
        ("gemma2", Refused.SOFT_CAPPED),
        ("gpt_oss", Refused.SINKS),
        ("bart", Refused.ENCODER_DECODER),
        ("bloom", Refused.UNLIMITED),
        ("mllama", Refused.MULTI_MODAL),
    ],
)
def test_a_refused_architecture_names_its_kind(known: list[Architecture], model_type: str, kind: Refused) -> None:
    found = of(known, model_type)
    assert (found.way, found.refused) == ("refused", kind)


def test_every_causal_model_of_transformers_is_listed_once_for_each_type(known: list[Architecture]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    listed = [model_type for each in known for model_type in each.model_types]
    assert sorted(listed) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def in_hub_cache(hub: Path, name: str, made: Any, *, revision: str, ref: str | None = "main") -> Path:
    """Lay a model out as huggingface_hub caches it; returns the snapshot."""
    repository = hub / ("models--" + name.replace("/", "--"))
    snapshot = repository / "snapshots" / revision
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    save(made, snapshot)
    if ref is not None:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(revision)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that is not there yet, and an empty cache of our own."""
    monkeypatch.setenv("KVIKK_CACHE", str(tmp_path / "own"))
    return tmp_path / "hub"


def test_a_machine_without_models_lists_none(hub: Path) -> None:
    assert cached_models(hub) == []


def test_cached_models_have_name_place_size_and_verdict(hub: Path) -> None:
    good = in_hub_cache(hub, "org/good", module(config("Llama")), revision="a" * 40)
    gpt = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128)
    capped = in_hub_cache(hub, "org/capped", module(gpt), revision="b" * 40)
    settings = json.loads((capped / "config.json").read_text())
    (capped / "config.json").write_text(json.dumps(settings | {"attn_logit_softcapping": 30.0}))

    first, second = cached_models(hub)
    assert (first.name, first.source, first.folder, first.architecture) == (
        "org/capped",
        "hub",
        capped,
        "GPT2LMHeadModel",
    )
    assert first.refused is not None
    assert "attn_logit_softcapping 30.0" in first.refused
    assert second == CachedModel(
        name="org/good",
        source="hub",
        folder=good,
        size_bytes=sum(file.stat().st_size for file in good.iterdir()),
        architecture="LlamaForCausalLM",
    )


def test_the_main_branch_speaks_for_a_model_with_several_revisions(hub: Path) -> None:
    main = in_hub_cache(hub, "org/two", module(config("Llama")), revision="a" * 40)
    in_hub_cache(hub, "org/two", module(config("Qwen2")), revision="b" * 40, ref=None)
    (found,) = cached_models(hub)
    assert found.folder == main


def test_the_bundled_model_is_listed_once_it_is_converted(hub: Path, tmp_path: Path) -> None:
    from kvikk.models.bundled import CONVERSION

    (tmp_path / "own").mkdir()
    folder = save(module(config("Llama")), tmp_path / "own" / CONVERSION)
    (found,) = cached_models(hub)
    assert (found.name, found.source, found.folder) == ("smollm2", "bundled", folder)


def test_a_config_that_cannot_be_read_is_a_verdict_not_a_crash(hub: Path) -> None:
    snapshot = in_hub_cache(hub, "org/broken", module(config("Llama")), revision="a" * 40)
    (snapshot / "config.json").write_text("{")
    (found,) = cached_models(hub)
    assert found.architecture is None
    assert found.refused is not None
    assert "config.json cannot be read" in found.refused


def test_a_broken_entry_of_the_hub_cache_is_told(hub: Path, caplog: pytest.LogCaptureFixture) -> None:
    (hub / "models--org--empty").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, logger="kvikk"):
        assert cached_models(hub) == []
    assert "models--org--empty" in caplog.text

"""`kvikk models` tells what runs, what is refused, and what is here."""

from __future__ import annotations

import json

import pytest

from kvikk.cli import main
from kvikk.models import load_text_side
from kvikk.models.family import FAMILIES
from kvikk.models.support import Refused


def test_json_holds_architectures_and_cached_models(capsys: pytest.CaptureFixture[str]) -> None:
    load_text_side(None)  # converts the bundled model, if that was not done yet
    capsys.readouterr()
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ways = {each["name"]: each["way"] for each in found["architectures"]}
    assert {ways[name] for name in FAMILIES} == {"own"}
    assert ways["GPT2LMHeadModel"] == "transformers"
    assert ways["DeepseekV3ForCausalLM"] == "refused"
    bundled = found["cached"][0]
    assert (bundled["name"], bundled["architecture"], bundled["refused"]) == ("smollm2", "LlamaForCausalLM", None)
    assert bundled["size_bytes"] > 250 * 2**20


def test_the_text_names_every_kind_of_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(f"  {kind}" in lines for kind in Refused)
    assert max(map(len, lines)) <= 200

"""`kvikk policies` tells what can be asked for."""

from __future__ import annotations

import json

import pytest

from kvikk.cli import main
from kvikk.cli.policies import as_text
from kvikk.compress import KVCacheParams
from kvikk.compress.catalogue import Listed


def test_json_holds_every_policy_and_each_can_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert {"full", "streaming", "random", "snapkv", "h2o", "tova", "knorm", "keydiff"} <= set(found)
    for name, each in found.items():
        budget = None if name == "full" else "25%"
        assert KVCacheParams(policy=name, policy_options=each["options"], budget=budget).policy == name
    assert found["snapkv"]["options"] == {"query_window": 32, "kernel": 5, "pooling": "mean"}
    assert found["snapkv"]["signals"] == ["keys", "queries"]
    assert found["snapkv"]["origin"] == "built-in"


def test_the_text_says_what_each_keeps_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    text = capsys.readouterr().out
    assert "snapkv              built-in  keys, queries\n    Keep what the last queries attend to" in text
    assert "options: query_window=32, kernel=5, pooling=mean" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_policy_that_cannot_be_used_says_why() -> None:
    text = as_text([Listed(name="mine", origin="others", fault="it cannot be imported: no licence")])
    assert text == "mine  others  cannot be used\n    it cannot be imported: no licence"

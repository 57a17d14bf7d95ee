"""Where prompts are cut from."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from kvikk.bench.texts import pieces, texts
from kvikk.errors import ConfigError


def characters(text: str) -> list[int]:
    return [ord(each) for each in text]


@pytest.mark.parametrize("source", ["code", "prose", "chat", "json"])
def test_every_python_carries_enough_of_each_kind_of_text(source: str) -> None:
    assert sum(len(text) for _, text in texts(source)) > 400_000


def test_chat_is_questions_and_answers_in_turn() -> None:
    for _, text in islice(texts("chat"), 5):
        roles = [part.split("\n", 1)[0] for part in text.split("<|im_start|>")[1:]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_json_can_be_read_as_such() -> None:
    name, text = next(texts("json"))
    assert (name, json.loads(text)[0]["name"]) == ("0000", "SPACE")


def test_several_sources_take_turns_and_each_goes_on_where_it_was(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder, text in zip(folders, ("12345", "xyz"), strict=True):
        folder.mkdir()
        (folder / "t.txt").write_text(text)
    found = pieces(",".join(map(str, folders)), [2, 1, 2, 3], characters)
    assert ["".join(map(chr, piece)) for piece in found] == ["12", "x", "34", "yzx"]


def test_a_source_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nowhere' is none of code, prose, chat, json"):
        list(pieces("code,nowhere", [1, 1], characters))
    with pytest.raises(ConfigError, match="has no text in it"):
        list(pieces(str(tmp_path), [1], characters))

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from kvikk.configuration import build, from_environment, from_file, options_of
from kvikk.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Inner.

    Args:
        size: how many
            pieces.
        share: of it.
    """

    size: int = 3
    share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Outer.

    Args:
        mode: how.
        is_on: whether.
    """

    mode: Literal["slow", "fast"] = "fast"
    is_on: bool = True
    inner: Inner = field(default_factory=Inner)


def test_the_tree_is_flat_from_outside_and_its_help_is_the_docstring() -> None:
    options = options_of(Outer)
    assert list(options) == ["mode", "is_on", "size", "share"]
    assert options["size"].help == "how many pieces."
    assert options["size"].flag == "--size"
    assert options["is_on"].variable == "KVIKK_IS_ON"
    assert build(Outer, {"size": 5, "mode": "slow"}) == Outer(mode="slow", inner=Inner(size=5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sise": 3}, "unknown option 'sise': did you mean 'size'"),
        ({"zzzzz": 3}, "known are: mode, is_on, size, share"),
        ({"size": "3"}, "size is '3': it must be a whole number"),
        ({"size": True}, "whole number"),
        ({"size": None}, "size is None"),
        ({"share": "much"}, "share is 'much': it must be a number"),
        ({"mode": "warp"}, "mode is 'warp': choose from slow, fast"),
        ({"is_on": 1}, "true or false"),
    ],
)
def test_unknown_names_and_wrong_types_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Outer, values)


def test_environment_and_file_fill_the_same_tree(tmp_path: Path) -> None:
    options = options_of(Outer)
    found = from_environment(options, {"KVIKK_SIZE": "7", "KVIKK_IS_ON": "false", "KVIKK_SHARE": "0.5", "OTHER": "1"})
    assert found == {"size": 7, "is_on": False, "share": 0.5}
    path = tmp_path / "k.toml"
    path.write_text('mode = "slow"\nis-on = false\nshare = 1\n')
    assert from_file(options, path) == {"mode": "slow", "is_on": False, "share": 1.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sise = 3", "unknown option 'sise': did you mean 'size'"),
        ("size = 'x'", "whole number"),
        ("size =", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "k.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        from_file(options_of(Outer), path)


def test_a_variable_that_is_nearly_an_option_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    assert from_environment(options_of(Outer), {"KVIKK_SIZES": "7", "KVIKK_CACHE": "/x"}) == {}
    assert "KVIKK_SIZES, which is no option: did you mean KVIKK_SIZE?" in caplog.text
    assert "KVIKK_CACHE" not in caplog.text


def test_a_wrong_variable_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="KVIKK_SIZE is 'many'"):
        from_environment(options_of(Outer), {"KVIKK_SIZE": "many"})


def test_the_engines_options_all_have_help() -> None:
    from kvikk.engine.config import EngineConfig

    options = options_of(EngineConfig)
    assert {"model", "kv_memory", "max_num_seqs", "block_size", "dtype", "numerics"} <= options.keys()
    assert all(option.help for option in options.values())

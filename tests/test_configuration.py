from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from kvikk.configuration import MASKED, Setting, build, given, options_of, presets, resolve, secret
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
        password: of it.
    """

    mode: Literal["slow", "fast"] = "fast"
    is_on: bool = True
    password: str | None = secret()
    inner: Inner = field(default_factory=Inner)


def test_the_tree_is_flat_from_outside_and_its_help_is_the_docstring() -> None:
    options = options_of(Outer)
    assert list(options) == ["mode", "is_on", "password", "size", "share"]
    assert options["size"].help == "how many pieces."
    assert options["size"].flag == "--size"
    assert options["is_on"].variable == "KVIKK_IS_ON"
    assert build(Outer, {"size": 5, "mode": "slow"}) == Outer(mode="slow", inner=Inner(size=5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sise": 3}, "unknown option 'sise': did you mean 'size'"),
        ({"zzzzz": 3}, "known are: mode, is_on, password, size, share"),
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


def resolved(
    flags: dict[str, object] | None = None, environment: dict[str, str] | None = None, file: Path | None = None
) -> dict[str, Setting]:
    return resolve(Outer, flags=flags or {}, environment=environment or {}, file=file)


def test_each_value_says_where_it_came_from_and_the_nearer_origin_wins(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text('mode = "slow"\nis-on = false\nshare = 1\nsize = 4\n')
    found = resolved({"size": "7"}, {"KVIKK_SIZE": "5", "KVIKK_SHARE": "0.5", "OTHER": "1"}, path)
    assert [(name, setting.value, setting.origin, setting.source) for name, setting in found.items()] == [
        ("mode", "slow", "file", str(path)),
        ("is_on", False, "file", str(path)),
        ("password", None, "default", None),
        ("size", 7, "flag", "--size"),
        ("share", 0.5, "environment", "KVIKK_SHARE"),
    ]
    assert given(found) == {"mode": "slow", "is_on": False, "size": 7, "share": 0.5}


def test_a_value_equal_to_the_default_counts_as_given() -> None:
    assert given(resolved({"size": "3"})) == {"size": 3}


def test_flags_and_variables_are_parsed_by_the_options_type() -> None:
    assert given(resolved({"is_on": False}, {"KVIKK_SHARE": "1"})) == {"is_on": False, "share": 1.0}
    assert given(resolved({}, {"KVIKK_IS_ON": "Off"})) == {"is_on": False}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sise = 3", "unknown option 'sise': did you mean 'size'"),
        ("zzzzzz = 3", "unknown option 'zzzzzz': `kvikk config` lists them"),
        ("size = 'x'", "whole number"),
        ("size =", "cannot be read"),
        ("is-on = true\nis_on = false", "sets 'is_on' twice"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "k.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolved(file=path)


def test_a_variable_that_is_nearly_an_option_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    assert given(resolved(environment={"KVIKK_SIZES": "7", "KVIKK_CACHE": "/x"})) == {}
    assert "KVIKK_SIZES, which is no option: did you mean 'KVIKK_SIZE'?" in caplog.text
    assert "KVIKK_CACHE" not in caplog.text


def test_a_wrong_variable_or_flag_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="KVIKK_SIZE is 'many'"):
        resolved(environment={"KVIKK_SIZE": "many"})
    with pytest.raises(ConfigError, match="--size is 'many'"):
        resolved({"size": "many"})


def test_a_secret_is_shown_nowhere(tmp_path: Path) -> None:
    setting = resolved(environment={"KVIKK_PASSWORD": "s3cret"})["password"]
    assert (setting.value, setting.shown) == ("s3cret", MASKED)
    assert resolved()["password"].shown is None
    assert "s3cret" not in repr(build(Outer, {"password": "s3cret"}))
    assert "s3cret" not in repr(setting)
    path = tmp_path / "k.toml"
    path.write_text("password = 5318008")
    with pytest.raises(ConfigError) as refused:
        resolved(file=path)
    assert "5318008" not in str(refused.value)


def test_the_engines_options_all_have_help() -> None:
    from kvikk.engine.config import EngineConfig

    options = options_of(EngineConfig)
    assert {"model", "kv_memory", "max_num_seqs", "block_size", "dtype", "numerics"} <= options.keys()
    assert all(option.help for option in options.values())


def test_only_the_servers_keys_and_the_url_of_the_prefix_tier_are_secret() -> None:
    from kvikk.server.config import ServeConfig

    assert {name for name, option in options_of(ServeConfig).items() if option.is_secret} == {
        "api_key",
        "admin_api_key",
        "prefix_tier_url",
    }


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Chosen.

    Args:
        preset: of the others.
    """

    preset: str | None = presets({"rush": {"mode": "slow", "size": 9}, "rest": {"share": 0.5}})
    outer: Outer = field(default_factory=Outer)


def test_a_preset_gives_defaults_and_whatever_is_set_wins_over_it(tmp_path: Path) -> None:
    file = tmp_path / "kvikk.toml"
    file.write_text("size = 3\npreset = 'rest'\n")  # 3 is what it is by default, too
    settings = resolve(Chosen, flags={"preset": "rush", "is_on": "no"}, environment={}, file=file)
    assert [(settings[name].value, settings[name].origin) for name in ("preset", "mode", "size", "share", "is_on")] == [
        ("rush", "flag"), ("slow", "preset"), (3, "file"), (None, "default"), (False, "flag"),
    ]  # fmt: skip
    assert settings["mode"].source == "rush"
    assert build(Chosen, given(settings)).outer == Outer(mode="slow", is_on=False)
    assert build(Chosen, {"preset": "rush", "mode": "fast"}).outer == Outer(inner=Inner(size=9))


def test_an_unknown_preset_is_refused_with_the_names_of_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="preset is 'hurry': choose from rush, rest"):
        build(Chosen, {"preset": "hurry"})

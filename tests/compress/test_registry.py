"""Policies from packages: found by name, imported when asked for, and never fatal at start."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from kvikk.compress.catalogue import listed
from kvikk.compress.registry import BUILT_IN, GROUP, Registry
from kvikk.errors import ConfigError

GOOD = '''
from dataclasses import dataclass
from typing import ClassVar
from kvikk.compress import Signal

@dataclass(frozen=True, kw_only=True)
class Policy:
    """Keep the oldest."""

    needs: ClassVar = frozenset({Signal.POSITIONS})
    power: float = 1.0

    def score(self, view):
        return -view.positions.float() ** self.power
'''
FAULTY = {
    "raises": ("raise RuntimeError('no licence')", "cannot be imported: RuntimeError: no licence"),
    "lacks": ("", "cannot be imported: AttributeError"),
    "imports": ("import a_package_that_is_not_there", "cannot be imported: ModuleNotFoundError"),
    "exits": ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
    "plain": ("class Policy: pass", "a policy is a dataclass"),
    "needless": (GOOD.replace("needs: ClassVar", "wants: ClassVar"), "needs is None: it must be a frozenset of Signal"),
    "texts": (GOOD.replace("Signal.POSITIONS", "'positions'"), "must be a frozenset of Signal"),
    "scoreless": (GOOD.replace("def score", "def scores"), r"it has no method score\(view\)"),
    "optional": (GOOD.replace("needs: ClassVar", "needs: frozenset"), "needs is no option: annotate it as ClassVar"),
    "forgetful": (GOOD + "    state = 'hits'\n", r"state is 'hits': it must be a tuple of names, such as \('hits',\)"),
    "windowless": (GOOD.replace("Signal.POSITIONS", "Signal.QUERIES"), "give it a query_window"),
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that can be imported, installed as one package."""
    monkeypatch.syspath_prepend(tmp_path)
    meta = tmp_path / "others-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n", encoding="utf-8")
    names = ["good", *FAULTY]
    for name in names:
        code = GOOD if name == "good" else FAULTY[name][0]
        (tmp_path / f"policy_of_{name}.py").write_text(code, encoding="utf-8")
        monkeypatch.delitem(sys.modules, f"policy_of_{name}", raising=False)
    points = "".join(f"{name} = policy_of_{name}:Policy\n" for name in names)
    (meta / "entry_points.txt").write_text(f"[{GROUP}]\n{points}", encoding="utf-8")
    return tmp_path


def registry() -> Registry:
    return Registry(entry_points(group=GROUP))


@pytest.mark.usefixtures("package")
def test_a_policy_of_an_installed_package_is_found_by_its_name() -> None:
    entry = registry().entry("good")
    assert entry.origin == "others"
    assert "policy_of_good" not in sys.modules, "nothing is imported until it is asked for"
    assert entry.load().__doc__ == "Keep the oldest."


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_policy_is_refused_when_asked_for_with_its_package_and_the_reason(name: str) -> None:
    entry = registry().entry(name)
    with pytest.raises(ConfigError, match=f"policy '{name}' of others.*{FAULTY[name][1]}"):
        entry.load()


@pytest.mark.usefixtures("package")
def test_faulty_policies_are_marked_in_the_list_beside_the_others() -> None:
    found = {each.name: each for each in listed(registry())}
    assert all(found[name].fault is not None for name in FAULTY)
    assert found["good"].fault is None
    assert (found["good"].origin, found["good"].options) == ("others", {"power": 1.0})
    assert all(each.fault is None and each.summary for each in found.values() if each.origin == BUILT_IN)


def test_two_policies_of_one_name_are_an_error_that_names_both_packages() -> None:
    twice = Registry([EntryPoint("tova", "somewhere:TOVA", GROUP)])
    with pytest.raises(ConfigError, match="'tova' is there twice, of built-in and an unnamed package"):
        twice.entry("tova")
    assert twice.entry("snapkv").origin == BUILT_IN, "the others are not touched"
    assert [each.fault is not None for each in listed(twice) if each.name == "tova"] == [True, True]


def test_costs_are_told_in_words() -> None:
    costs = {each.name: each.cost for each in listed(Registry([]))}
    assert costs["streaming"] == "nothing"
    assert costs["tova"] == "keys read once; one query held and attended with"
    assert costs["h2o"] == "attention weights added up in every step"
    assert costs["r-kv"].endswith("time with the square of the slots where few keys are alike")

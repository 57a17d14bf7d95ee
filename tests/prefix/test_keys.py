from __future__ import annotations

import subprocess
import sys

import pytest

from kvikk.prefix import KeySpace, child_key, extend_keys

SPACE = KeySpace(model="m", rope="r", kv_format="bfloat16", page_size=16, numerics="fast")

GOLDEN_ROOT = "187040ad9110d3abf3f30a4d4b0657be"
GOLDEN_CHILD = "528e21076152f2476648ef0261cb66c7"


def test_keys_equal_the_golden_vectors() -> None:
    root = SPACE.root("salt")
    assert root.hex() == GOLDEN_ROOT
    assert child_key(root, range(16)).hex() == GOLDEN_CHILD


def test_keys_are_the_same_in_every_process() -> None:
    code = (
        "from kvikk.prefix import KeySpace, child_key;"
        "s = KeySpace(model='m', rope='r', kv_format='bfloat16', page_size=16, numerics='fast');"
        "print(child_key(s.root('salt'), range(16)).hex())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == GOLDEN_CHILD


@pytest.mark.parametrize(
    "change", [{"model": "n"}, {"rope": "s"}, {"kv_format": "float32"}, {"page_size": 32}, {"numerics": "exact"}]
)
def test_everything_that_kv_depends_on_changes_the_key(change: dict[str, object]) -> None:
    fields = {"model": "m", "rope": "r", "kv_format": "bfloat16", "page_size": 16, "numerics": "fast"}
    assert KeySpace(**(fields | change)).root() != SPACE.root()  # type: ignore[arg-type]


def test_fields_cannot_run_into_each_other() -> None:
    one = KeySpace(model="ab", rope="c", kv_format="", page_size=16, numerics="")
    other = KeySpace(model="a", rope="bc", kv_format="", page_size=16, numerics="")
    assert one.root() != other.root()


def test_a_key_covers_its_whole_prefix() -> None:
    one, other = [SPACE.root()], [SPACE.root()]
    assert extend_keys(one, [1] * 16 + [2] * 16, 16) == 2
    extend_keys(other, [3] * 16 + [2] * 16, 16)
    assert one[2] != other[2]


def test_only_full_blocks_have_keys() -> None:
    keys = [SPACE.root()]
    assert extend_keys(keys, range(15), 16) == 0
    assert extend_keys(keys, range(33), 16) == 2
    assert len(keys) == 3

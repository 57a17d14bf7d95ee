"""`benchmarks/host_link.py` measures copies that are right, and says what it cannot measure."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvikk.errors import ConfigError

host_link = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "host_link.py")))


def test_without_a_gpu_the_copies_are_checked_and_the_rest_is_said_to_be_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    host_link.main(["--device", "cpu", "--copied-mib", "1", "--block-kib", "4", "64"])
    assert "skipped" in capsys.readouterr().out


def test_a_result_without_a_gpu_is_refused_as_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    with pytest.raises(ConfigError, match="--device cuda"):
        host_link.main(["--device", "cpu", "--copied-mib", "1", "--block-kib", "64", "--output", str(path)])
    assert not path.exists()


@pytest.mark.parametrize("direction", host_link.DIRECTIONS)
def test_a_copy_is_right_when_its_blocks_are_there_and_no_other_was_written_to(direction: str) -> None:
    ends = host_link.Ends.make(4096, 16 * 4096, torch.device("cpu"))
    assert not host_link.is_right(ends, direction)
    host_link.by_engine(ends, direction)()
    assert host_link.is_right(ends, direction)
    _, target, _, of_target = ends.sides(direction)
    other = next(block for block in range(32) if block not in of_target.tolist())
    target[other, -1] += 1
    assert not host_link.is_right(ends, direction)


def test_a_way_that_copies_wrongly_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = host_link.Ends.make(4096, 4 * 4096, torch.device("cpu"))
    host_link.check(ends)
    monkeypatch.setitem(host_link.check.__globals__, "by_engine", lambda *_: lambda: None)
    with pytest.raises(host_link.WrongCopy, match="copy engines"):
        host_link.check(ends)

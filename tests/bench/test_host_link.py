"""`benchmarks/host_link.py` measures copies that are right, and says what it cannot measure."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvikk.bench.device import synchronize
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


def test_slots_come_in_strewn_runs_or_in_one() -> None:
    ends = host_link.Ends.make(4096, 64 * 4096, torch.device("cpu"))
    assert ends.in_runs(None).of_host.tolist() == list(range(64))
    slots = ends.in_runs(16).of_host
    assert len(set(slots.tolist())) == 64
    assert (slots.view(4, 16).diff() == 1).all()
    assert ends.in_runs(16).of_device is ends.of_device


@pytest.mark.parametrize("direction", host_link.DIRECTIONS)
def test_what_is_staged_is_copied_rightly_with_all_options(
    direction: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_device.type == "cpu":
        monkeypatch.setitem(host_link.staged.__globals__, "CudaStream", AtOnce)
    ends = host_link.Ends.make(2**15, 24 * 2**15, kernel_device)
    ways = list(host_link.staged_ways(ends, direction))
    assert [way.is_engines for way in ways] == [True] + [False] * (len(ways) - 1)
    assert {way.run_blocks for way in ways} == {None, 1, 16}
    for way in ways:
        ends.fill()
        way.copy()
        synchronize(kernel_device)
        assert host_link.is_right(way.ends, direction)


class AtOnce:
    """A stream that does what it is asked for at once."""

    def __init__(self, device: torch.device) -> None:
        pass

    @classmethod
    def current(cls, device: torch.device) -> AtOnce:
        return cls(device)

    def do(self, work: Callable[[], object]) -> None:
        work()

    def upload(self, numbers: Any) -> torch.Tensor:
        return torch.from_numpy(numbers)

    def record(self, *, timed: bool = False) -> None:
        return None

    def wait(self, event: None) -> None:
        pass


def result(measured: str, gb_per_s: float, *, is_engines: bool = True, slower: float = 1.0) -> dict[str, object]:
    row = {"measured": measured, "block_kib": 64, "direction": "host to device", "gb_per_s": gb_per_s}
    return row | {"is_engines": is_engines, "slower": slower}


def test_what_is_required_is_required_of_the_engines_own_way_alone() -> None:
    beside = result("beside attention", 50.0, slower=1.04)
    good = [result("copy", 54.0), result("copy", 9.0, is_engines=False), beside]
    assert host_link.verdict(good) == (
        "the engine's way reaches 54.0 GB/s and more (45 are required); beside attention 50.0 and more, attention up "
        "to 1.04 times slower"
    )
    assert host_link.verdict(good[:2]) == "the engine's way reaches 54.0 GB/s and more (45 are required)"
    assert "below 45 GB/s at 64 KiB, host to device: 44.0;" in host_link.verdict([*good, result("copy", 44.0)])

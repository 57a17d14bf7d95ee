"""The cost model: how routes cut rows, what it predicts and chooses, how it is fitted and kept."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvikk.attention.gpu import calibration, routing
from kvikk.attention.gpu.calibration import Calibration, costs_of, file_name, save, user_file
from kvikk.attention.gpu.cost import (
    Batch,
    CostModel,
    DecodeShape,
    Programs,
    RouteCost,
    RouteName,
    cut_fa2,
    cut_persistent,
    cut_worklist,
    fit,
    flashinfer_programs,
    kernel_us,
)
from kvikk.errors import ConfigError
from kvikk.geometry import KVGeometry
from kvikk.memory import KVStore

LLAMA = DecodeShape(kv_heads=8, group=4, head_dim=128, dtype="bfloat16", page_size=16)
OURS = Programs(count=396, least_slots=128, step_slots=128)
FA2 = flashinfer_programs("fa2", LLAMA, 132)
PERSISTENT = flashinfer_programs("persistent", LLAMA, 132)


def cost(programs: Programs, *, fixed: float = 5.0, token: float = 8.0, plan: float = 0.0) -> RouteCost:
    return RouteCost(
        programs=programs, fixed_us=fixed, us_per_gb=250.0, us_per_kilotoken=token, us_per_kilopart=3.0, plan_us=plan
    )


ALL: dict[RouteName, RouteCost] = {"worklist": cost(OURS), "fa2": cost(FA2, fixed=4.0), "persistent": cost(PERSISTENT)}


def searched_in_order(lengths: list[int], slots: int) -> int:
    """fa2's part size in pages as its planner finds it: by halving between the least size and the longest row."""
    pages = [-(-length // 16) for length in lengths]
    low, high = 128 // 16, max(pages)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-page // middle) for page in pages) > slots:
            low = middle + 1
        else:
            high = middle
    return low


@pytest.mark.parametrize("seed", range(40))
def test_fa2_is_cut_as_its_planner_cuts(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([rng.randint(1, 300), rng.randint(1, 66_000)]) for _ in range(rng.randint(1, 40))]
    size = searched_in_order(lengths, 2 * 132 // 8) * 16
    cut = cut_fa2(Batch.of(lengths), 8, FA2)
    assert cut.parts == 8 * sum(-(-length // size) for length in lengths)
    assert cut.chain == min(size, max(lengths))


def test_fa2_with_more_rows_than_programs_waits_for_its_longest_row() -> None:
    lengths = Batch.of([65_536] + [2_048] * 33)
    assert cut_fa2(lengths, 8, FA2).chain == 65_536
    assert cut_fa2(Batch.of(lengths.lengths[:31]), 8, FA2).chain < 65_536
    assert cut_worklist(lengths, 8, OURS).chain < 3_000
    assert cut_persistent(lengths, 8, PERSISTENT).chain < 5_000


def test_rows_that_are_not_cut_are_not_merged_by_ours_and_persistent() -> None:
    lengths = Batch.of([128, 128])
    assert cut_worklist(lengths, 8, OURS).parts == cut_persistent(lengths, 8, PERSISTENT).parts == 0
    assert cut_fa2(lengths, 8, FA2).parts == 16


def test_a_long_row_among_more_short_ones_than_fa2_has_programs_for_goes_elsewhere() -> None:
    model = CostModel(LLAMA, ALL, layers=32)
    skewed = model.choose([65_536] + [1_024] * 47)
    assert skewed.route != "fa2"
    assert skewed.predicted_us["fa2"] > 3 * skewed.predicted_us[skewed.route]
    assert model.choose([16_384] * 16).route == "fa2"  # its fixed cost is the least


def test_the_choice_is_the_least_of_the_predictions_and_all_of_them_can_be_seen() -> None:
    choice = CostModel(LLAMA, ALL, layers=32).choose([0, 5_000, 300, 0])
    assert set(choice.predicted_us) == set(ALL)
    assert choice.predicted_us[choice.route] == min(choice.predicted_us.values())


def test_a_plan_on_the_host_counts_by_its_share_of_a_layer() -> None:
    costs = ALL | {"fa2": cost(FA2, fixed=4.0, plan=100.0)}
    assert CostModel(LLAMA, costs, layers=32).choose([16_384] * 16).route != "fa2"
    assert CostModel(LLAMA, costs, layers=1000).choose([16_384] * 16).route == "fa2"


def test_shapes_that_nobody_measured_take_our_own_kernels() -> None:
    nothing = CostModel(LLAMA, {}, layers=32).choose([1, 2, 3])
    assert (nothing.route, nothing.predicted_us) == ("worklist", {})
    assert CostModel(LLAMA, {"fa2": ALL["fa2"]}, layers=32).choose([1]).route == "worklist"
    assert CostModel(LLAMA, ALL, layers=32).choose([]).route in ALL


def test_choosing_takes_no_more_calls_for_256_rows_than_for_4() -> None:
    model = CostModel(LLAMA, ALL, layers=32)

    def calls(rows: int) -> int:
        lengths = np.random.default_rng(0).integers(100, 66_000, rows)
        model.choose(lengths)  # what is made at first use is there
        events: list[str] = []
        sys.setprofile(lambda _frame, event, _argument: events.append(event))
        try:
            model.choose(lengths)
        finally:
            sys.setprofile(None)
        return len(events)

    assert 0 < calls(256) <= calls(4)


@pytest.mark.parametrize(("route", "programs"), [("worklist", OURS), ("fa2", FA2), ("persistent", PERSISTENT)])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_constants_are_found_again_from_what_they_predict(route: RouteName, programs: Programs, noise: float) -> None:
    true = cost(programs, fixed=7.0, token=12.0, plan=50.0)
    rng = np.random.default_rng(0)
    patterns = [[length] * rows for rows in (1, 4, 16, 48, 128) for length in (128, 1_000, 8_192, 40_000)]
    patterns += [[65_536] + [2_000] * rows for rows in (3, 15, 47)]
    measured = [
        (lengths, kernel_us(route, true, LLAMA, Batch.of(lengths)) * (1 + noise * rng.standard_normal()))
        for lengths in patterns
    ]
    found = fit(route, LLAMA, programs, measured, plan_us=50.0)
    assert found.worst_error < 1e-6 + 4 * noise
    assert found.cost.plan_us == 50.0
    assert found.cost.us_per_gb == pytest.approx(true.us_per_gb, rel=1e-6 + 2 * noise)
    assert found.cost.fixed_us == pytest.approx(true.fixed_us, rel=1e-6 + 4 * noise)


def test_no_constant_is_negative_however_odd_the_times() -> None:
    measured = [([length], time) for length, time in ((100, 50.0), (1_000, 40.0), (10_000, 30.0), (50_000, 5.0))]
    found = fit("worklist", LLAMA, OURS, measured, plan_us=0.0).cost
    assert min(found.fixed_us, found.us_per_gb, found.us_per_kilotoken, found.us_per_kilopart) >= 0
    with pytest.raises(ValueError, match="3 points"):
        fit("worklist", LLAMA, OURS, measured[:3], plan_us=0.0)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVIKK_CACHE", str(tmp_path))
    return tmp_path


def test_a_calibration_is_read_as_it_was_written_and_shapes_are_kept_side_by_side(own_cache: Path) -> None:
    small = DecodeShape(kv_heads=3, group=3, head_dim=64, dtype="bfloat16", page_size=16)
    path = user_file("GPU (tm) 5")
    assert path == own_cache / "calibration" / "gpu-tm-5.json"
    save(path, "GPU (tm) 5", {"date": "today"}, LLAMA, ALL)
    save(path, "GPU (tm) 5", {"date": "today"}, small, {"worklist": ALL["worklist"]})
    assert costs_of("GPU (tm) 5", LLAMA) == ALL
    assert costs_of("GPU (tm) 5", small) == {"worklist": ALL["worklist"]}
    assert Calibration.read(path).header == {"date": "today"}


def test_the_users_constants_win_over_those_of_the_package(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    monkeypatch.setattr(calibration, "SHIPPED", shipped)
    assert costs_of("GPU", LLAMA) == {}
    save(shipped / file_name("GPU"), "GPU", {}, LLAMA, ALL)
    assert costs_of("GPU", LLAMA) == ALL
    save(user_file("GPU"), "GPU", {}, LLAMA, {"worklist": cost(OURS, fixed=99.0)})
    assert costs_of("GPU", LLAMA)["worklist"].fixed_us == 99.0


@pytest.mark.parametrize(
    "content", ["", "[]", '{"shapes": [{"routes": {"fa9": {}}}]}', '{"shapes": [{"kv_heads": 1}]}']
)
def test_a_file_that_is_no_calibration_is_named_with_the_way_out(own_cache: Path, content: str) -> None:
    path = user_file("GPU")
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"gpu\.json is no calibration .*kvikk calibrate"):
        costs_of("GPU", LLAMA)


def test_the_calibrations_of_the_package_can_be_read() -> None:
    for path in calibration.SHIPPED.glob("*.json"):
        found = Calibration.read(path)
        assert path.name == file_name(found.device)
        assert all("worklist" in costs for costs in found.shapes.values())


@pytest.fixture
def device_with_constants(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose constants the user has, with FlashInfer installed."""
    save(user_file("GPU"), "GPU", {}, LLAMA, ALL)
    monkeypatch.setattr(routing, "is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


def pool(blocks: int, *, dtype: torch.dtype = torch.bfloat16) -> KVStore:
    geometry = KVGeometry(kv_heads=(8,) * 32, head_dim=128, page_size=16, dtype=dtype)
    return KVStore(geometry, blocks, torch.device("meta"))


@pytest.mark.usefixtures("device_with_constants")
def test_a_pool_is_served_by_what_is_calibrated_and_can_reach_all_of_it() -> None:
    assert set(routing.cost_model(pool(4_000), 32).costs) == {"worklist", "fa2", "persistent"}
    assert set(routing.cost_model(pool(5_000), 32).costs) == {"worklist", "fa2"}
    assert routing.cost_model(pool(4_000), 32).layers == 32
    assert routing.cost_model(pool(4_000, dtype=torch.float16), 32).costs == {}  # nobody measured it


@pytest.mark.usefixtures("device_with_constants")
def test_without_flashinfer_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "is_installed", lambda: False)
    model = routing.cost_model(pool(4_000), 32)
    assert model.costs == {}
    assert model.choose([100]).route == "worklist"

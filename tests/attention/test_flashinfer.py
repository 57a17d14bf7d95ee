"""FlashInfer's routes: what they ask of its package, which a stand-in here computes from, and what they refuse."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvikk.attention.gpu.flashinfer import (
    FLASHINFER_ROUTES,
    FlashInferDecode,
    FlashInferRoute,
    fa2_workspace_bytes,
    layer_views,
    why_not,
)
from kvikk.attention.gpu.rows import Bodies, DecodeRows
from kvikk.attention.reference import attend_dense, read_row
from kvikk.errors import ConfigError
from kvikk.geometry import KVGeometry
from kvikk.memory import KVStore

LENGTHS = [37, 16, 1, 64]
SCALE = 0.125


@dataclass
class StandIn:
    """Both kernels of the package, computed densely from the arguments that they document."""

    plans: list[dict[str, Any]] = field(default_factory=list)
    layout: str = ""
    indptr: Tensor = field(default_factory=lambda: torch.empty(0))
    indices: Tensor = field(default_factory=lambda: torch.empty(0))
    lengths: list[int] = field(default_factory=list)

    def decode_wrapper(self, workspace: Tensor, **options: Any) -> Any:
        assert workspace.count_nonzero() == 0  # "must be initialized to 0 for its first use"
        self.layout = options["kv_layout"]
        self.options = options
        return SimpleNamespace(plan=self.plan_fa2, run=self.run)

    def batch_attention(self, *, kv_layout: str, device: str) -> Any:
        self.layout = kv_layout
        return SimpleNamespace(plan=self.plan_persistent, run=self.run)

    def plan_fa2(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, q_heads: int, kv_heads: int, head_dim: int,
        page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        assert {indptr.dtype, indices.dtype, last_page_len.dtype} == {torch.int32}
        assert len(indices) == indptr[-1]
        pages = indptr.diff()
        self.lengths = ((pages - 1).clamp(min=0) * page_size + last_page_len).tolist()
        self.indptr, self.indices = indptr, indices
        self.plans.append(options)

    def plan_persistent(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len: Tensor, q_heads: int, kv_heads: int,
        head_dim_qk: int, head_dim_vo: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        assert qo_indptr.tolist() == list(range(len(kv_len) + 1))
        assert {qo_indptr.dtype, kv_indptr.dtype, kv_indices.dtype, kv_len.dtype} == {torch.int32}
        self.lengths, self.indptr, self.indices = kv_len.tolist(), kv_indptr, kv_indices
        self.plans.append(options)

    def run(
        self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor, q_scale: float = 1.0, k_scale: float = 1.0,
        lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert self.layout == "HND"
        for row, length in enumerate(self.lengths):
            blocks = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
            k, v = (part[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for part in kv)
            scale = self.plans[-1]["sm_scale"] * q_scale * k_scale
            out[row] = attend_dense(q[row : row + 1], k, v, start=length - 1, scale=scale)[0][0] if length else 0


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in in place of the package, and events and properties that need no GPU."""
    stand_in, module = StandIn(), ModuleType("flashinfer")
    module.BatchAttention = stand_in.batch_attention  # type: ignore[attr-defined]
    module.BatchDecodeWithPagedKVCacheWrapper = stand_in.decode_wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None))
    properties = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return stand_in


def make_rows(lengths: Sequence[int], *, page: int = 16) -> tuple[KVStore, DecodeRows]:
    """A pool of two layers, and rows whose tables hold its blocks in random order, seats exchanged."""
    geometry = KVGeometry(kv_heads=(2, 2), head_dim=64, page_size=page, dtype=torch.float32)
    blocks = 1 + sum(-(-length // page) for length in lengths)
    store = KVStore(geometry, blocks, torch.device("cpu"))
    store.frames.normal_(generator=torch.Generator().manual_seed(0))
    order = iter((torch.randperm(blocks - 1) + 1).tolist())
    tables = torch.full((len(lengths), 8), -1, dtype=torch.int32)
    seats = torch.arange(len(lengths), dtype=torch.int32).flip(0)
    for seat, length in zip(seats.tolist(), lengths, strict=True):
        for block in range(-(-length // page)):
            tables[seat, block] = next(order)
    return store, DecodeRows(tables=tables, seats=seats, lengths=torch.tensor(lengths, dtype=torch.int32))


def decode(route: FlashInferRoute, store: KVStore, **options: Any) -> FlashInferDecode:
    return FlashInferDecode(route, layer_views(store), **{"q_heads": 4, "rows": 4, "entries": 64} | options)


@pytest.mark.parametrize("route", FLASHINFER_ROUTES)
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 5, 0, 17]])
def test_each_layer_is_attended_as_the_reference_does(
    package: StandIn, route: FlashInferRoute, is_known: bool, lengths: list[int]
) -> None:
    store, rows = make_rows(lengths)
    kernel = decode(route, store)
    kernel.plan(rows, lengths if is_known else None)
    q = torch.randn(4, 4, 64)
    for layer in range(2):
        out = torch.full_like(q, float("nan"))
        kernel.attend(layer, q, out, scale=SCALE)
        for row, length in enumerate(lengths):
            if not length:
                assert out[row].count_nonzero() == 0
                continue
            k, v = read_row(store, layer, rows.tables[rows.seats[row]].long(), length)
            right = attend_dense(q[row : row + 1], k, v, start=length - 1, scale=SCALE)[0][0]
            torch.testing.assert_close(out[row], right)


def test_plans_name_the_dtype_of_the_pool_and_scale_nothing_themselves(package: StandIn) -> None:
    store, rows = make_rows(LENGTHS)
    for route in FLASHINFER_ROUTES:
        decode(route, store).plan(rows)
    for options in package.plans:
        assert (options["q_data_type"], options["kv_data_type"], options["sm_scale"]) == (torch.float32,) * 2 + (1.0,)


def test_a_fixed_route_plans_into_buffers_of_its_own_and_for_its_own_number_of_rows(package: StandIn) -> None:
    store, rows = make_rows(LENGTHS)
    kernel = decode("fa2", store, fixed=True)
    assert package.options["use_cuda_graph"]
    assert len(package.options["paged_kv_indptr_buffer"]) == 5
    assert len(package.options["paged_kv_last_page_len_buffer"]) == 4
    kernel.plan(rows)
    assert package.indices.data_ptr() == package.options["paged_kv_indices_buffer"].data_ptr()
    fewer = DecodeRows(tables=rows.tables, seats=rows.seats[:2], lengths=rows.lengths[:2])
    with pytest.raises(ConfigError, match="2 rows, this FlashInfer route was made for 4"):
        kernel.plan(fewer)


def test_plans_that_do_not_fit_are_refused(package: StandIn) -> None:
    store, rows = make_rows(LENGTHS)
    with pytest.raises(ConfigError, match="4 rows, this FlashInfer route was made for 3"):
        decode("fa2", store, rows=3).plan(rows)
    with pytest.raises(ConfigError, match="9 blocks, this route was made for 8"):
        decode("fa2", store, entries=8).plan(rows)
    nothing = torch.empty(0, dtype=torch.int32)
    ragged = DecodeRows(rows.tables, rows.seats, rows.lengths, Bodies(nothing, nothing, nothing))
    with pytest.raises(ConfigError, match="compressed rows take route worklist"):
        decode("persistent", store).plan(ragged)


def test_without_the_package_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    store, _ = make_rows(LENGTHS)
    with pytest.raises(ConfigError, match="apache-tvm-ffi, cuda-tile and nvidia-cudnn-frontend"):
        decode("fa2", store)


def geometry(
    *,
    kv_heads: Sequence[int] = (8,) * 32,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    quantised: torch.dtype | None = None,
) -> Any:
    return KVGeometry(kv_heads=tuple(kv_heads), head_dim=head_dim, page_size=16, dtype=dtype, quantised=quantised)


@pytest.mark.parametrize(
    ("shape", "q_heads", "said"),
    [
        (geometry(), 32, None),
        (geometry(kv_heads=(8, 4)), 32, "layers that are alike"),
        (geometry(dtype=torch.float32), 32, "torch.float32"),
        (geometry(quantised=torch.int8), 32, "torch.int8"),
        (geometry(head_dim=80), 32, "80 wide"),
        (geometry(), 12, "cannot share 8 KV heads"),
    ],
)
def test_what_a_route_cannot_serve_is_said_with_its_reason(shape: KVGeometry, q_heads: int, said: str | None) -> None:
    for route in FLASHINFER_ROUTES:
        reason = why_not(route, shape, q_heads, 100, 132)
        assert (reason is None) if said is None else (reason is not None and said in reason)


def test_persistent_refuses_pools_that_its_32_bits_cannot_reach_and_shapes_beyond_its_buffers() -> None:
    shape = geometry()
    most = 2**32 // (shape.frames_per_block * shape.frame_elements)
    assert why_not("persistent", shape, 32, most, 132) is None
    assert "4,294,967,296 numbers" in str(why_not("persistent", shape, 32, most + 1, 132))
    assert why_not("fa2", shape, 32, most + 1, 132) is None
    assert "partial results" in str(why_not("persistent", geometry(kv_heads=(16,) * 32), 32, 100, 132))


@pytest.mark.parametrize(("rows", "padded"), [(1, 33), (128, 159)])
def test_fa2_has_room_for_the_partial_results_of_a_fixed_graph(rows: int, padded: int) -> None:
    """33 = 2 CTAs x 132 SMs / 8 heads; 159 = 128 rows of 4 heads in tiles of 16, and a part of one more in each."""
    assert fa2_workspace_bytes(rows, 32, 8, 128, 132) >= padded * 32 * 16 * (128 + 1) * 4

"""Decode attention by FlashInfer, an optional package: the routes `fa2` and `persistent` over the flat pool.

FlashInfer takes K and V of a layer as two strided tensors `[blocks, kv_heads, page_size, head_dim]`, so it reads the
pool where it lies. It plans on the host, from lengths that the host knows, and only rows whose layers are alike.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from kvikk.attention.gpu.rows import DecodeRows
from kvikk.errors import ConfigError
from kvikk.geometry import KVGeometry
from kvikk.memory.storage import KVStore

FlashInferRoute = Literal["fa2", "persistent"]
FLASHINFER_ROUTES: Final[tuple[FlashInferRoute, ...]] = get_args(FlashInferRoute)

HEAD_DIMS: Final = (64, 128, 256)
DTYPES: Final = (torch.bfloat16, torch.float16)
ADDRESSABLE: Final = 2**32
"""Numbers that `persistent` can reach in one tensor: it multiplies block id and block stride in 32 bits."""
PERSISTENT_WORKSPACE_BYTES: Final = 384 * 2**20
"""What `BatchAttention` allocates for partial results, whatever the shape."""

HOW_TO_INSTALL: Final = (
    "pip install --no-deps flashinfer-python==0.6.13, and then apache-tvm-ffi, cuda-tile and nvidia-cudnn-frontend"
)

LayerKV = tuple[Tensor, Tensor]


def is_installed() -> bool:
    """Whether FlashInfer can be imported."""
    return importlib.util.find_spec("flashinfer") is not None


def layer_views(store: KVStore) -> list[LayerKV]:
    """K and V of each layer of a pool in the layout HND, `[blocks, kv_heads, page_size, head_dim]` each."""
    layers = [store.layer(layer) for layer in range(store.geometry.layers)]
    return [(pages[:, :, 0], pages[:, :, 1]) for pages in layers]


def why_not(route: FlashInferRoute, geometry: KVGeometry, q_heads: int, blocks: int, sms: int) -> str | None:
    """Why a route cannot serve a pool, with value and limit; None when it can.

    Args:
        route: which kernel.
        geometry: of the pool.
        q_heads: query heads of a layer.
        blocks: of the pool, the null block included.
        sms: multiprocessors of the device.
    """
    kv_heads, head_dim = geometry.kv_heads[0], geometry.head_dim
    if len(set(geometry.kv_heads)) > 1:
        return f"it wants layers that are alike, these have {sorted(set(geometry.kv_heads))} KV heads"
    if geometry.stored not in DTYPES:
        return f"it takes bfloat16 and float16, the pool is {geometry.stored}"
    if head_dim not in HEAD_DIMS:
        return f"it takes heads of {', '.join(map(str, HEAD_DIMS))}, these are {head_dim} wide"
    if q_heads % kv_heads:
        return f"{q_heads} query heads cannot share {kv_heads} KV heads evenly"
    if route == "persistent":
        numbers = blocks * geometry.frames_per_block * geometry.frame_elements
        if numbers > ADDRESSABLE:
            return f"it reaches {ADDRESSABLE:,} numbers of a pool, this one has {numbers:,}"
        needed = persistent_workspace_bytes(kv_heads, head_dim, sms)
        if needed > PERSISTENT_WORKSPACE_BYTES:
            return f"its partial results have {PERSISTENT_WORKSPACE_BYTES:,} bytes, this shape needs {needed:,}"
    return None


def persistent_workspace_bytes(kv_heads: int, head_dim: int, sms: int) -> int:
    """Bytes of partial results that the persistent kernel reserves: 4 x CTAs x (128 + 16) splits, in 2-byte numbers."""
    ctas = sms if head_dim >= 256 else 2 * sms
    return 4 * ctas * (128 + 16) * kv_heads * (2 * head_dim + 4)


def fa2_workspace_bytes(rows: int, q_heads: int, kv_heads: int, head_dim: int, sms: int) -> int:
    """Bytes of fp32 partial results that an fa2 plan of up to `rows` rows can ask for, padded as for a fixed graph."""
    group = q_heads // kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 or head_dim >= 256 else 128
    padded = max(2 * sms // kv_heads, -(-rows * group // tile) + rows - 1)
    return padded * q_heads * tile * (head_dim + 1) * 4 + 64


class FlashInferDecode:
    """A `DecodeRoute` by one of FlashInfer's kernels.

    The scale is given with each layer, so plans are made with scale 1. Padded rows (length 0) come out as zeros.

    Args:
        route: which kernel.
        layers: K and V of each layer (`layer_views`), in one pool or in several of one shape. The attribute may be set
            to others of the same shape between two plans.
        q_heads: query heads of a layer.
        rows: rows that a plan has at most, or exactly when `fixed`.
        entries: entries of the block tables of all rows of a plan together, at most.
        fixed: later plans land in the same buffers, so that a graph captured once stays valid. `fa2` then always
            splits and merges; without it a graph is good until the next plan.

    Raises:
        ConfigError: FlashInfer is not installed.
    """

    def __init__(
        self,
        route: FlashInferRoute,
        layers: Sequence[LayerKV],
        *,
        q_heads: int,
        rows: int,
        entries: int,
        fixed: bool = False,
    ) -> None:
        package = _flashinfer()
        self.name: FlashInferRoute = route
        self.layers = layers
        self._q_heads = q_heads
        self._rows = rows
        self._fixed = fixed
        k = layers[0][0]
        _, self._kv_heads, self._page_size, self._head_dim = k.shape
        self._dtype, device = k.dtype, k.device
        self._indices = torch.zeros(entries, dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event()
        self._lse = torch.empty(0)
        self._kernel: Any
        if route == "persistent":
            self._kernel = package.BatchAttention(kv_layout="HND", device=str(device))
            self._lse = torch.empty((rows, q_heads), dtype=torch.float32, device=device)
            return
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        workspace_bytes = fa2_workspace_bytes(rows, q_heads, self._kv_heads, self._head_dim, sms)
        buffers = {}
        if fixed:
            buffers = {
                "paged_kv_indptr_buffer": torch.zeros(rows + 1, dtype=torch.int32, device=device),
                "paged_kv_indices_buffer": self._indices,
                "paged_kv_last_page_len_buffer": torch.zeros(rows, dtype=torch.int32, device=device),
            }
        self._kernel = package.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(workspace_bytes, dtype=torch.uint8, device=device),
            kv_layout="HND",
            use_cuda_graph=fixed,
            use_tensor_cores=True,
            backend="fa2",
            **buffers,
        )

    def plan(self, rows: DecodeRows, lengths: Sequence[int] | None = None) -> None:
        """See `DecodeRoute.plan`. Runs on the host.

        Args:
            rows: what is asked.
            lengths: `rows.lengths`, where the host knows them already; else they are read back, which waits for the
                device.

        Raises:
            ConfigError: the rows are more than the route was made for, or have compressed bodies.
        """
        count = len(rows.seats)
        if rows.bodies is not None:
            raise ConfigError(f"FlashInfer ({self.name}) reads whole rows only: compressed rows take route worklist")
        if count > self._rows or (self._fixed and count != self._rows):
            raise ConfigError(f"a plan has {count} rows, this FlashInfer route was made for {self._rows}")
        host = rows.lengths.cpu() if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        pages = (host + (self._page_size - 1)) // self._page_size
        indptr = torch.zeros(count + 1, dtype=torch.int32)
        indptr[1:] = pages.cumsum(0)
        entries = int(indptr[-1])
        if entries > len(self._indices):
            raise ConfigError(f"the rows have {entries:,} blocks, this route was made for {len(self._indices):,}")
        self._copied.synchronize()  # the last plan may still be on its way out of the pinned buffer it is copied from
        self._list_blocks(rows, entries)
        if self.name == "persistent":
            self._kernel.plan(
                torch.arange(count + 1, dtype=torch.int32), indptr, self._indices, host,
                self._q_heads, self._kv_heads, self._head_dim, self._head_dim, self._page_size,
                causal=False, sm_scale=1.0, q_data_type=self._dtype, kv_data_type=self._dtype,
            )  # fmt: skip
        else:
            in_last_page = host - (pages - 1).clamp(min=0) * self._page_size
            self._kernel.plan(
                indptr, self._indices[:entries], in_last_page.to(torch.int32),
                self._q_heads, self._kv_heads, self._head_dim, self._page_size,
                q_data_type=self._dtype, kv_data_type=self._dtype, sm_scale=1.0,
            )  # fmt: skip
        self._copied.record()

    def attend(self, layer: int, q: Tensor, out: Tensor, *, scale: float) -> None:
        """See `DecodeRoute.attend`."""
        if self.name == "persistent":
            self._kernel.run(q, self.layers[layer], out=out, lse=self._lse[: len(q)], k_scale=scale)
        else:
            self._kernel.run(q, self.layers[layer], out=out, q_scale=scale)

    def _list_blocks(self, rows: DecodeRows, entries: int) -> None:
        """Write the rows' block ids one after the other, on the device and without waiting for it."""
        pages = (rows.lengths + (self._page_size - 1)) // self._page_size
        row = torch.repeat_interleave(pages, output_size=entries)
        place = torch.arange(entries, device=row.device) - (pages.cumsum(0) - pages)[row]
        self._indices[:entries] = rows.tables[rows.seats[row].long(), place]


def _flashinfer() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"routes {' and '.join(FLASHINFER_ROUTES)} need FlashInfer, which cannot be imported ({error}): "
            f"{HOW_TO_INSTALL}, or leave these routes out"
        ) from error

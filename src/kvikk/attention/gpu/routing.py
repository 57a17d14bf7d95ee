"""Which routes a pool on this GPU has, and the cost model that chooses among them."""

from __future__ import annotations

import logging

import torch

from kvikk.attention.gpu.calibration import costs_of
from kvikk.attention.gpu.cost import SAFE, CostModel, DecodeShape
from kvikk.attention.gpu.flashinfer import FLASHINFER_ROUTES, is_installed, why_not
from kvikk.memory.storage import KVStore

log = logging.getLogger(__name__)


def cost_model(store: KVStore, q_heads: int) -> CostModel:
    """The cost model of a pool's decode attention: of the routes that are installed, calibrated and able to serve it.

    Made once, when the pool is made. Where there is nothing to choose, it always names our own kernels.

    Args:
        store: on a GPU.
        q_heads: query heads of a layer.

    Raises:
        ConfigError: this device's calibration cannot be read.
    """
    geometry, device = store.geometry, store.device
    shape = DecodeShape(
        kv_heads=geometry.kv_heads[0],
        group=q_heads // geometry.kv_heads[0],
        head_dim=geometry.head_dim,
        dtype=geometry.format,
        page_size=geometry.page_size,
    )
    if not is_installed():
        return CostModel(shape, {}, layers=geometry.layers)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    refusals = {route: why_not(route, geometry, q_heads, store.blocks, multiprocessors) for route in FLASHINFER_ROUTES}
    for route, reason in refusals.items():
        if reason is not None:
            log.info("FlashInfer's %s is not used: %s", route, reason)
    able = {SAFE, *(route for route, reason in refusals.items() if reason is None)}
    costs = costs_of(torch.cuda.get_device_name(device), shape)
    return CostModel(shape, {route: cost for route, cost in costs.items() if route in able}, layers=geometry.layers)

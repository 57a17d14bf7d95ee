"""What several tests of the memory share."""

from __future__ import annotations

import pytest
import torch

from kvikk.memory import KVStore
from memory.pools import numbered_pool


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def store(request: pytest.FixtureRequest) -> KVStore:
    """A pool on each kind of device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return numbered_pool(torch.device(request.param))

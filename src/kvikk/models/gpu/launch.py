"""How kernels follow one another: one may start while the one before it ends (programmatic dependent launch).

A kernel launched so has its programs in place when the data comes. The rule that keeps it right: read nothing that an
earlier kernel of the step wrote before `wait_for_inputs`, which returns when that kernel, and so all before it, has
ended. Only what the step's planning wrote may be read earlier, as kernels launched the ordinary way lie in between.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

FIRST_CAPABILITY: Final = (9, 0)


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it ends."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def overlapping(device: torch.device) -> dict[str, Any]:
    """Keywords of a launch whose kernel has the compile-time parameter OVERLAP."""
    return {"OVERLAP": True, "launch_pdl": True} if can_overlap(device) else {"OVERLAP": False}


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until what earlier kernels wrote can be read, and let the next kernel get ready."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

"""How much KV memory there is: from what the operator says to a number of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final, Literal

import psutil
import torch

from kvikk.errors import ConfigError
from kvikk.geometry import INT4, KVGeometry
from kvikk.quantities import BYTES, memory_size, parse_amount

CGROUP = Path("/sys/fs/cgroup")
DEFAULT_CPU_KV_MEMORY = "50%"
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9

FP8_CAPABILITY: Final = (8, 9)
"""Of the first GPUs that read and write fp8."""

HostUse = Literal["auto", "always"]
KVDtype = Literal["auto", "int8", "fp8", "int4"]
QUANTISED: Final[dict[KVDtype, torch.dtype]] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": INT4}
"""What K and V are stored as by name; a name that is not here: as the model computes them."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """How much memory the KV pool may take, and in which pages.

    Args:
        kv_memory: `4GiB`, `500MB`, or a share such as `50%` of the memory that is free after the weights.
        gpu_memory_utilization: on a GPU, share of its whole memory for weights and KV together; not with `kv_memory`.
        block_size: tokens in a block.
        kv_dtype: what K and V are stored as. `auto`: the model's dtype. `int8`: a byte for each number and a scale for
            each token and head, about half of what bf16 takes, and quicker to read; costs a little quality. `fp8`: the
            same with e4m3 numbers, on GPUs that have them. `int4`: half a byte for each number and two scales, 0.31 of
            what bf16 takes in heads of 64 and 0.28 in heads of 128; costs more quality, most of it in small models.
        kv_host_memory: memory of the host for the whole KV of lossless requests, such as `40GiB`. Where the KV memory
            is short they give up theirs, and get it back for each verification; without it they keep it.
        kv_host_use: whether they do so to let another request start: `auto`, where that is known to give more tokens a
            second in all; `always`, wherever there is no room for it.
    """

    kv_memory: str | None = None
    gpu_memory_utilization: float | None = None
    block_size: int = 16
    kv_dtype: KVDtype = "auto"
    kv_host_memory: str | None = None
    kv_host_use: HostUse = "auto"

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32):
            raise ConfigError(f"--block-size {self.block_size} is not supported: choose 16 or 32")
        if self.kv_dtype != "auto" and self.kv_dtype not in QUANTISED:
            raise ConfigError(f"--kv-dtype {self.kv_dtype!r} is not supported: choose auto, {', '.join(QUANTISED)}")
        if self.kv_memory is not None and self.gpu_memory_utilization is not None:
            raise ConfigError("--kv-memory and --gpu-memory-utilization exclude each other: give one of them")
        if self.kv_memory is not None:
            parse_kv_memory(self.kv_memory, free_bytes=2**40)
        if self.kv_host_use not in ("auto", "always"):
            raise ConfigError(f"--kv-host-use {self.kv_host_use!r} is not known: choose auto or always")
        if self.kv_host_use != "auto" and self.kv_host_memory is None:
            raise ConfigError(f"--kv-host-use {self.kv_host_use} needs --kv-host-memory: give it, such as 40GiB")
        if self.kv_host_memory is not None:
            memory_size("--kv-host-memory", self.kv_host_memory)
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"--gpu-memory-utilization {share} is not a share above 0 and up to 1")

    @property
    def host_bytes(self) -> int:
        """Of the host, for the whole KV of lossless requests."""
        return 0 if self.kv_host_memory is None else memory_size("--kv-host-memory", self.kv_host_memory)


def parse_kv_memory(text: str, *, free_bytes: int) -> int:
    """Bytes that `4GiB`, `500MB`, `2e9` or `50%` (of `free_bytes`) stand for.

    Raises:
        ConfigError: the text is none of these, or not above zero.
    """
    amount = parse_amount(text)
    if amount is None:
        raise ConfigError(f"--kv-memory {text!r} is not a size: write 4GiB, 500MB or 50%")
    number, unit = amount
    if not isfinite(number) or number > 2**60:
        raise ConfigError(f"--kv-memory {text!r} is more than any machine has")
    if unit == "%" and number > 100:
        raise ConfigError(f"--kv-memory {text!r} is more than all free memory: at most 100%")
    size = int(number / 100 * free_bytes) if unit == "%" else int(number * BYTES[unit or "b"])
    if size <= 0:
        raise ConfigError(f"--kv-memory {text!r} is no memory at all: give more than zero")
    return size


def free_memory_bytes(device: torch.device) -> int:
    """Memory that a new allocation could take now on the device, within the limits of a container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([int(psutil.virtual_memory().available), *_container_rooms(CGROUP)])


def check_host_memory(flag: str, text: str, size_bytes: int) -> None:
    """Refuse more of the host's memory than is free.

    Args:
        flag: that asks for it.
        text: as it was given.
        size_bytes: that it stands for.

    Raises:
        ConfigError: names what is free.
    """
    free_bytes = free_memory_bytes(torch.device("cpu"))
    if size_bytes > free_bytes:
        raise ConfigError(
            f"{flag} {text} is more than the {format_bytes(free_bytes)} that the host has free: give less"
        )


def _container_rooms(folder: Path) -> list[int]:
    """What control groups leave of their memory limits (version 2, then 1); nothing where there is no limit."""
    rooms = []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            rooms.append(max(0, int((folder / limit).read_text()) - int((folder / used).read_text())))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return rooms


def check_device(config: MemoryConfig, device: torch.device) -> None:
    """Refuse, before a model is loaded, what the device cannot honour.

    Raises:
        ConfigError: `gpu_memory_utilization` without a GPU, or fp8 where the device has no such numbers.
    """
    if config.gpu_memory_utilization is not None and device.type != "cuda":
        raise ConfigError("--gpu-memory-utilization needs a GPU: on this device give --kv-memory, such as 4GiB or 50%")
    if config.kv_dtype == "fp8" and (reason := why_no_fp8(device)):
        raise ConfigError(f"--kv-dtype fp8 {reason}: choose int8, which every device has")


def why_no_fp8(device: torch.device) -> str | None:
    """Why K and V cannot be fp8 on a device, in words; None: they can."""
    needed = ".".join(map(str, FP8_CAPABILITY))
    if device.type != "cuda":
        return f"needs a GPU of compute capability {needed} or newer, not a {device.type}"
    has = torch.cuda.get_device_capability(device)
    if has < FP8_CAPABILITY:
        return f"needs compute capability {needed} or newer, {torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}"
    return None


def pool_blocks(config: MemoryConfig, geometry: KVGeometry, device: torch.device, *, reserved_bytes: int = 0) -> int:
    """Usable blocks of a pool made now, after the weights are loaded (the null block is paid for and not counted).

    Args:
        config: how much it may take.
        geometry: of a block.
        device: where it will lie.
        reserved_bytes: that something else will take there: they count as taken.

    Raises:
        ConfigError: the memory asked for is not there, or holds no block.
    """
    check_device(config, device)
    free_bytes = free_memory_bytes(device) - reserved_bytes
    if device.type == "cuda" and config.kv_memory is None:
        total_bytes = torch.cuda.mem_get_info(device)[1]
        share = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
        size_bytes = int(total_bytes * share) - (total_bytes - free_bytes)
        asked = f"--gpu-memory-utilization {share}"
    else:
        text = config.kv_memory or DEFAULT_CPU_KV_MEMORY
        size_bytes = parse_kv_memory(text, free_bytes=free_bytes)
        asked = f"--kv-memory {text}"
    if size_bytes > free_bytes:
        raise ConfigError(
            f"{asked} asks for {format_bytes(size_bytes)}, {format_bytes(free_bytes)} are free after the weights: "
            "give less, or use a smaller model"
        )
    blocks = size_bytes // geometry.block_bytes - 1
    if blocks < 1:
        raise ConfigError(
            f"{asked} leaves {format_bytes(max(size_bytes, 0))} for KV, a block of {geometry.page_size} tokens takes "
            f"{format_bytes(geometry.block_bytes)}: at least {format_bytes(2 * geometry.block_bytes)} are needed"
        )
    return blocks


def format_bytes(size: int) -> str:
    """`1.5 GiB`: a size for a person."""
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"

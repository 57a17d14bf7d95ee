from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvikk.errors import ConfigError
from kvikk.geometry import KVGeometry
from kvikk.memory import QUANTISED, MemoryConfig, check_device, pool_blocks
from kvikk.memory.sizing import format_bytes, free_memory_bytes, parse_kv_memory

CPU = torch.device("cpu")
GEOMETRY = KVGeometry(kv_heads=(3,) * 30, head_dim=64, page_size=16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 2**30), ("500MB", 500 * 10**6), ("1.5 gib", 3 * 2**29), ("50%", 500), ("4096", 4096), ("2e3", 2000)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_kv_memory(text, free_bytes=1000) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "4 quux", "0", "120%", "nan", "1GiB2", "1e999GiB"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        MemoryConfig(kv_memory=text)


def test_two_ways_to_say_it_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        MemoryConfig(kv_memory="1GiB", gpu_memory_utilization=0.5)


@pytest.mark.parametrize("share", [0.0, 1.2, -1.0, float("nan")])
def test_a_share_of_a_gpu_lies_within_it(share: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        MemoryConfig(gpu_memory_utilization=share)


def test_gpu_memory_utilization_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        pool_blocks(MemoryConfig(gpu_memory_utilization=0.9), GEOMETRY, CPU)


def test_the_pool_never_takes_more_than_was_given() -> None:
    blocks = pool_blocks(MemoryConfig(kv_memory="100MiB"), GEOMETRY, CPU)
    assert (blocks + 1) * GEOMETRY.block_bytes <= 100 * 2**20 < (blocks + 2) * GEOMETRY.block_bytes


def test_what_something_else_will_take_is_not_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvikk.memory.sizing.free_memory_bytes", lambda _: 100 * 2**20)
    config, reserved = MemoryConfig(kv_memory="100%"), 40 * 2**20
    blocks = pool_blocks(config, GEOMETRY, CPU, reserved_bytes=reserved)
    assert blocks == 60 * 2**20 // GEOMETRY.block_bytes - 1
    with pytest.raises(ConfigError, match=r"60\.0 MiB are free"):
        pool_blocks(MemoryConfig(kv_memory="70MiB"), GEOMETRY, CPU, reserved_bytes=reserved)


def test_a_share_of_a_gpu_is_for_all_that_lies_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * 2**20, 100 * 2**20))
    config = MemoryConfig(gpu_memory_utilization=0.9)
    blocks = pool_blocks(config, GEOMETRY, torch.device("cuda"), reserved_bytes=20 * 2**20)
    assert blocks == 40 * 2**20 // GEOMETRY.block_bytes - 1


def test_a_quantised_pool_holds_nearly_twice_as_many_tokens_as_one_of_bf16() -> None:
    config = MemoryConfig(kv_memory="100MiB", kv_dtype="int8")
    quantised = replace(GEOMETRY, quantised=QUANTISED[config.kv_dtype])
    assert pool_blocks(config, quantised, CPU) / pool_blocks(config, GEOMETRY, CPU) == pytest.approx(128 / 68, rel=0.01)


def test_an_unknown_format_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--kv-dtype 'int3' is not supported: choose auto, int8, fp8, int4"):
        MemoryConfig(kv_dtype="int3")  # type: ignore[arg-type]


def test_fp8_is_refused_where_the_device_has_no_such_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MemoryConfig(kv_memory="100MiB", kv_dtype="fp8")
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9 or newer, not a cpu: choose int8"):
        check_device(config, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError, match=r"NVIDIA A100 has 8\.0: choose int8"):
        check_device(config, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_device(config, torch.device("cuda", 0))


def test_memory_for_less_than_a_block_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(ConfigError, match=r"at least 720\.0 KiB"):
        pool_blocks(MemoryConfig(kv_memory="100KiB"), GEOMETRY, CPU)


def test_more_memory_than_is_free_is_refused() -> None:
    with pytest.raises(ConfigError, match="free after the weights"):
        pool_blocks(MemoryConfig(kv_memory="900TiB"), GEOMETRY, CPU)


def test_a_containers_limit_counts_as_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvikk.memory.sizing.CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert free_memory_bytes(CPU) > 10**6
    (tmp_path / "memory.max").write_text("500000\n")
    assert free_memory_bytes(CPU) == 499_000
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("3000")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("2000")
    assert free_memory_bytes(CPU) == 1000


def test_bytes_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 * 2**29, 5 * 2**40)] == ["12 B", "2.0 KiB", "1.5 GiB", "5.0 TiB"]

"""An engine on a device, a link and a host whose times are known: speed without a wall clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvikk.engine import Engine, EngineConfig, EngineLimits, SamplingParams
from kvikk.engine.compressor import PolicyCompressor
from kvikk.engine.config import SchedulerConfig
from kvikk.engine.sampler import SampledToken
from kvikk.engine.step import PendingStep, RowResult, ScheduledRow, StepPlan
from kvikk.memory import KVStore, MemoryConfig
from kvikk.memory.sizing import HostUse
from kvikk.models import toy_model
from kvikk.prefix import KeySpace
from kvikk.types import BlockId

VOCABULARY = 200
PAGE = 16


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, as measured on an H200 with SmolLM2 and some 8,000 tokens a row, a quarter of them in a small cache.

    Args:
        draft, verify, plain: of a step at all, by the greatest of what it does; of rows and tokens see below.
        draft_row, verify_row, plain_row: more, for each row of a kind.
        verify_token: more, for each drafted token that is verified.
        prompt_token: more, for each token of a prompt.
        plan, read, read_row: of the host, to plan and start a step, and to read one that verifies.
        copy, copy_work: of the host, and then of the device, to make a small cache.
        link_block: of the link, for a block in either direction.
    """

    draft: float = 1.0e-3
    verify: float = 1.73e-3
    plain: float = 1.03e-3
    draft_row: float = 20e-6
    verify_row: float = 75e-6
    plain_row: float = 46e-6
    verify_token: float = 5e-6
    prompt_token: float = 2.2e-6
    plan: float = 0.4e-3
    read: float = 0.2e-3
    read_row: float = 10e-6
    copy: float = 1.5e-3
    copy_work: float = 0.5e-3
    link_block: float = 8e-6


@dataclass
class Device:
    """Computes one step after the other, in the order in which the host starts them.

    Args:
        acceptance: the probability that a drafted token is right.
        costs: what things take.
        hold_up_s: every fiftieth step the host is held up so long, as by a garbage collection.
        launch_s: of the host, to start a verification kernel by kernel while the device computes.
    """

    acceptance: float
    costs: Costs = field(default_factory=Costs)
    hold_up_s: float = 0.0
    launch_s: float = 0.0
    now_s: float = 0.0
    free_s: float = 0.0
    steps: int = 0
    copies: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(7))

    def start(self, plan: StepPlan) -> VirtualStep:
        self.steps += 1
        self.now_s += self.costs.plan + (self.hold_up_s if self.steps % 50 == 0 else 0.0)
        began = max(self.now_s, self.free_s)
        self.now_s += self.launch_s if plan.tries_drafts else 0.0
        self.free_s = max(self.now_s, began + plan.repeats * self._seconds(plan))
        return VirtualStep(self, plan, began, self.free_s)

    def said(self, scheduled: ScheduledRow, repeats: int) -> list[SampledToken]:
        drafts = scheduled.known_drafts
        wrong = next((at for at in range(len(drafts)) if self.random.random() >= self.acceptance), len(drafts))
        tokens = [SampledToken(draft if at < wrong else draft ^ 1) for at, draft in enumerate(drafts)]
        missing = scheduled.samples * repeats - len(tokens)
        return tokens + [SampledToken(self.random.randrange(VOCABULARY)) for _ in range(missing)]

    def copy(self) -> None:
        """A small cache is made, beside the step that is in flight and behind it."""
        self.copies += 1
        self.now_s += self.costs.copy
        self.free_s = max(self.now_s, self.free_s) + self.costs.copy_work

    def _seconds(self, plan: StepPlan) -> float:
        costs, fixed, more = self.costs, 0.0, 0.0
        for scheduled in plan.rows:
            tokens = sum(run.length for run in scheduled.runs)
            if scheduled.drafts:
                fixed = max(fixed, costs.verify)
                more += costs.verify_row + costs.verify_token * (tokens - 1)
            elif scheduled.row.draft_of is not None:
                fixed = max(fixed, costs.draft)
                more += costs.draft_row
            elif tokens == 1:
                fixed = max(fixed, costs.plain)
                more += costs.plain_row
            else:
                fixed = max(fixed, costs.plain)
                more += costs.prompt_token * tokens
        return fixed + more


@dataclass(frozen=True)
class VirtualStep:
    device: Device
    plan: StepPlan
    began_s: float
    ended_s: float

    def results(self) -> list[RowResult]:
        device, plan = self.device, self.plan
        device.now_s = max(device.now_s, self.ended_s)
        if plan.tries_drafts:
            device.now_s += device.costs.read + device.costs.read_row * len(plan.rows)
        return [RowResult(device.said(scheduled, plan.repeats)) if scheduled.samples else RowResult([])
                for scheduled in plan.rows]  # fmt: skip

    def seconds(self, until: PendingStep | None = None) -> float | None:
        return (until.began_s if isinstance(until, VirtualStep) else self.ended_s) - self.began_s


class VirtualRunner:
    def __init__(self, device: Device) -> None:
        self.device = device

    def launch(self, plan: StepPlan) -> VirtualStep:
        return self.device.start(plan)

    def execute(self, plan: StepPlan) -> list[RowResult]:
        return self.launch(plan).results()


class VirtualLink:
    """The host's memory, with one line out and one in; nothing is copied, but it takes its time."""

    block_bytes = 360 * 2**10

    def __init__(self, device: Device, total: int) -> None:
        self.total = total
        self._device = device
        self._free = list(range(total))
        self._out_s = self._in_s = 0.0

    @property
    def free(self) -> int:
        return len(self._free)

    def save(self, blocks: Sequence[BlockId]) -> tuple[list[int], VirtualCopying]:
        slots = [self._free.pop() for _ in blocks]
        seconds = len(blocks) * self._device.costs.link_block
        self._out_s = max(self._out_s, self._device.free_s, self._device.now_s) + seconds
        return slots, VirtualCopying(self._device, seconds, self._out_s)

    def load(self, slots: Sequence[int], blocks: Sequence[BlockId], after: Any) -> VirtualCopying:
        seconds = len(blocks) * self._device.costs.link_block
        self._in_s = max(self._in_s, self._device.free_s, self._device.now_s, after.ended_s) + seconds
        return VirtualCopying(self._device, seconds, self._in_s)

    def give_back(self, slots: Sequence[int]) -> None:
        self._free += slots


@dataclass(frozen=True)
class VirtualCopying:
    device: Device
    seconds: float
    ended_s: float

    @property
    def is_done(self) -> bool:
        return self.device.now_s >= self.ended_s

    def wait(self) -> None:
        self.device.now_s = max(self.device.now_s, self.ended_s)

    def settle(self) -> None:
        self.device.free_s = max(self.device.free_s, self.ended_s)


def engine_on(
    device: Device,
    *,
    rows: int,
    blocks: int,
    max_model_len: int,
    step_tokens: int = 2048,
    host_blocks: int = 0,
    use: HostUse = "auto",
) -> Engine:
    model = toy_model(max_positions=max_model_len, layers=1, kv_heads=1, q_heads=1, head_dim=2)
    store = KVStore(model.spec.geometry(PAGE), blocks + 1, torch.device("cpu"))
    engine = Engine(
        EngineConfig(
            scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=step_tokens),
            memory=MemoryConfig(kv_host_memory="1GiB", kv_host_use=use) if host_blocks else MemoryConfig(),
        ),
        EngineLimits(max_model_len=max_model_len, vocabulary=VOCABULARY),
        KeySpace(model="toy", rope="", kv_format="f32", page_size=PAGE, numerics="fast"),
        blocks, VirtualRunner(device), store, compressor=PolicyCompressor(store, None), clock=lambda: device.now_s,
        rest=VirtualLink(device, host_blocks) if host_blocks else None,
    )  # fmt: skip
    copy_kept = engine.kv.copy_kept

    def slowly(row: Any) -> bool:
        device.copy()
        return copy_kept(row)

    engine.kv.copy_kept = slowly  # type: ignore[method-assign]
    return engine


def params(answer: int, kv_cache: dict[str, Any] | None) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=answer, kv_cache=kv_cache)

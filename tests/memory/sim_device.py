"""A device whose streams do their work when a test says, in any order that events allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvikk.memory.body import IntArray


class SimEvent:
    """Has come, or not yet."""

    has_come = False


class SimStream:
    """Keeps what it is asked for until `step`: work, an event to record, or one to wait for."""

    def __init__(self) -> None:
        self._asked: deque[Callable[[], object] | SimEvent | tuple[SimEvent]] = deque()

    def do(self, work: Callable[[], object]) -> None:
        self._asked.append(work)

    def upload(self, numbers: IntArray) -> Tensor:
        return torch.from_numpy(numbers)

    def record(self, *, timed: bool = False) -> Any:
        event = SimEvent()
        self._asked.append(event)
        return event

    def wait(self, event: Any) -> None:
        self._asked.append((event,))

    @property
    def can_step(self) -> bool:
        head = self._asked[0] if self._asked else None
        return head is not None and (not isinstance(head, tuple) or head[0].has_come)

    def step(self) -> None:
        head = self._asked.popleft()
        if isinstance(head, SimEvent):
            head.has_come = True
        elif not isinstance(head, tuple):
            head()


def run(streams: list[SimStream], choose: Callable[[int], int]) -> None:
    """Do all that was asked for.

    Args:
        choose: one of so many streams that could go on.
    """
    while ready := [stream for stream in streams if stream.can_step]:
        ready[choose(len(ready))].step()
    assert not any(stream._asked for stream in streams), "streams wait for each other"


def copy_by_index(source: Tensor, target: Tensor, source_rows: Tensor, target_rows: Tensor) -> None:
    target[target_rows] = source[source_rows]

"""Teacher forcing on the real engine: rows that are told their tokens, and what the model would have said instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvikk.attention import AttentionBackend
from kvikk.engine import Capacity, EngineConfig, SampledToken
from kvikk.engine.build import MakeRunner, fastest_runner
from kvikk.engine.request import Row
from kvikk.engine.runner import ModelRunner, sampling_tasks
from kvikk.engine.sampler import sample
from kvikk.engine.step import AheadRunner, PendingStep, RowResult, Runner, ScheduledRow, StepPlan
from kvikk.memory import KVStore
from kvikk.models import CausalLM

Observer = Callable[[int, Tensor], None]
"""Is told the index of a forced token and `[vocabulary]` fp32, the log-probabilities that the model gave there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lesson:
    """What a request is made to say.

    Args:
        tokens: in the place of its first samples; what comes after them is its own.
        observe: is told what the model would have said in the place of each; None: nobody wants to know.
    """

    tokens: Sequence[int]
    observe: Observer | None = None


class Teacher(ModelRunner):
    """A runner that forces the tokens of requests that have lessons, and leaves all others to another runner.

    Chunks, triggers, bodies and the pool are the engine's own: only the sampler's word is overruled. Forced steps are
    not started ahead and are in no graph, so their speed says nothing. Requests with lessons and requests without do
    not run at the same time.

    Args:
        model: on the store's device.
        store: the pool's bytes.
        backend: attention over that store.
        others: computes the steps of requests without lessons.
        lessons: by request id; whoever asks adds and removes them.
    """

    def __init__(
        self,
        model: CausalLM,
        store: KVStore,
        backend: AttentionBackend,
        others: Runner,
        lessons: Mapping[str, Lesson],
    ) -> None:
        super().__init__(model, store, backend)
        self._others = others
        self._lessons = lessons

    def launch(self, plan: StepPlan) -> PendingStep | None:
        """See `engine.step.AheadRunner`."""
        if self._is_taught(plan) or not isinstance(self._others, AheadRunner):
            return None
        return self._others.launch(plan)

    def execute(self, plan: StepPlan) -> list[RowResult]:
        """See `engine.step.Runner`."""
        return super().execute(plan) if self._is_taught(plan) else self._others.execute(plan)

    def _is_taught(self, plan: StepPlan) -> bool:
        return any(scheduled.row.request.id in self._lessons for scheduled in plan.rows)

    def _sample(self, rows: list[ScheduledRow], logits: Tensor) -> list[SampledToken | None]:
        """The forced token of each row, its own where there is none."""
        sampling = [scheduled for scheduled in rows if scheduled.samples]
        tokens = sample(logits, [task for scheduled in sampling for task in sampling_tasks(scheduled)])
        for index, scheduled in enumerate(sampling):
            lesson, said = self._lessons[scheduled.row.request.id], _generated(scheduled.row)
            if tokens[index] is None or said >= len(lesson.tokens):
                continue
            if lesson.observe is not None:
                lesson.observe(said, logits[index].float().log_softmax(-1))
            tokens[index] = SampledToken(lesson.tokens[said])
        return tokens


def _generated(row: Row) -> int:
    return len(row.tokens) - len(row.request.prompt_token_ids)


def teacher_of(lessons: Mapping[str, Lesson]) -> MakeRunner:
    """Makes a teacher with these lessons, and for all others the runner that users get."""

    def make(
        model: CausalLM, store: KVStore, backend: AttentionBackend, config: EngineConfig, capacity: Capacity
    ) -> Runner:
        return Teacher(model, store, backend, fastest_runner(model, store, backend, config, capacity), lessons)

    return make

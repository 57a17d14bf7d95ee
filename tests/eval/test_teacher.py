"""Forced tokens on the real engine, and requests that are left to the runner that users get."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.conftest import Bytes
from kvikk.engine import EngineConfig, build_engine
from kvikk.engine.runner import ModelRunner
from kvikk.engine.step import StepPlan
from kvikk.eval.subject import Exam, Subject
from kvikk.eval.teacher import Lesson, Teacher
from kvikk.memory import MemoryConfig
from kvikk.models import LoadedModel, toy_model
from kvikk.models.config import ModelConfig

FULL: dict[str, Any] = {"policy": "full"}
TEXT = list(b"A forced text is what was given, and nothing that a model would have liked to say in its place. " * 4)


class Ahead(ModelRunner):
    """Takes a step before the one in front of it is read, as a GPU's runner does, and computes it when it is read."""

    launched = 0

    def launch(self, plan: StepPlan) -> Any:
        self.launched += 1
        return SimpleNamespace(results=lambda: self.execute(plan), seconds=lambda until=None: None)


def subject_beside(others: list[Ahead]) -> Subject:
    lessons: dict[str, Lesson] = {}

    def make(model: Any, store: Any, backend: Any, config: Any, capacity: Any) -> Teacher:
        others.append(Ahead(model, store, backend))
        return Teacher(model, store, backend, others[0], lessons)

    loaded = LoadedModel(
        model=toy_model(), tokenizer=Bytes(), max_model_len=1024, generation_defaults={}, folder=Path()
    )
    config = EngineConfig(model=ModelConfig(device="cpu"), memory=MemoryConfig(kv_memory="16MiB"))
    engine, capacity = build_engine(loaded, config, make)
    return Subject(loaded, engine, lessons, capacity.geometry)


def test_what_follows_forced_tokens_is_what_follows_them_in_a_prompt(subject: Subject) -> None:
    exams = [Exam(prompt=TEXT[:cut], forced=TEXT[cut:200], free=20) for cut in (199, 150, 16, 1)]
    outcomes = subject.sit([*exams, Exam(prompt=TEXT[:200], free=20)], FULL)
    assert len(outcomes[0].tokens) == 20
    assert [outcome.tokens for outcome in outcomes] == [outcomes[-1].tokens] * 5


def test_each_forced_token_is_observed_once_in_order_and_its_own_ones_are_not(subject: Subject) -> None:
    seen: list[int] = []
    exam = Exam(prompt=TEXT[:100], forced=TEXT[100:130], free=5, observe=lambda index, _: seen.append(index))
    subject.sit([exam], FULL)
    assert seen == list(range(30))


@pytest.mark.parametrize("trigger", ["prefill", "every:8"])
def test_forced_tokens_pass_triggers_as_generated_ones_do(subject: Subject, trigger: str) -> None:
    """A row that is forced to say what it would have said says the rest of it, too, and holds as much."""
    asked = {"policy": "h2o", "budget": 0.3, "sinks": 2, "window": 16, "trigger": trigger}
    free = subject.sit([Exam(prompt=TEXT, free=40)], asked)[0]
    forced = subject.sit([Exam(prompt=TEXT, forced=free.tokens[:25], free=15)], asked)[0]
    assert forced.tokens == free.tokens[25:]
    assert (forced.held_bytes, forced.evicted_tokens) == (free.held_bytes, free.evicted_tokens)
    assert forced.evicted_tokens > 200


def test_only_steps_without_lessons_are_left_to_the_other_runner() -> None:
    others: list[Ahead] = []
    subject = subject_beside(others)
    (taught,) = subject.sit([Exam(prompt=TEXT, free=10)], FULL)
    assert others[0].launched == 0
    assert subject.decode_rate([TEXT, TEXT[:50]], 12, FULL) is not None
    assert others[0].launched >= 12
    launched = others[0].launched
    assert subject.sit([Exam(prompt=TEXT, free=10)], FULL)[0].tokens == taught.tokens
    assert others[0].launched == launched

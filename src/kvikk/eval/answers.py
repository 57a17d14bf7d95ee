"""Whether questions are still answered: asked in the prompt, and asked when the context has been compressed already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import Any, Final

from kvikk.eval.grid import FULL_CELL, Cell, GridConfig
from kvikk.eval.subject import Exam, Outcome, Subject
from kvikk.eval.suite import Row, held_figures
from kvikk.eval.tasks import MAKERS, Question

COUNTS_FROM: Final = 0.5
"""A task that the full cache solves more rarely says nothing of a smaller one."""
PLACES: Final = ("prompt", "later")
"""Where a question stands: before the trigger, where policies that look at queries see it, or after it."""


class Tasks:
    """Every question twice: the context and the question are compressed together, or the context alone.

    In both cases the whole answer is written from the compressed cache: the last token of a question in the prompt is
    forced after the trigger, and of a later one all are.

    Args:
        subject: the model.
        questions: of all tasks.
        grid: says how a cell is asked for.
    """

    name = "tasks"

    def __init__(self, subject: Subject, questions: Sequence[Question], grid: GridConfig) -> None:
        self._subject = subject
        self._questions = questions
        self._grid = grid

    def rows(self, cell: Cell) -> list[Row]:
        """A row for each task and place of the question."""
        asked = self._grid.kv_cache(cell)
        outcomes = self._reference if cell.is_full else {place: self._ask(place, asked) for place in PLACES}
        return [row for place in PLACES for row in self._rows(place, outcomes[place])]

    def _rows(self, place: str, outcomes: Sequence[Outcome]) -> list[Row]:
        found: list[Row] = []
        full = self._reference[place]
        for task in MAKERS:
            mine = [index for index, question in enumerate(self._questions) if question.task == task]
            score, full_score = (
                fmean(self._is_right(index, each[index]) for index in mine) for each in (outcomes, full)
            )
            row: Row = {
                "task": task,
                "question": place,
                "length": round(fmean(len(self._exams[place][index].prompt) for index in mine)),
                "samples": len(mine),
                "score": score,
                "full_score": full_score,
                "counted": full_score >= COUNTS_FROM,
            }
            found.append(row | held_figures([outcomes[index] for index in mine], [full[index] for index in mine]))
        return found

    @cached_property
    def _reference(self) -> dict[str, list[Outcome]]:
        """The answers from the full cache."""
        return {place: self._ask(place, self._grid.kv_cache(FULL_CELL)) for place in PLACES}

    @cached_property
    def _exams(self) -> dict[str, list[Exam]]:
        exams: dict[str, list[Exam]] = {place: [] for place in PLACES}
        for question in self._questions:
            context, asked = self._subject.encode(question.context), self._subject.encode(question.text)
            for place, seen in zip(PLACES, (len(asked) - 1, 0), strict=True):
                exams[place].append(
                    Exam(prompt=context + asked[:seen], forced=asked[seen:], free=question.answer_tokens)
                )
        return exams

    def _ask(self, place: str, asked: Mapping[str, Any]) -> list[Outcome]:
        return self._subject.sit(self._exams[place], asked)

    def _is_right(self, index: int, outcome: Outcome) -> bool:
        return self._questions[index].is_right(self._subject.decode(outcome.tokens))

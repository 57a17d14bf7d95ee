"""Whether questions are still answered: asked in the prompt, and asked when the context has been compressed already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Final

from kvikk.eval.grid import FULL_CELL, Cell, GridConfig
from kvikk.eval.subject import Exam, Outcome, Subject
from kvikk.eval.suite import Row, held_figures
from kvikk.eval.tasks import Question

COUNTS_FROM: Final = 0.5
"""A task that the full cache solves more rarely says nothing of a smaller one."""
PLACES: Final = ("prompt", "later")
"""Where a question stands: before the trigger, where policies that look at queries see it, or after it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Paper:
    """The questions of one task, in one place.

    Args:
        task: its name.
        place: one of `PLACES`.
        questions: what is asked.
        exams: the same as requests.
        full: what came of them with the full cache.
        full_score: share that was right then.
    """

    task: str
    place: str
    questions: Sequence[Question]
    exams: Sequence[Exam]
    full: Sequence[Outcome]
    full_score: float

    @property
    def counts(self) -> bool:
        """Whether the full cache solves enough of it."""
        return self.full_score >= COUNTS_FROM

    @property
    def facts(self) -> Row:
        """What a row says of it, whatever was measured."""
        return {
            "task": self.task,
            "question": self.place,
            "length": round(fmean(len(exam.prompt) for exam in self.exams)),
            "samples": len(self.questions),
            "full_score": self.full_score,
            "counted": self.counts,
        }


class Tasks:
    """Every question twice: the context and the question are compressed together, or the context alone.

    A later question is forced, token by token, as if another turn had followed. What the full cache cannot solve is not
    asked again.

    Args:
        subject: what is measured.
        reference: whose full cache says what can be solved; the subject itself unless that stores K and V otherwise.
        questions: of all tasks.
        grid: says how a cell is asked for.
    """

    name = "tasks"

    def __init__(self, subject: Subject, reference: Subject, questions: Sequence[Question], grid: GridConfig) -> None:
        self._subject = subject
        self._reference = reference
        self._questions = questions
        self._grid = grid

    def rows(self, cell: Cell) -> list[Row]:
        """A row for each task and place of the question."""
        found: list[Row] = []
        asked = self._grid.kv_cache(cell)
        is_reference = cell.is_full and self._subject is self._reference
        for place in PLACES:
            papers = [paper for paper in self._papers if paper.place == place]
            counted = [paper for paper in papers if paper.counts and not is_reference]
            outcomes = iter(self._subject.sit([exam for paper in counted for exam in paper.exams], asked))
            for paper in papers:
                if paper in counted:
                    found.append(self._row(paper, [next(outcomes) for _ in paper.exams]))
                elif is_reference:
                    found.append(self._row(paper, paper.full))
                else:
                    found.append(
                        paper.facts | {"score": None, "flag": f"not counted: full scores {paper.full_score:.0%}"}
                    )
        return found

    def _row(self, paper: Paper, outcomes: Sequence[Outcome]) -> Row:
        score = self._score(paper.questions, outcomes)
        is_same_format = self._subject is self._reference
        return paper.facts | {"score": score} | held_figures(outcomes, paper.full, is_same_format=is_same_format)

    @cached_property
    def _papers(self) -> list[Paper]:
        """All of them, answered from the full cache."""
        asked = self._grid.kv_cache(FULL_CELL)
        found: list[Paper] = []
        for place in PLACES:
            outcomes = iter(self._reference.sit([self._exam(question, place) for question in self._questions], asked))
            full = dict(zip(self._questions, outcomes, strict=True))
            for task in dict.fromkeys(question.task for question in self._questions):
                mine = [question for question in self._questions if question.task == task]
                of_mine = [full[question] for question in mine]
                found.append(
                    Paper(
                        task=task,
                        place=place,
                        questions=mine,
                        exams=[self._exam(question, place) for question in mine],
                        full=of_mine,
                        full_score=self._score(mine, of_mine),
                    )
                )
        return found

    def _exam(self, question: Question, place: str) -> Exam:
        context, asked = self._subject.encode(question.context), self._subject.encode(question.text)
        if place == "prompt":
            return Exam(prompt=context + asked, free=question.answer_tokens)
        return Exam(prompt=context, forced=asked, free=question.answer_tokens)

    def _score(self, questions: Sequence[Question], outcomes: Sequence[Outcome]) -> float:
        """Share of the questions that were answered rightly."""
        return fmean(
            question.is_right(self._subject.decode(outcome.tokens))
            for question, outcome in zip(questions, outcomes, strict=True)
        )

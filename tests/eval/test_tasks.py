"""Tasks: the same from the same seed, rightly checked, and asked where they say they are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from kvikk.eval.answers import Tasks
from kvikk.eval.grid import FULL_CELL, Cell, GridConfig
from kvikk.eval.subject import Exam, Outcome, Subject
from kvikk.eval.tasks import MAKERS, QUESTIONS, Question, make_questions

SMALL = {"sinks": 2, "window": 16}
CELL = Cell(policy="snapkv", budget="25%", allocator="uniform", rest="drop", trigger="prefill")


def encode(text: str) -> list[int]:
    return list(text.encode())


def questions(seed: int = 0) -> list[Question]:
    return make_questions(contexts=2, tokens=2500, seed=seed, encode=encode)


def of_task(task: str) -> list[Question]:
    return [question for question in questions() if question.task == task]


def texts(found: list[Question]) -> list[tuple[str, str, str]]:
    return [(question.context, question.text, question.answer) for question in found]


def test_a_seed_makes_the_same_questions_and_another_one_others() -> None:
    assert texts(questions()) == texts(questions())
    assert not set(texts(questions())) & set(texts(questions(seed=1)))


@pytest.mark.parametrize("task", MAKERS)
def test_a_tasks_contexts_are_real_text_of_about_the_length_asked_for_with_five_questions_each(task: str) -> None:
    found = of_task(task)
    assert len(found) == 2 * QUESTIONS
    assert len({question.context for question in found}) == 2
    assert len({question.text for question in found[:QUESTIONS]}) == QUESTIONS
    for question in found:
        assert 2500 <= len(question.context) < 2500 + 1100
        assert question.answer not in question.text


@pytest.mark.parametrize("task", [task for task in MAKERS if task != "tool-call"])
def test_the_number_that_is_asked_for_stands_once_in_the_context(task: str) -> None:
    for question in of_task(task):
        assert len(re.findall(question.answer, question.context)) == 1


def test_needles_lie_at_five_depths() -> None:
    found = of_task("needle")[:QUESTIONS]
    depths = [question.context.index(question.answer) / len(question.context) for question in found]
    assert depths == sorted(depths)
    assert depths[0] < 0.3
    assert depths[-1] > 0.7


def test_a_number_is_right_whole_and_before_the_answer_turns_to_something_else() -> None:
    question = of_task("needle")[0]
    number = question.answer
    assert question.is_right(f" {number}.\n\nThe")
    assert question.is_right(f"\n{number}")
    for wrong in (f" 1{number}", f" {number}1", number[:-1], "", f" unknown.\n\nBut {number}"):
        assert not question.is_right(wrong)


def test_a_call_is_right_when_its_json_is_and_nothing_else_matters() -> None:
    question = of_task("tool-call")[0]
    call = json.loads(question.answer)
    assert question.is_right(f" {question.answer}\n\nUser: more")
    assert question.is_right(json.dumps({"arguments": dict(reversed(call["arguments"].items())), "name": call["name"]}))
    other = json.dumps(call | {"arguments": call["arguments"] | {"order": "1"}})
    for wrong in ("", "I cannot", question.answer[:-1], other, json.dumps(call | {"name": "keep"}), f"{other} {call}"):
        assert not question.is_right(wrong)


class Solver(Subject):
    """A subject that knows all answers, and loses those of some tasks when it is compressed."""

    def __init__(self, subject: Subject, known: dict[str, set[str]]) -> None:
        self.inner, self.known = subject, known
        self.asked: list[tuple[list[Exam], dict[str, Any]]] = []

    encode = staticmethod(encode)

    def decode(self, tokens: Any) -> str:
        return bytes(tokens).decode()

    def sit(self, exams: Any, kv_cache: Any) -> list[Outcome]:
        self.asked.append((list(exams), dict(kv_cache)))
        evicted = 0 if kv_cache["policy"] == "full" else 9
        by_text = {question.context + question.text: question for question in questions()}
        asked = [by_text[self.decode([*exam.prompt, *exam.forced])] for exam in exams]
        said = [question.answer if question.task in self.known[kv_cache["policy"]] else "?" for question in asked]
        return [Outcome(tokens=encode(text), held_bytes=100 - 8 * evicted, evicted_tokens=evicted) for text in said]


def test_a_task_that_the_full_cache_cannot_solve_is_not_counted_and_not_asked_again(subject: Subject) -> None:
    solver = Solver(subject, {"full": {"needle", "lookup"}, "snapkv": {"lookup"}})
    suite = Tasks(solver, solver, questions(), GridConfig(**SMALL))
    full = {(row["task"], row["question"]): row for row in suite.rows(FULL_CELL)}
    rows = {(row["task"], row["question"]): row for row in suite.rows(CELL)}
    assert len(rows) == len(full) == 2 * len(MAKERS)
    for place in ("prompt", "later"):
        assert full["needle", place]["score"] == rows["lookup", place]["score"] == 1
        assert rows["needle", place]["score"] == 0
        assert rows["needle", place]["kept_share"] == pytest.approx(0.28)
        for task in set(MAKERS) - {"needle", "lookup"}:
            assert (full[task, place]["score"], full[task, place]["counted"]) == (0, False)
            assert (rows[task, place]["score"], rows[task, place]["flag"]) == (None, "not counted: full scores 0%")
    asked_again = [len(exams) for exams, kv_cache in solver.asked if kv_cache["policy"] == "snapkv"]
    assert asked_again == [4 * QUESTIONS] * 2


def test_a_question_stands_in_the_prompt_or_is_forced_after_it(subject: Subject) -> None:
    solver = Solver(subject, {"full": set(MAKERS)})
    asked = questions()
    Tasks(solver, solver, asked, GridConfig(**SMALL)).rows(FULL_CELL)
    in_prompt, later = (exams for exams, _ in solver.asked if exams)
    for question, first, second in zip(asked, in_prompt, later, strict=True):
        assert bytes(first.prompt).decode() == question.context + question.text
        assert list(first.forced) == []
        assert bytes(second.prompt).decode() == question.context
        assert bytes(second.forced).decode() == question.text


def test_a_forced_question_leaves_the_kv_of_a_prompt_with_the_same_tokens(subject: Subject) -> None:
    """Nothing dropped: bytes of K and V of both ways, and the same text after them."""
    question = of_task("needle")[0]
    context, asked = encode(question.context)[-700:], encode(question.text)
    full: dict[str, Any] = {"policy": "full"}
    seen, bytes_of = [], []
    for seen_tokens in (len(asked) - 1, 0):
        prompt = context + asked[:seen_tokens]
        seen.append(subject.sit([Exam(prompt=prompt, forced=asked[seen_tokens:], free=12)], full)[0].tokens)
        bytes_of.append(cached_kv(subject, context + asked))
        subject.engine.prefix.reset()
    assert len(seen[0]) == 12
    assert seen[0] == seen[1]
    assert torch.allclose(bytes_of[0], bytes_of[1], rtol=1e-4, atol=1e-5)


def cached_kv(subject: Subject, tokens: list[int]) -> torch.Tensor:
    """K and V of all full blocks of the tokens, which the prefix cache holds."""
    engine = subject.engine
    engine.pin("test", tokens)
    (blocks,) = [holders for holders in engine.prefix.holders() if holders]
    engine.prefix.unpin("test")
    store: Any = engine.kv.store
    assert len(blocks) == len(tokens) // 16
    return torch.stack(
        [store.frames[block * store.lanes : (block + 1) * store.lanes].float() for block in blocks]
    ).clone()


def test_a_compressed_context_is_compressed_before_the_question_is_read(subject: Subject) -> None:
    """So two questions on one context find the same tokens left, whatever they ask."""
    asked = of_task("needle")[:2]
    outcomes = subject.sit(
        [Exam(prompt=encode(q.context)[-800:], forced=encode(q.text)[:40], free=4) for q in asked],
        {"policy": "snapkv", "budget": 0.25} | SMALL,
    )
    assert [outcome.evicted_tokens for outcome in outcomes] == [600, 600]

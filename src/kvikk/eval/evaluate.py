"""`kvikk eval`: every suite over every cell of a grid, result by result."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

from kvikk.bench.datasets import names_in
from kvikk.bench.device import device_name, header
from kvikk.bench.texts import Document, digest, documents
from kvikk.errors import ConfigError, KvikkError
from kvikk.eval.answers import Tasks
from kvikk.eval.config import SUITES, EvalConfig, SuiteConfig
from kvikk.eval.fidelity import UNMEASURED, Fidelity
from kvikk.eval.results import Results
from kvikk.eval.subject import Subject
from kvikk.eval.suite import REFERENCE, Suite, complete
from kvikk.eval.tasks import make_questions

log = logging.getLogger(__name__)

ROOM_TO_ASK: Final = 512
"""Tokens that a context may be longer than asked for, with its question and answer: whole paragraphs."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Args:
        results: all rows, with those of former runs.
        failed: cells that a suite could not measure, each with the reason; a rerun tries them again.
    """

    results: Results
    failed: list[str]


def load_subjects(config: EvalConfig) -> tuple[Subject, Subject]:
    """What is measured, and what it is compared with: the same, unless its K and V are stored in another type.

    Raises:
        ConfigError: an option cannot be honoured.
        ModelError: the model cannot be loaded, or is not supported.
    """
    subject = Subject.load(config.engine)
    if config.memory.kv_dtype == "auto":
        return subject, subject
    memory = replace(config.memory, kv_dtype="auto")
    return subject, Subject.of(subject.loaded, replace(config.engine, memory=memory))


def evaluate(config: EvalConfig, subject: Subject, reference: Subject) -> Evaluation:
    """Measure what the output file does not have yet.

    Args:
        config: what to measure.
        subject: on which engine.
        reference: whose full cache all is compared with; the subject itself where it stores K and V alike.

    Raises:
        ConfigError: the texts are too few or do not fit the model, or the output file is another evaluation's.
    """
    suites, made_of = _suites(config, subject, reference)
    spec = subject.loaded.model.spec
    device = config.model.torch_device()
    output = config.output.output
    results = Results(
        None if output is None else Path(output),
        header(device)
        | {
            "model": spec.name,
            "model_fingerprint": spec.fingerprint,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "settings": _settings(config),
            "texts": made_of,
        },
    )
    kv_dtype = subject.kv_format
    known = {"model": spec.name, "device": device_name(device), "kv_dtype": kv_dtype}
    todo = [
        (suite, cell) for cell in config.grid.cells() for suite in suites if not results.has(suite.name, cell, kv_dtype)
    ]
    failed: list[str] = []
    with tqdm(total=len(todo), unit="result", disable=config.output.disable_tqdm) as bar:
        for suite, cell in todo:
            bar.set_postfix_str(f"{suite.name}: {cell}")
            try:
                rows = suite.rows(cell)
            except KvikkError as error:
                failed.append(f"{suite.name}: {cell}: {error}")
                log.error("%s", failed[-1])
            else:
                named = known | {"suite": suite.name} | cell.names
                last = {"flag": REFERENCE} if cell.is_full and subject is reference else {}
                results.add([complete(named | row | last) for row in rows])
            bar.update()
    return Evaluation(results, failed)


def _settings(config: EvalConfig) -> dict[str, Any]:
    """What decides the numbers, and what two results must have in common to be compared."""
    return {
        **{name: value for name, value in asdict(config.suites).items() if name not in ("suite", "texts")},
        "sinks": config.grid.sinks,
        "window": config.grid.window,
        "block_size": config.memory.block_size,
        "numerics": config.numerics,
        "seed": config.seed,
    }


def _suites(config: EvalConfig, subject: Subject, reference: Subject) -> tuple[list[Suite], dict[str, Any]]:
    """The suites that are asked for, and a digest of what each is made of."""
    asked = names_in(config.suites.suite, "--suite", SUITES)
    found: list[Suite] = []
    made_of: dict[str, Any] = {}
    if Fidelity.name in asked:
        texts = _documents(config.suites, subject)
        names = [f"{document.kind}: {document.name}" for document in texts]
        made_of[Fidelity.name] = {"documents": names, "digest": digest([document.tokens for document in texts])}
        found.append(
            Fidelity(
                subject,
                reference,
                texts,
                forced=config.suites.forced_tokens + UNMEASURED,
                speed_tokens=config.suites.speed_tokens,
                grid=config.grid,
            )
        )
    if Tasks.name in asked:
        _check_fits(subject, "--task-length", config.suites.task_length + ROOM_TO_ASK)
        questions = make_questions(
            contexts=config.suites.contexts,
            tokens=config.suites.task_length,
            seed=config.seed,
            encode=subject.encode,
        )
        made_of[Tasks.name] = {
            "questions": len(questions),
            "digest": digest([(question.context, question.text, question.answer) for question in questions]),
        }
        found.append(Tasks(subject, reference, questions, config.grid))
    return found, made_of


def _documents(suites: SuiteConfig, subject: Subject) -> list[Document]:
    wanted = suites.length + suites.forced_tokens + UNMEASURED
    _check_fits(subject, "--length with --forced-tokens", wanted)
    _check_fits(subject, "--length with --speed-tokens", suites.length + suites.speed_tokens)
    return [
        document
        for source in names_in(suites.texts, "--texts")
        for document in documents(source, suites.documents, wanted, subject.encode)
    ]


def _check_fits(subject: Subject, flags: str, tokens: int) -> None:
    most = subject.engine.limits.max_model_len
    if tokens > most:
        raise ConfigError(f"{flags} takes {tokens:,} tokens, a sequence may have {most:,}: lower it")

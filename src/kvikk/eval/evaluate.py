"""`kvikk eval`: every suite over every cell of a grid, result by result."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

from kvikk.bench.device import device_name, header
from kvikk.engine import EngineConfig, SchedulerConfig
from kvikk.errors import ConfigError, KvikkError
from kvikk.eval.answers import Tasks
from kvikk.eval.fidelity import UNMEASURED, Fidelity
from kvikk.eval.grid import GridConfig, names_in
from kvikk.eval.results import Results
from kvikk.eval.subject import Subject
from kvikk.eval.suite import Suite, complete
from kvikk.eval.tasks import make_questions
from kvikk.eval.texts import CODE, PROSE, Document, digest, documents
from kvikk.memory import MemoryConfig
from kvikk.models.config import ModelConfig
from kvikk.types import Numerics

log = logging.getLogger(__name__)

SUITES: Final = (Fidelity.name, Tasks.name)
ROOM_TO_ASK: Final = 512
"""Tokens that a context may be longer than asked for, with its question and answer: whole paragraphs."""


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """What is measured, on which text.

    Args:
        suite: fidelity (distance from the full cache on real text), tasks (questions still answered), or both.
        texts: of fidelity: code (Python's library), prose (Python's manual), or folders of text files, with commas.
        documents: of each of these texts.
        length: tokens of a document that are the prompt.
        forced_tokens: tokens after it that are compared, one by one.
        speed_tokens: tokens that all documents generate to measure the speed; 0 measures none.
        task_length: tokens of a context of the tasks, roughly.
        contexts: of each task; five questions are asked on each.
    """

    suite: str = ",".join(SUITES)
    texts: str = f"{CODE},{PROSE}"
    documents: int = 4
    length: int = 3000
    forced_tokens: int = 96
    speed_tokens: int = 32
    task_length: int = 1500
    contexts: int = 3

    def __post_init__(self) -> None:
        names_in(self.suite, "--suite", SUITES)
        names_in(self.texts, "--texts")
        limits = {
            "documents": 1,
            "length": 64,
            "forced_tokens": 1,
            "speed_tokens": 0,
            "task_length": 256,
            "contexts": 1,
        }
        for name, least in limits.items():
            if getattr(self, name) < least:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is {getattr(self, name)}: it must be at least {least}")
        if 0 < self.speed_tokens < 8:
            raise ConfigError(f"--speed-tokens is {self.speed_tokens}: it must be at least 8, or 0 to measure no speed")


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Where results go, besides the screen.

    Args:
        output: JSON file of all rows, written after each result. A file that is there is gone on with.
        markdown: file for the table.
        plot: SVG file: quality against bytes held.
        disable_tqdm: show no progress bar.
    """

    output: str | None = None
    markdown: str | None = None
    plot: str | None = None
    disable_tqdm: bool = False


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Everything `kvikk eval` can be told.

    Args:
        numerics: `fast`, or `exact`: the same logits to the bit in any batch.
        enforce_eager: on a GPU, capture no graphs.
        seed: of the questions.
    """

    grid: GridConfig = field(default_factory=GridConfig)
    suites: SuiteConfig = field(default_factory=SuiteConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    numerics: Numerics = "fast"
    enforce_eager: bool = False
    seed: int = 0

    @property
    def engine(self) -> EngineConfig:
        """The engine that is evaluated: what is kept is said with each request."""
        return EngineConfig(
            model=self.model,
            scheduler=self.scheduler,
            memory=self.memory,
            numerics=self.numerics,
            enforce_eager=self.enforce_eager,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Args:
        results: all rows, with those of former runs.
        failed: cells that a suite could not measure, each with the reason; a rerun tries them again.
    """

    results: Results
    failed: list[str]


def evaluate(config: EvalConfig, subject: Subject) -> Evaluation:
    """Measure what the output file does not have yet.

    Raises:
        ConfigError: the texts are too few or do not fit the model, or the output file is another evaluation's.
    """
    suites, made_of = _suites(config, subject)
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
    todo = [(suite, cell) for cell in config.grid.cells() for suite in suites if not results.has(suite.name, cell)]
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
                results.add(
                    [
                        complete(row, model=spec.name, device=device_name(device), suite=suite.name, cell=cell)
                        for row in rows
                    ]
                )
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


def _suites(config: EvalConfig, subject: Subject) -> tuple[list[Suite], dict[str, Any]]:
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
        found.append(Tasks(subject, questions, config.grid))
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

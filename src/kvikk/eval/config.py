"""What `kvikk eval` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvikk.bench.datasets import names_in
from kvikk.bench.texts import CODE, PROSE
from kvikk.engine import EngineConfig, SchedulerConfig
from kvikk.errors import ConfigError
from kvikk.eval.answers import Tasks
from kvikk.eval.fidelity import Fidelity
from kvikk.eval.grid import GridConfig
from kvikk.memory import MemoryConfig
from kvikk.models.config import ModelConfig
from kvikk.types import Numerics

SUITES: Final = (Fidelity.name, Tasks.name)


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

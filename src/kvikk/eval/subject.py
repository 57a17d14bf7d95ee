"""The engine that is evaluated: asked in batches, forced or free, compressed or not, by the same few calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvikk.bench.match import token_ids
from kvikk.engine import (
    Engine,
    EngineConfig,
    EngineOutput,
    FinishReason,
    Request,
    SamplingParams,
    build_engine,
    load_engine,
)
from kvikk.eval.teacher import Lesson, Observer, teacher_of
from kvikk.geometry import KVGeometry
from kvikk.models import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Exam:
    """One request.

    Args:
        prompt: token ids; what is compressed at the end of the prompt is this.
        forced: the tokens that it is made to say next.
        free: so many tokens of its own follow, or fewer where it ends.
        observe: is told what the model would have said in the place of the forced ones.
    """

    prompt: Sequence[int]
    forced: Sequence[int] = ()
    free: int = 0
    observe: Observer | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it.

    Args:
        tokens: its own, after the forced ones; an end token is none.
        held_bytes: of KV that it held when its last token was computed, whole blocks.
        evicted_tokens: of the row, dropped by the last trigger, in the mean over lanes.
    """

    tokens: list[int]
    held_bytes: int
    evicted_tokens: float


class Subject:
    """A model and its engine.

    The prefix cache is on: what all cells of a grid ask about is computed once, and what was found cached is
    compressed to the same as what was computed.

    Args:
        loaded: the model.
        engine: whose runner has the lessons.
        lessons: by request id; empty.
        geometry: of the pool.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        engine: Engine,
        lessons: dict[str, Lesson],
        geometry: KVGeometry,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded = loaded
        self.engine = engine
        self._lessons = lessons
        self._geometry = geometry
        self._clock = clock

    @classmethod
    def load(cls, config: EngineConfig) -> Subject:
        """The model that the config names.

        Raises:
            ConfigError: an option cannot be honoured.
            ModelError: the model cannot be loaded, or is not supported.
        """
        lessons: dict[str, Lesson] = {}
        loaded, engine, capacity = load_engine(config, teacher_of(lessons))
        return cls(loaded, engine, lessons, capacity.geometry)

    @classmethod
    def of(cls, loaded: LoadedModel, config: EngineConfig) -> Subject:
        """A model that is loaded already, which may have engines of several kinds.

        Raises:
            ConfigError: an option cannot be honoured.
        """
        lessons: dict[str, Lesson] = {}
        engine, capacity = build_engine(loaded, config, teacher_of(lessons))
        return cls(loaded, engine, lessons, capacity.geometry)

    @property
    def kv_format(self) -> str:
        """What K and V are stored as, in a word."""
        return self._geometry.format

    def encode(self, text: str) -> list[int]:
        """A text's tokens, no special ones around them."""
        return token_ids(self.loaded.tokenizer, text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        text: str = self.loaded.tokenizer.decode(tokens)
        return text

    def sit(self, exams: Sequence[Exam], kv_cache: Mapping[str, Any]) -> list[Outcome]:
        """Run all of them at once, greedily.

        Args:
            exams: what to ask.
            kv_cache: what is kept of each, as a request says it.

        Raises:
            KvikkError: one was refused, or failed; none goes on.
        """
        with self._requests(exams, kv_cache, are_taught=True) as requests:
            held = [0] * len(requests)
            own: list[list[int]] = [[] for _ in requests]
            place = {request.id: index for index, request in enumerate(requests)}
            while self.engine.has_work:
                for request in self.engine.requests:
                    held[place[request.id]] = request.held_blocks
                for out in self._step():
                    if out.token is not None and out.finish_reason is not FinishReason.STOP:
                        own[place[out.request.id]].append(out.token.token_id)
        return [
            Outcome(
                tokens=tokens[len(exam.forced) :],
                held_bytes=blocks * self._geometry.block_bytes,
                evicted_tokens=0.0 if request.kv_usage is None else _evicted(request),
            )
            for exam, request, tokens, blocks in zip(exams, requests, own, held, strict=True)
        ]

    def decode_rate(self, prompts: Sequence[Sequence[int]], tokens: int, kv_cache: Mapping[str, Any]) -> float | None:
        """Tokens a second of all prompts together, decoding as users' requests do, by the runner that users get.

        From when all have two tokens, so that prompts and their triggers are over, until the first one ends.

        Args:
            prompts: token ids.
            tokens: generated for each.
            kv_cache: as in `sit`.

        Returns:
            None where they did not all decode at the same time: the KV memory is too small for that.
        """
        exams = [Exam(prompt=prompt, free=tokens) for prompt in prompts]
        with self._requests(exams, kv_cache, are_taught=False) as requests:
            counts = {request.id: 0 for request in requests}
            start, before = 0.0, 0
            while self.engine.has_work and max(counts.values()) < tokens:
                for out in self._step():
                    counts[out.request.id] += out.token is not None
                if not before and min(counts.values()) >= 2:
                    start, before = self._clock(), sum(counts.values())
            seconds, gained = self._clock() - start, sum(counts.values()) - before
        return gained / seconds if before and gained else None

    @contextmanager
    def _requests(
        self, exams: Sequence[Exam], kv_cache: Mapping[str, Any], *, are_taught: bool
    ) -> Iterator[list[Request]]:
        """Requests that are in the engine, and are not any more in the end; with lessons, or as long as asked for."""
        requests: list[Request] = []
        try:
            for exam in exams:
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=len(exam.forced) + exam.free,
                    min_tokens=len(exam.forced),
                    ignore_eos=not are_taught,
                    kv_cache=dict(kv_cache),
                )
                request = self.engine.add(exam.prompt, params)
                requests.append(request)
                if are_taught:
                    self._lessons[request.id] = Lesson(tokens=exam.forced, observe=exam.observe)
            yield requests
        finally:
            for request in requests:
                self.engine.abort(request.id)
                self._lessons.pop(request.id, None)

    def _step(self) -> list[EngineOutput]:
        outputs = self.engine.step()
        for out in outputs:
            if out.error is not None:
                raise out.error
        return outputs


def _evicted(request: Request) -> float:
    assert request.kv_usage is not None
    return request.kv_usage.tokens - request.kv_usage.kept_tokens

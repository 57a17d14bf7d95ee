"""`POST /v1/completions`: texts that go on from prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Response

from kvikk.engine import SamplingParams
from kvikk.errors import InvalidRequest
from kvikk.llm import Logprob
from kvikk.llm.writer import Piece
from kvikk.server.generation import Generation
from kvikk.server.openai.answer import Heading, UsageWanted, merged, usage_of
from kvikk.server.openai.logprobs import completion_logprobs, prompt_logprobs
from kvikk.server.openai.requests import CompletionBody
from kvikk.server.openai.responses import Completion, CompletionChoice, CompletionLogprobs
from kvikk.server.openai.sampling import requested_form, sampling_params
from kvikk.server.service import Service
from kvikk.server.streaming import EventStream, sse

DEFAULT_MAX_TOKENS = 16


async def complete(service: Service, body: CompletionBody, salt: str) -> Response:
    """Answer a completion request.

    Raises:
        KvikkError: it was refused, or failed.
    """
    heading = Heading.new("cmpl", service.model_name(body.model))
    params = completion_params(service, body)
    prompts = await encode_prompts(service, body)
    generations: list[Generation] = []
    try:
        for _, ids in prompts:
            generations.append(await service.generate(ids, params, salt, heading.arrived_s))
        answer = CompletionAnswer(
            heading=heading,
            body=body,
            generations=generations,
            prompts=[
                text if text is not None else service.tokenizer.decode(ids) if body.echo else ""
                for text, ids in prompts
            ],
        )
        if body.stream:
            return EventStream(answer.events(), answer.close)
        whole = await answer.whole()
    except BaseException:
        for generation in generations:
            generation.close()
        raise
    answer.close()
    return Response(whole.model_dump_json(), media_type="application/json")


def completion_params(service: Service, body: CompletionBody) -> SamplingParams:
    """What the body asks of sampling. `max_tokens` 0 scores an echoed prompt: one token is made and not shown."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0: it must be at least 1, or echo must be true", param="max_tokens")
    if body.echo and body.logprobs is not None:
        wanted = max(body.logprobs, body.prompt_logprobs or 0)
        body = body.model_copy(update={"prompt_logprobs": wanted})
    return sampling_params(
        body,
        service.default_sampling,
        max_tokens=max(1, max_tokens),
        logprobs=body.logprobs,
        max_choices=service.config.serving.max_choices,
        form=requested_form(body),
    )


async def encode_prompts(service: Service, body: CompletionBody) -> list[tuple[str | None, list[int]]]:
    """Each prompt's text, where it came as one, and its tokens."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    special = body.add_special_tokens is not False
    return [
        (prompt, await service.encode(prompt, add_special_tokens=special))
        if isinstance(prompt, str)
        else (None, list(prompt))
        for prompt in given
    ]


@dataclass(kw_only=True)
class CompletionAnswer:
    """One answer: the texts of all prompts, prompt by prompt, `n` for each.

    Args:
        heading: stands in each object.
        body: the request.
        generations: one for each prompt.
        prompts: their texts, for `echo`.
    """

    heading: Heading
    body: CompletionBody
    generations: Sequence[Generation]
    prompts: Sequence[str]
    _offsets: dict[int, int] = field(default_factory=dict)

    def close(self) -> None:
        """Abort what is unfinished."""
        for generation in self.generations:
            generation.close()

    async def whole(self) -> Completion:
        """The answer in one object."""
        texts: dict[tuple[int, int], list[Piece]] = {}
        async for prompt, piece in merged(self.generations):
            texts.setdefault((prompt, piece.index), []).append(piece)
        choices = [self._choice(prompt, joined(pieces), is_first=True) for (prompt, _), pieces in sorted(texts.items())]
        for choice in choices:
            self._add_prompt_fields(choice)
        return self._completion(choices, with_usage=True)

    async def events(self) -> AsyncIterator[bytes]:
        """The answer in server-sent events."""
        wanted = UsageWanted.of(self.body)
        begun: set[int] = set()
        async for prompt, piece in merged(self.generations):
            choice = self._choice(prompt, piece, is_first=self._index(prompt, piece) not in begun)
            if choice.index not in begun:
                begun.add(choice.index)
                self._add_prompt_fields(choice)
            yield sse(self._completion([choice], with_usage=wanted.always))
        if wanted.at_end:
            yield sse(self._completion([], with_usage=True))

    def _index(self, prompt: int, piece: Piece) -> int:
        return prompt * (self.body.n or 1) + piece.index

    def _completion(self, choices: list[CompletionChoice], *, with_usage: bool) -> Completion:
        return Completion(
            id=self.heading.id,
            created=self.heading.created,
            model=self.heading.model,
            choices=choices,
            usage=usage_of(self.generations) if with_usage else None,
        )

    def _choice(self, prompt: int, piece: Piece, *, is_first: bool) -> CompletionChoice:
        """A piece as OpenAI's object, with the echoed prompt before it if it is the text's first."""
        index = self._index(prompt, piece)
        text, ids = piece.text, piece.token_ids
        entries: list[Mapping[int, Logprob] | None] = list(piece.logprobs)
        if self.body.max_tokens == 0:
            text, ids, entries = "", [], []
        shown_ids = ids
        if is_first and self.body.echo:
            generation = self.generations[prompt]
            text = self.prompts[prompt] + text
            shown_ids = [*generation.prompt_token_ids, *ids]
            if self.body.logprobs is not None:
                entries = [*(generation.prompt_logprobs or []), *entries]
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, prompt, entries, shown_ids) if self.body.logprobs is not None else None,
            finish_reason="length" if self.body.max_tokens == 0 and piece.finish_reason else piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=ids if self.body.return_token_ids else None,
        )

    def _logprobs(
        self, index: int, prompt: int, entries: Sequence[Mapping[int, Logprob] | None], ids: Sequence[int]
    ) -> CompletionLogprobs:
        texts = [
            self.generations[prompt].decode(token) if entry is None else entry[token].decoded_token
            for entry, token in zip(entries, ids, strict=True)
        ]
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(map(len, texts))
        return completion_logprobs(entries, ids, texts, self.body.logprobs or 0, offset)

    def _add_prompt_fields(self, choice: CompletionChoice) -> None:
        generation = self.generations[choice.index // (self.body.n or 1)]
        if self.body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(generation.prompt_logprobs or [])
        if self.body.return_token_ids:
            choice.prompt_token_ids = generation.prompt_token_ids.tolist()


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one text as one."""
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=[entry for piece in pieces for entry in piece.logprobs],
    )

"""`POST /v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response

from kvikk.chat import (
    Answer,
    ArgumentsDelta,
    CallBegan,
    CallParser,
    Conversation,
    Event,
    Rendered,
    TextDelta,
    ToolUse,
    constraint,
    finish_reason,
    render,
)
from kvikk.engine import SamplingParams
from kvikk.errors import InvalidRequest
from kvikk.llm import Logprob
from kvikk.llm.writer import Piece
from kvikk.server.generation import Generation
from kvikk.server.openai.answer import Heading, UsageWanted, usage_of
from kvikk.server.openai.logprobs import TokenBytes, chat_logprobs, prompt_logprobs
from kvikk.server.openai.requests import ChatBody
from kvikk.server.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCallDelta,
    ToolCallMessage,
)
from kvikk.server.openai.sampling import requested_form, sampling_params
from kvikk.server.service import Service
from kvikk.server.streaming import EventStream, sse


async def chat(service: Service, body: ChatBody, salt: str) -> Response:
    """Answer a chat request.

    Raises:
        KvikkError: it was refused, or failed.
    """
    heading = Heading.new("chatcmpl", service.model_name(body.model))
    use = ToolUse.read(body.tools, body.tool_choice, body.parallel_tool_calls)
    params = chat_params(service, body, use)
    rendered = await render_chat(
        service,
        Conversation(
            messages=body.messages,
            tools=use.tools,
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs or {},
        ),
    )
    generation = await service.generate(rendered.token_ids, params, salt, heading.arrived_s)
    answer = ChatAnswer(heading=heading, body=body, generation=generation, service=service, use=use)
    if body.stream:
        return EventStream(answer.events(), generation.close)
    try:
        whole = await answer.whole()
    finally:
        generation.close()
    return Response(whole.model_dump_json(), media_type="application/json")


def chat_params(service: Service, body: ChatBody, use: ToolUse) -> SamplingParams:
    """What the body asks of sampling. A forced call is a form of the text."""
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise InvalidRequest(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}: give one",
            param="max_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs is given without logprobs: set logprobs to true", param="top_logprobs")
    if use.may_call and service.tool_form.keeps_special_tokens:
        body = body.model_copy(update={"skip_special_tokens": False})
    return sampling_params(
        body,
        service.default_sampling,
        max_tokens=limits.pop() if limits else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_choices=service.config.serving.max_choices,
        form=constraint(use, service.tool_form, requested_form(body)),
    )


async def render_chat(service: Service, conversation: Conversation) -> Rendered:
    """The prompt that the chat template makes of a conversation."""
    characters = sum(len(message["content"]) for message in conversation.messages)
    return await service.with_tokenizer(
        lambda tokenizer: render(conversation, tokenizer, service.chat_template, form=service.tool_form), characters
    )


@dataclass(kw_only=True)
class Said:
    """One of the answers as it grows.

    Args:
        parser: finds tool calls; None where none are looked for.
        answer: what has been found.
        entries: log-probabilities that no chunk has carried yet.
        ids: the tokens of these, and all others that no chunk has carried yet.
    """

    parser: CallParser | None
    answer: Answer = field(default_factory=Answer)
    entries: list[dict[int, Logprob]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    has_begun: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def take(self, piece: Piece) -> list[Event]:
        """Read a piece of the text; what it says, in order."""
        self.entries += piece.logprobs
        self.ids += piece.token_ids
        events: list[Event] = []
        if self.parser is None:
            events = [TextDelta(piece.text)] if piece.text else []
        else:
            events = self.parser.push(piece.text)
            if piece.finish_reason is not None:
                events = [*events, *self.parser.finish()]
        self.answer.add(events)
        if piece.finish_reason is not None:
            self.finish_reason = finish_reason(piece.finish_reason, bool(self.answer.calls))
            self.stop_reason = piece.stop_reason
        return events

    @property
    def is_complete(self) -> bool:
        """Whether the parser wants no more, though the text goes on: one call was allowed, and it is there."""
        return self.parser is not None and self.parser.has_ended and self.finish_reason is None


@dataclass(kw_only=True)
class ChatAnswer:
    """The answers to one request: `n` messages, streamed or whole, of the same pieces.

    Args:
        heading: stands in each object.
        body: the request.
        generation: gives the pieces.
        service: the model's side.
        use: of tools.
    """

    heading: Heading
    body: ChatBody
    generation: Generation
    service: Service
    use: ToolUse

    def __post_init__(self) -> None:
        self._bytes = TokenBytes(self.service.tokenizer)
        self._said = [Said(parser=self._parser()) for _ in range(self.body.n or 1)]
        self._has_begun = False

    async def whole(self) -> ChatCompletion:
        """The answer in one object."""
        async for _ in self._read():
            pass
        return ChatCompletion(
            id=self.heading.id,
            created=self.heading.created,
            model=self.heading.model,
            choices=[self._choice(index, said) for index, said in enumerate(self._said)],
            usage=usage_of([self.generation]),
            prompt_logprobs=self._prompt_logprobs(),
            prompt_token_ids=self.generation.prompt_token_ids.tolist() if self.body.return_token_ids else None,
        )

    async def events(self) -> AsyncIterator[bytes]:
        """The answer in server-sent events."""
        wanted = UsageWanted.of(self.body)
        async for index, events in self._read():
            for choice in self._chunks(index, events):
                yield self._chunk([choice], wanted, with_usage=wanted.always)
        if wanted.at_end:
            yield self._chunk([], wanted, with_usage=True)

    async def _read(self) -> AsyncIterator[tuple[int, list[Event]]]:
        """What is new, with the answer's index; a text that has said all that it may is ended."""
        async for pieces in self.generation:
            for piece in pieces:
                said = self._said[piece.index]
                events = said.take(piece)
                if said.is_complete:
                    said.take(self.generation.end(piece.index))
                yield piece.index, events

    def _parser(self) -> CallParser | None:
        if not self.use.may_call:
            return None
        return self.service.tool_form.read(self.use, lambda: f"call_{uuid.uuid4().hex[:24]}")

    # The plain answer

    def _choice(self, index: int, said: Said) -> ChatChoice:
        calls = [
            ToolCallMessage(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in said.answer.calls
        ]
        return ChatChoice(
            index=index,
            message=ChatMessage(content=said.answer.text or (None if calls else ""), tool_calls=calls or None),
            logprobs=self._logprobs(said),
            finish_reason=said.finish_reason or "stop",
            stop_reason=said.stop_reason,
            token_ids=said.ids if self.body.return_token_ids else None,
        )

    # The streamed answer

    def _chunks(self, index: int, events: Iterable[Event]) -> list[ChatChunkChoice]:
        """Events as deltas. The first chunk of an answer has the role, the last the reason for its end."""
        said = self._said[index]
        deltas = [_delta(event) for event in events]
        if not said.has_begun:
            said.has_begun = True
            deltas.insert(0, ChatDelta(role="assistant", content=""))
        if said.finish_reason is not None:
            deltas.append(ChatDelta())
        choices = [ChatChunkChoice(index=index, delta=delta, finish_reason=None) for delta in deltas]
        if choices:
            self._add_tokens(said, next((c for c in choices if c.delta.role is None), choices[-1]))
        if said.finish_reason is not None:
            choices[-1].finish_reason = said.finish_reason
            choices[-1].stop_reason = said.stop_reason
        return choices

    def _add_tokens(self, said: Said, choice: ChatChunkChoice) -> None:
        """Log-probabilities and token ids go with the first chunk that shows something of them."""
        if self.body.logprobs:
            choice.logprobs = self._logprobs(said)
        if self.body.return_token_ids:
            choice.token_ids = said.ids
        said.entries, said.ids = [], []

    def _chunk(self, choices: list[ChatChunkChoice], wanted: UsageWanted, *, with_usage: bool) -> bytes:
        """One event, without the fields that say nothing. What is asked of the prompt goes with the first."""
        chunk = ChatChunk(
            id=self.heading.id,
            object="chat.completion.chunk",
            created=self.heading.created,
            model=self.heading.model,
            choices=choices,
        )
        if not self._has_begun:
            self._has_begun = True
            if self.body.prompt_logprobs is not None:
                chunk.prompt_logprobs = self._prompt_logprobs()
            if self.body.return_token_ids:
                chunk.prompt_token_ids = self.generation.prompt_token_ids.tolist()
        if wanted.at_end:
            chunk.usage = usage_of([self.generation]) if with_usage else None
        return sse(chunk, exclude_unset=True)

    def _prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        found = self.generation.prompt_logprobs
        return None if found is None else prompt_logprobs(found)

    def _logprobs(self, said: Said) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(said.entries, said.ids, self.body.top_logprobs or 0, self._bytes)


def _delta(event: Event) -> ChatDelta:
    match event:
        case TextDelta(text):
            return ChatDelta(content=text)
        case CallBegan(index, call_id, name):
            function = FunctionDelta(name=name, arguments="")
            return ChatDelta(tool_calls=[ToolCallDelta(index=index, id=call_id, type="function", function=function)])
        case ArgumentsDelta(index, text):
            return ChatDelta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])

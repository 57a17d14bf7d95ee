"""The HTTP application: which path does what."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware

from kvikk.chat import Conversation, ToolUse
from kvikk.errors import InvalidRequest
from kvikk.server.counting import CountAnswers
from kvikk.server.openai.chat import chat, render_chat
from kvikk.server.openai.completions import complete
from kvikk.server.openai.problems import COMMON, install
from kvikk.server.openai.requests import ChatBody, CompletionBody, DetokenizeBody, PinBody, TokenizeBody
from kvikk.server.openai.responses import (
    CacheCounters,
    CacheReset,
    CacheState,
    ChatCompletion,
    Completion,
    Detokenized,
    Health,
    Model,
    ModelList,
    PinState,
    ProblemBody,
    Tokenized,
    Version,
)
from kvikk.server.page import page_router
from kvikk.server.security import BodyLimit, Guard, Keys
from kvikk.server.service import Service
from kvikk.server.streaming import unless_gone
from kvikk.version import __version__

STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


def build_app(service: Service, keys: Keys) -> FastAPI:
    """The application for one served model.

    Args:
        service: what the endpoints work with; `app.state.service`.
        keys: who may ask.
    """
    app = FastAPI(
        title="kvikk",
        version=__version__,
        description="OpenAI's API over an engine whose subject is its KV cache.",
        responses=COMMON,
    )
    app.state.service = service
    install(app)
    app.include_router(_openai_router())
    app.include_router(_text_router())
    app.include_router(_cache_router())
    app.include_router(_server_router())
    app.include_router(
        page_router(
            service.state,
            _guarded_before,
            recent=service.metrics.recent,
            needs_key=keys.are_needed or keys.admin is not None,
            stopping=service.draining,
        )
    )
    http = service.config.http
    app.add_middleware(BodyLimit, limit=http.max_body_bytes)
    app.add_middleware(Guard, keys=keys)
    if http.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.strip() for origin in http.allowed_origins.split(",") if origin.strip()],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_middleware(CountAnswers, metrics=service.metrics)
    return app


async def _guarded_before() -> None:
    """Whoever comes this far has passed `security.Guard`."""


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_service)]


def _salt(request: Request, wanted: str | None) -> str:
    """The salt of a request's prefixes: its key's, and the one that it names."""
    own: str = request.state.salt
    return f"{own}:{wanted}" if wanted else own


def _openai_router() -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.get("/models")
    async def models(service: Served) -> ModelList:
        """The names under which the model is served."""
        return ModelList(data=[_model(service, name) for name in service.names])

    @router.get("/models/{name:path}")
    async def model(service: Served, name: str) -> Model:
        """One of them."""
        return _model(service, service.model_name(name))

    @router.post("/completions", response_model=Completion, responses={200: {"content": STREAM}})
    async def completions(request: Request, service: Served, body: CompletionBody) -> Response:
        """Texts that go on from prompts; with `stream`, server-sent events."""
        return await unless_gone(request.receive, complete(service, body, _salt(request, body.cache_salt)))

    @router.post("/chat/completions", response_model=ChatCompletion, responses={200: {"content": STREAM}})
    async def chat_completions(request: Request, service: Served, body: ChatBody) -> Response:
        """The next message of a conversation; with `stream`, server-sent events."""
        return await unless_gone(request.receive, chat(service, body, _salt(request, body.cache_salt)))

    return router


def _model(service: Service, name: str) -> Model:
    return Model(id=name, created=service.created, root=service.ready.model, max_model_len=service.ready.max_model_len)


def _text_router() -> APIRouter:
    router = APIRouter(tags=["text"])

    @router.post("/tokenize")
    async def tokenize(service: Served, body: TokenizeBody) -> Tokenized:
        """The tokens of a text, or of what the chat template makes of messages."""
        service.model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give one of prompt and messages", param="prompt")
        if body.prompt is not None:
            ids = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            conversation = Conversation(
                messages=body.messages or [],
                tools=ToolUse.read(body.tools).tools,
                add_generation_prompt=body.add_generation_prompt,
            )
            ids = (await render_chat(service, conversation)).token_ids
        names = [str(name) for name in service.tokenizer.convert_ids_to_tokens(ids)] if body.return_token_strs else None
        return Tokenized(count=len(ids), max_model_len=service.ready.max_model_len, tokens=ids, token_strs=names)

    @router.post("/detokenize")
    async def detokenize(service: Served, body: DetokenizeBody) -> Detokenized:
        """The text of tokens."""
        service.model_name(body.model)
        limit = service.ready.vocabulary
        for token in body.tokens:
            if token >= limit:
                raise InvalidRequest(f"token id {token} is outside the vocabulary of {limit}", param="tokens")
        return Detokenized(prompt=await service.decode(body.tokens))

    return router


def _cache_router() -> APIRouter:
    router = APIRouter(prefix="/v1/cache", tags=["KV memory"])

    @router.get("")
    async def cache(service: Served) -> CacheState:
        """What is held, cached, free and pinned."""
        snapshot = await service.client.snapshot()
        stats = msgspec.structs.asdict(snapshot.stats)  # the models take what they name of it
        return CacheState(
            block_size=service.ready.block_size,
            block_bytes=service.ready.block_bytes,
            pins=[PinState(name=pin.name, blocks=pin.blocks) for pin in snapshot.pins],
            counters=CacheCounters(**stats),
            **stats,
        )

    @router.post("/reset")
    async def reset(service: Served) -> CacheReset:
        """Forget all cached prefixes; running requests and pins keep their blocks."""
        return CacheReset(forgotten_blocks=await service.client.call("reset", int))

    @router.post("/pins", responses={409: {"model": ProblemBody, "description": "Over the limit for pins."}})
    async def pin(request: Request, service: Served, body: PinBody) -> PinState:
        """Keep what is cached of a prefix, whole blocks only, until it is unpinned."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give one of prompt and messages", param="prompt")
        if body.messages is not None:
            conversation = Conversation(messages=body.messages, add_generation_prompt=False)
            ids = (await render_chat(service, conversation)).token_ids
        else:
            ids = await service.encode(body.prompt) if isinstance(body.prompt, str) else list(body.prompt or [])
        salt = _salt(request, body.cache_salt)
        blocks = await service.client.call("pin", int, name=body.name, token_ids=ids, salt=salt)
        return PinState(name=body.name, blocks=blocks)

    @router.delete("/pins/{name}")
    async def unpin(service: Served, name: str) -> PinState:
        """Let a pin go."""
        return PinState(name=name, blocks=await service.client.call("unpin", int, name=name))

    return router


def _server_router() -> APIRouter:
    router = APIRouter(tags=["server"])

    @router.get("/health")
    async def health(service: Served) -> Health:
        """200 while requests are taken."""
        service.check_alive()
        return Health(status="ok")

    @router.get("/version")
    async def version() -> Version:
        """Of kvikk."""
        return Version(version=__version__)

    @router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics(request: Request, service: Served) -> Response:
        """For Prometheus."""
        content, content_type = service.metrics.exposition(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": content_type})

    return router

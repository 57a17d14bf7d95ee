"""The server that is asked: its address, its model, and what each request carries."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import aiohttp

from kvikk.bench.datasets import Request
from kvikk.configuration import secret
from kvikk.errors import ConfigError, KvikkError

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
FIXED = frozenset({"model", "prompt", "messages", "stream", "n"})
"""What `--extra-body` must leave alone: the figures would be about something else."""
MODELS_TIMEOUT_S = 30.0


class ServerUnreachable(KvikkError):
    """No server answers at the address, or none that speaks OpenAI's API."""

    code = "server_unreachable"


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The server that is asked.

    Args:
        backend: openai asks for completions, openai-chat for chat completions with the prompt as the user's message.
        base_url: of the server, https://host:port, instead of host and port.
        host: where the server listens.
        port: where the server listens.
        endpoint: path, where it is not OpenAI's for the backend.
        model: name of the model; the first that the server's /v1/models lists when not given.
        served_model_name: name that requests carry, where it is not that of the model.
        tokenizer: folder or hub id of the tokenizer, where it is not that of the model.
        api_key: sent as `Authorization: Bearer ...`; OPENAI_API_KEY of the environment when not given.
        extra_body: JSON object whose fields every request carries.
        allow_missing_done: take a stream that ends with its finish reason for complete without `[DONE]`.
        client_timeout_s: a request that takes longer has failed.
    """

    backend: Literal["openai", "openai-chat"] = "openai"
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str | None = None
    model: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    api_key: str | None = secret()
    extra_body: str | None = None
    allow_missing_done: bool = False
    client_timeout_s: float = 21600.0

    def __post_init__(self) -> None:
        if not 0 < self.port < 2**16:
            raise ConfigError(f"--port {self.port} is no port: it must lie between 1 and 65535")
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {self.base_url} must start with http:// or https://")
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise ConfigError(f"--endpoint {self.endpoint} must start with /")
        if not 0 < self.client_timeout_s < 10**7:
            raise ConfigError(
                f"--client-timeout-s {self.client_timeout_s} must be above 0 and below 10,000,000 seconds"
            )
        self.extra_fields()

    @property
    def root(self) -> str:
        """The server's address, without the path of any endpoint."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/").removesuffix("/v1")

    @property
    def path(self) -> str:
        """The endpoint that is asked."""
        return self.endpoint or ENDPOINTS[self.backend]

    def extra_fields(self) -> dict[str, Any]:
        """`extra_body` as an object.

        Raises:
            ConfigError: it is none, or sets what the benchmark itself sets.
        """
        if self.extra_body is None:
            return {}
        try:
            fields = json.loads(self.extra_body)
        except ValueError as error:
            raise ConfigError(f"--extra-body {self.extra_body!r} is no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"--extra-body {self.extra_body!r} must be a JSON object")
        if fields.keys() & FIXED:
            raise ConfigError(f"--extra-body sets {', '.join(sorted(fields.keys() & FIXED))}: the benchmark sets that")
        return fields


@dataclass(frozen=True, kw_only=True)
class RequestConfig:
    """How the server shall sample. What is not given is not sent.

    Args:
        temperature: 0 takes the likeliest token, so that texts can be compared.
        top_p: sample among the likeliest tokens that hold this mass.
        top_k: sample among the k likeliest tokens.
        min_p: leave out tokens less likely than this share of the likeliest.
        frequency_penalty: for each time that a token came before.
        presence_penalty: for tokens that came before.
        repetition_penalty: factor on tokens that came before.
        ignore_eos: answers end at the length asked for only; not given: for made-up prompts.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None

    def fields(self) -> dict[str, Any]:
        """What requests carry of it."""
        return {name: value for name, value in asdict(self).items() if value is not None and value is not False}


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where requests go, and all that they carry besides prompt and length.

    Args:
        url: of the endpoint.
        is_chat: whether prompts go as messages.
        model: that requests name.
        headers: of each request.
        fields: of each request's body.
        allow_missing_done: see `TargetConfig`.
    """

    url: str
    is_chat: bool
    model: str
    headers: Mapping[str, str] = field(repr=False)
    fields: Mapping[str, Any]
    allow_missing_done: bool = False

    def body(self, request: Request) -> bytes:
        """The JSON of one request."""
        if self.is_chat:
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": request.prompt}]}
            asked["max_completion_tokens"] = request.output_tokens
        else:
            asked = {"prompt": request.prompt, "max_tokens": request.output_tokens}
        asked |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**asked, **self.fields}).encode()


def parse_headers(texts: Sequence[str]) -> dict[str, str]:
    """Headers from texts of the form `NAME=VALUE`.

    Raises:
        ConfigError: one is not of that form.
    """
    headers = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--header {text!r} is not of the form NAME=VALUE")
        headers[name.strip()] = value.strip()
    return headers


def request_headers(api_key: str | None, extra: Mapping[str, str]) -> dict[str, str]:
    """The headers of each request; one that is given by name wins."""
    key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return {"Content-Type": "application/json", **key, **extra}


async def served_models(session: aiohttp.ClientSession, root: str, headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """What the server's /v1/models lists; nothing where it has none.

    Raises:
        ServerUnreachable: nobody answers.
    """
    url = f"{root}/v1/models"
    timeout = aiohttp.ClientTimeout(total=MODELS_TIMEOUT_S)
    try:
        async with session.get(url, headers=headers, timeout=timeout) as response:
            if response.status in (401, 403):
                raise ServerUnreachable(f"{root} answers {response.status}: give the server's key with --api-key")
            listed = await response.json(content_type=None) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ServerUnreachable(
            f"no OpenAI server answers at {url} ({_reason(error)}): start one with `kvikk serve`, or name another with "
            "--base-url or --host and --port"
        ) from error
    models = listed.get("data") if isinstance(listed, dict) else None
    return [model for model in models or () if isinstance(model, dict) and model.get("id")]


def _reason(error: Exception) -> str:
    """The short form of an error: `Connection refused`, without the addresses that were tried."""
    if isinstance(error, OSError) and error.errno:
        # Below zero are those of the resolver, which know their own text only.
        return os.strerror(error.errno) if error.errno > 0 else error.strerror or str(error)
    return str(error) or type(error).__name__

"""What every endpoint works with: the engine's client, the model's text side, names, limits, metrics."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from kvikk.chat import ToolForm, check_template, form_for
from kvikk.engine import SamplingParams, recommended_sampling
from kvikk.errors import KvikkError
from kvikk.llm.text import encode
from kvikk.models import TextSide, load_text_side
from kvikk.server.client import EngineClient
from kvikk.server.config import ServeConfig
from kvikk.server.errors import Draining, EngineDead, ModelNotFound
from kvikk.server.generation import Generation
from kvikk.server.messages import Ready, Snapshot
from kvikk.server.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")
LONG_TEXT = 8192
"""Characters from which a text is tokenised in a thread, so that other requests' tokens are not kept waiting."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """What is settled of a served model before its engine runs: all that may be wrong with it is found first.

    Args:
        text_side: tokenizer and defaults.
        names: that requests may call it by; answers have the first where none was given.
        chat_template: overrides the model's own.
        tool_form: of its tool calls.
    """

    text_side: TextSide
    names: list[str]
    chat_template: str | None
    tool_form: ToolForm

    @classmethod
    def load(cls, config: ServeConfig, chat_template: str | None) -> Front:
        """For the model that the config names.

        Raises:
            ConfigError: the template is none, or there is no such form of tool calls.
            ModelError: the model's files cannot be found or read.
        """
        chosen = config.engine.model
        text_side = load_text_side(chosen.model, revision=chosen.revision, tokenizer=chosen.tokenizer)
        if chat_template is not None:
            check_template(chat_template, text_side.tokenizer)
        return cls(
            text_side=text_side,
            names=served_names(config, text_side.name),
            chat_template=chat_template,
            tool_form=form_for(config.serving.tool_call_parser, text_side.tokenizer, chat_template),
        )


class Service:
    """One model, served.

    Args:
        config: all of it.
        client: of the running engine.
        front: of the engine's model.
        metrics: counts what happens.
    """

    def __init__(self, config: ServeConfig, client: EngineClient, front: Front, metrics: Metrics) -> None:
        self.config = config
        self.client = client
        self.metrics = metrics
        self.chat_template = front.chat_template
        self.tokenizer = front.text_side.tokenizer
        self.tool_form = front.tool_form
        self.generation_defaults = front.text_side.generation_defaults
        self.names = front.names
        self.created = int(time.time())
        self.draining = asyncio.Event()
        self._started_s = time.monotonic()
        self._worker_tokenizer = copy.deepcopy(self.tokenizer)  # tokenizers are not safe to share with a thread
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    @property
    def ready(self) -> Ready:
        """What the engine can hold."""
        return self.client.ready

    def model_name(self, asked: str | None) -> str:
        """The name to answer under.

        Raises:
            ModelNotFound: no such model here.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise ModelNotFound(f"the model {asked!r} is not served here: use {' or '.join(map(repr, self.names))}")
        return asked

    def check_alive(self) -> None:
        """Raises EngineDead or Draining where no new request can be taken."""
        if self.client.dead is not None:
            raise self.client.dead
        if self.draining.is_set():
            raise Draining("the server is going down: it finishes what runs and takes no new requests")

    @property
    def default_sampling(self) -> dict[str, Any]:
        """What the model's authors recommend, by `SamplingParams`' names."""
        return recommended_sampling(self.generation_defaults)

    def drain(self) -> None:
        """Take no new requests; those that are not done within --drain-timeout-s fail."""
        if self.draining.is_set():
            return
        self.draining.set()
        limit_s = self.config.serving.drain_timeout_s
        logger.info("going down: no new requests; %d that run have %g s", self.client.active, limit_s)
        late = Draining(f"the server went down, and this request was not done within --drain-timeout-s {limit_s:g}")
        asyncio.get_running_loop().call_later(limit_s, self.client.fail_all, late)

    async def with_tokenizer(self, work: Callable[[Any], T], characters: int) -> T:
        """Do something with a tokenizer, in a thread when `characters` are many."""
        if characters < LONG_TEXT:
            return work(self.tokenizer)
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, self._worker_tokenizer)

    async def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """The tokens of a text.

        Raises:
            InvalidRequest: it is not valid Unicode.
        """
        return await self.with_tokenizer(
            lambda tokenizer: encode(tokenizer, text, add_special_tokens=add_special_tokens, param=param), len(text)
        )

    async def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones included."""
        return await self.with_tokenizer(lambda tokenizer: str(tokenizer.decode(token_ids)), len(token_ids))

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, salt: str, arrived_s: float
    ) -> Generation:
        """Send a prompt to the engine; returns when it has taken it.

        Args:
            prompt_token_ids: the prompt.
            params: how to sample.
            salt: of its prefixes.
            arrived_s: when its request came, by `time.monotonic`.

        Raises:
            KvikkError: refused, dead, or going down.
        """
        timeline = self.metrics.begin(arrived_s, prompt_tokens=len(prompt_token_ids), texts=params.n)
        try:
            self.check_alive()
            submitted = await self.client.submit(prompt_token_ids, params, salt=salt)
        except KvikkError as error:
            self.metrics.reject(error.code)
            raise
        return Generation(
            submitted,
            prompt_token_ids,
            params,
            self.tokenizer,
            timeline,
            self.config.serving.request_timeout_s,
        )

    async def state(self) -> tuple[Ready, Snapshot, float, str | None]:
        """For the operator's page: capacity, memory and requests, seconds up, and why the engine is dead if it is."""
        uptime_s = time.monotonic() - self._started_s
        try:
            return self.ready, await self.client.snapshot(), uptime_s, None
        except EngineDead as error:
            return self.ready, Snapshot(stats=self.client.stats, pins=[], requests=[]), uptime_s, str(error)

    def close(self) -> None:
        """Let the tokenising thread end."""
        self._worker.shutdown(wait=False, cancel_futures=True)


def served_names(config: ServeConfig, model: str) -> list[str]:
    """The names under which the model is served: those of `--served-model-name`, or its own."""
    given = [name.strip() for name in (config.serving.served_model_name or "").split(",") if name.strip()]
    return given or [model]

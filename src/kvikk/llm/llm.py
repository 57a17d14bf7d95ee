"""The offline front: prompts as text in, text out, over an engine in this process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from kvikk.chat import Conversation, render
from kvikk.configuration import build
from kvikk.engine import EngineConfig, SamplingParams, load_engine, recommended_sampling
from kvikk.errors import InvalidRequest, KvikkError
from kvikk.llm.outputs import RequestOutput, StreamDelta
from kvikk.llm.text import encode
from kvikk.llm.writer import RequestWriter

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, or `{"prompt": ...}` or `{"prompt_token_ids": [...]}` as in vLLM."""
Message = Mapping[str, Any]
"""A chat message: `{"role": "user", "content": "..."}`."""


class _Encoded(NamedTuple):
    text: str | None
    token_ids: list[int]


class LLM:
    """A model and its KV memory, to be asked from one thread.

    While it lives, garbage collections leave out all objects that are older than it, since going through them would
    stop the host for many steps. Cycles among these are freed once it is gone, and its own memory at once.

    Args:
        model: local folder, GGUF file, or hub id; the bundled smollm2 when none is named.
        options: the command line's options with underscores: `LLM(kv_memory="4GiB", max_model_len=4096)`.

    Raises:
        ConfigError: an unknown option, or one that cannot be honoured.
        ModelError: the model cannot be loaded, or is not supported.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = build(EngineConfig, {"model": model, **options})
        self.loaded, self.engine, self.capacity = load_engine(self.config)
        self._writers: dict[str, RequestWriter] = {}

    def close(self) -> None:
        """End the prefix tier, after what is cached has been written to its store. Nothing is asked afterwards."""
        self.engine.close()

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self.loaded.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config suggests."""
        return SamplingParams(**recommended_sampling(self.loaded.generation_defaults))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts, batched; results in their order.

        Args:
            prompts: one, or a list.
            sampling_params: for all, or one for each; the model's defaults when not given.
            use_tqdm: show a progress bar on stderr.

        Raises:
            InvalidRequest: one of the prompts cannot be served; none was started.
        """
        encoded = self._encode(prompts)
        results: dict[int, RequestOutput] = {}
        with tqdm(total=len(encoded), unit="prompt", disable=not use_tqdm) as bar:
            for delta in self._stream(encoded, sampling_params):
                if delta.output is not None:
                    results[delta.prompt_index] = delta.output
                    bar.update()
        return [results[index] for index in sorted(results)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamDelta]:
        """Answer all prompts, batched, giving out text as it comes. Closing the iterator aborts what is unfinished.

        Raises:
            InvalidRequest: at the first `next`, when one of the prompts cannot be served; none was started.
        """
        return self._stream(self._encode(prompts), sampling_params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template."""
        return self.generate(self.render(messages), sampling_params, use_tqdm=use_tqdm)

    def render(self, messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Prompt]:
        """The prompts that the chat template makes of one conversation or several.

        Raises:
            InvalidRequest: the model has no chat template, or its template refuses the messages.
        """
        given: Any = messages  # from outside: its type is checked here
        if not isinstance(given, list | tuple) or not given:
            raise InvalidRequest(f"messages are {given!r}: a conversation is a list of at least one message")
        conversations = [given] if isinstance(given[0], Mapping) else given
        prompts: list[Prompt] = []
        for conversation in conversations:
            text, ids = render(Conversation(messages=conversation), self.loaded.tokenizer)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return prompts

    # Encoding

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[_Encoded]:
        given: Any = prompts  # from outside: its type is checked here
        if isinstance(given, str | Mapping):
            return [self._encode_one(given)]
        if not isinstance(given, Sequence):
            raise InvalidRequest(
                f"prompts are {type(given).__name__}: give a text, a list of token ids, or a list of these"
            )
        is_one = len(given) > 0 and hasattr(given[0], "__index__")
        return [self._encode_one(prompt) for prompt in ([given] if is_one else given)]

    def _encode_one(self, prompt: Prompt) -> _Encoded:
        text: object = None
        ids: object = prompt
        if isinstance(prompt, Mapping):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise InvalidRequest(f"a prompt has the keys {sorted(prompt)}: give prompt or prompt_token_ids")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if text is not None and not isinstance(text, str):
            raise InvalidRequest(f"a prompt is {type(text).__name__}: it must be text")
        if ids is None and text is not None:
            ids = encode(self.loaded.tokenizer, text)
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise InvalidRequest(f"a prompt is {type(ids).__name__}: it must be text or a list of token ids")
        return _Encoded(text, list(ids))

    # Running

    def _stream(
        self, encoded: list[_Encoded], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Iterator[StreamDelta]:
        """Start all prompts at the first `next`, then hand out their deltas as the reader asks for them."""
        params = self._params_for(len(encoded), sampling_params)
        deltas: deque[StreamDelta] = deque()
        unfinished: dict[int, RequestWriter] = {}
        try:
            for index, (prompt, choice) in enumerate(zip(encoded, params, strict=True)):
                self._start(prompt, choice, index, len(encoded), deltas, unfinished)
            encoded.clear()  # the engine has them, in arrays: garbage collections would walk these token by token
            while unfinished:
                self._step()
                if not deltas:
                    for writer in unfinished.values():
                        if not self.engine.is_active(writer.request.id):
                            writer.abandon()
                while deltas:
                    delta = deltas.popleft()
                    if delta.output is not None:
                        self._writers.pop(unfinished.pop(delta.prompt_index).request.id)
                    yield delta
        finally:
            for writer in unfinished.values():
                self.engine.abort(writer.request.id)
                self._writers.pop(writer.request.id, None)

    def _params_for(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, list | tuple):
            raise InvalidRequest(f"sampling_params is {type(params).__name__}: it must be SamplingParams, or a list")
        if len(params) != count:
            raise InvalidRequest(f"{count} prompts came with {len(params)} sampling_params: give one, or one for each")
        return params

    def _start(
        self,
        prompt: _Encoded,
        params: SamplingParams,
        index: int,
        count: int,
        deltas: deque[StreamDelta],
        unfinished: dict[int, RequestWriter],
    ) -> None:
        """Queue one prompt of a call, and note its writer where it will be found."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params is {type(params).__name__}: it must be SamplingParams")
        try:
            request = self.engine.add(prompt.token_ids, params)
        except KvikkError as error:
            if count == 1:
                raise
            raise type(error)(f"prompt {index} of {count}: {error}") from error
        try:
            writer = RequestWriter(
                request,
                prompt=prompt.text,
                prompt_index=index,
                tokenizer=self.loaded.tokenizer,
                geometry=self.capacity.geometry,
                deltas=deltas,
            )
        except BaseException:
            self.engine.abort(request.id)
            raise
        self._writers[request.id] = unfinished[index] = writer

    def _step(self) -> None:
        """One step for everyone: several readers may be interleaved, each finds its own deltas."""
        for out in self.engine.step():
            writer = self._writers.get(out.request.id)  # None: a request that was added to the engine itself
            if writer is not None and writer.take(out):
                self.engine.abort(out.request.id, out.choice)

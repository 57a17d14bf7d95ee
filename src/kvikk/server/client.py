"""The front's end of the engine process: starts it, sends it requests, hands out what comes back, sees it die."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import tempfile
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from kvikk.engine import EngineConfig, SamplingParams
from kvikk.errors import KvikkError
from kvikk.server.engine_process import Addresses, run_engine
from kvikk.server.errors import EngineDead, EngineError
from kvikk.server.messages import (
    Abort,
    Add,
    Added,
    Call,
    Command,
    Dying,
    Event,
    Failure,
    Outputs,
    Ready,
    Refused,
    Reply,
    Shutdown,
    Snapshot,
    Stats,
    TokenOutput,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
STOP_TIMEOUT_S = 5.0
LAST_WORDS_S = 0.2
"""How long after the process's end its last events are still read."""


class Submitted:
    """A request that the engine took: an asynchronous iterator over batches of what it gives, oldest first.

    It ends with the last text's end, and is `close`d by whoever made it, which aborts what is unfinished.
    """

    def __init__(self, request_id: str, texts: int, client: EngineClient) -> None:
        self.id = request_id
        self._unfinished = set(range(texts))
        self._client = client
        self._outputs: deque[TokenOutput] = deque()
        self._wake = asyncio.Event()
        self._error: KvikkError | None = None
        self._is_taken = False

    @property
    def is_finished(self) -> bool:
        """Whether all texts have ended and been handed out."""
        return not self._unfinished

    async def taken(self) -> None:
        """Wait until the engine has taken the request.

        Raises:
            EngineError: it has refused it.
            EngineDead: it has ended.
        """
        while not self._is_taken:
            await self._news()

    def __aiter__(self) -> AsyncIterator[list[TokenOutput]]:
        return self

    async def __anext__(self) -> list[TokenOutput]:
        if not self._unfinished:
            raise StopAsyncIteration
        while not self._outputs:
            await self._news()
        batch = [out for out in self._outputs if out.choice in self._unfinished]
        self._outputs.clear()
        for out in batch:
            if out.finish_reason is not None:
                self._unfinished.discard(out.choice)
        return batch

    def abort(self, choice: int) -> None:
        """Give up one text: nothing more comes of it."""
        self._unfinished.discard(choice)
        self._client.send(Abort(id=self.id, choice=choice))

    def close(self) -> None:
        """Abort what is unfinished and forget the request."""
        self._client.forget(self)

    # Called by the client

    def take(self) -> None:
        """The engine took the request."""
        self._is_taken = True
        self._wake.set()

    def push(self, out: TokenOutput) -> None:
        """Something new came."""
        self._outputs.append(out)
        self._wake.set()

    def fail(self, error: KvikkError) -> None:
        """Nothing more will come."""
        self._error = error
        self._wake.set()

    async def _news(self) -> None:
        """Wait for something new; at once when something came since the last wait."""
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None and not self._outputs:
            self._wake.set()  # for whoever asks again
            raise self._error


class EngineClient:
    """One engine process. Use `start`; everything runs in the event loop that called it.

    Attributes:
        ready: what the engine said when it began.
        stats: the engine as of its latest step.
        dead: why it ended, once it has.
        on_stats: called with each new `stats`.
    """

    ready: Ready

    def __init__(self) -> None:
        self.stats = Stats()
        self.dead: EngineDead | None = None
        self.died = asyncio.Event()
        self.on_stats: Callable[[Stats], None] = lambda stats: None
        self._requests: dict[str, Submitted] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._is_stopping = False
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, config: EngineConfig, *, max_waiting: int) -> EngineClient:
        """Spawn the engine and wait until it can serve.

        Raises:
            EngineError: it could not start, and said why.
            EngineDead: it ended without a word.
        """
        client = cls()
        client._spawn(config, max_waiting)
        try:
            client.ready = await client._ready
        except BaseException:
            await client.stop()
            raise
        return client

    @property
    def active(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._requests)

    async def submit(self, prompt_token_ids: list[int], params: SamplingParams, *, salt: str = "") -> Submitted:
        """Send a request; returns when the engine has taken it.

        Raises:
            EngineError: refused, with the engine's reason.
            EngineDead: there is no engine any more.
        """
        if self.dead is not None:
            raise self.dead
        submitted = Submitted(uuid.uuid4().hex, params.n, self)
        self._requests[submitted.id] = submitted
        self.send(Add(id=submitted.id, prompt_token_ids=prompt_token_ids, params=params, salt=salt))
        try:
            await submitted.taken()
        except BaseException:
            submitted.close()
            raise
        return submitted

    async def call(self, method: str, answer: type[T], **arguments: Any) -> T:
        """Call one of `engine_process.CALLS`; its answer is read as `answer`.

        Raises:
            EngineError: the method failed.
            EngineDead: there is no engine any more.
        """
        if self.dead is not None:
            raise self.dead
        number = next(self._numbers)
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        self.send(Call(number=number, method=method, arguments=arguments))
        try:
            return msgspec.convert(await future, answer)
        finally:
            self._replies.pop(number, None)

    async def snapshot(self) -> Snapshot:
        """The engine's memory and requests now."""
        return await self.call("snapshot", Snapshot)

    def send(self, command: Command) -> None:
        """Send a command; to a dead engine, nothing."""
        if self.dead is None:
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    def forget(self, submitted: Submitted) -> None:
        """Nobody waits for this request any more: abort it if it runs."""
        if self._requests.pop(submitted.id, None) is not None and not submitted.is_finished:
            self.send(Abort(id=submitted.id))

    def fail_all(self, error: KvikkError) -> None:
        """Give up all requests; whoever waits for one is told."""
        for submitted in list(self._requests.values()):
            submitted.fail(error)
            self.forget(submitted)

    async def stop(self) -> None:
        """End the process: politely, then not."""
        self._is_stopping = True
        self.send(Shutdown())
        await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
        if self._process.is_alive():
            logger.warning("the engine did not end within %g s: killed", STOP_TIMEOUT_S)
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._reader.cancel()
        self._watch.cancel()
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    # The process

    def _spawn(self, config: EngineConfig, max_waiting: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvikk-")  # mode 0700: no one else can connect
        addresses = Addresses(
            commands=f"ipc://{Path(self._folder.name) / 'commands'}",
            events=f"ipc://{Path(self._folder.name) / 'events'}",
        )
        self._context = zmq.asyncio.Context(io_threads=1)
        self._commands = zmq.Context(self._context).socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        for socket, address in ((self._commands, addresses.commands), (self._events, addresses.events)):
            socket.set_hwm(0)
            socket.bind(address)
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine,
            args=(config, addresses, max_waiting, logging.getLogger().level),
            name="kvikk-engine",
            daemon=True,
        )
        self._process.start()
        self._reader = asyncio.create_task(self._read(), name="engine events")
        self._watch = asyncio.create_task(self._watch_process(), name="engine watch")

    async def _watch_process(self) -> None:
        """See the process end, however it does."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        await asyncio.sleep(LAST_WORDS_S)
        if not self._is_stopping:
            self._process.join(0)
            code = self._process.exitcode
            how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
            self._die(f"the engine process {how}")

    async def _read(self) -> None:
        while True:
            try:
                self._handle(self._decoder.decode(await self._events.recv()))
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.exception("an event of the engine cannot be handled")
                self._die(f"the front cannot follow the engine: {error!r}")

    def _handle(self, event: Event) -> None:
        match event:
            case Outputs():
                self._deliver(event)
            case Added():
                if (submitted := self._requests.get(event.id)) is not None:
                    submitted.take()
            case Refused():
                if (submitted := self._requests.pop(event.id, None)) is not None:
                    submitted.fail(EngineError(event.failure))
            case Reply():
                self._answer(event)
            case Ready():
                self._ready.set_result(event)
            case Dying():
                self._die(event.failure.message, event.failure)

    def _deliver(self, event: Outputs) -> None:
        self.stats = event.stats
        for out in event.outputs:
            submitted = self._requests.get(out.id)
            if submitted is not None:  # None: given up here, and still on its way there
                submitted.push(out)
        self.on_stats(event.stats)

    def _answer(self, reply: Reply) -> None:
        future = self._replies.get(reply.number)
        if future is None or future.done():
            return
        if reply.failure is None:
            future.set_result(reply.value)
        else:
            future.set_exception(EngineError(reply.failure))

    def _die(self, why: str, failure: Failure | None = None) -> None:
        """The engine has ended: whoever waits for it is told."""
        if self.dead is not None:
            return
        self.dead = EngineDead(f"the engine is dead: {why}")
        logger.error("%s; %d requests fail", self.dead, len(self._requests))
        if not self._ready.done():
            self._ready.set_exception(self.dead if failure is None else EngineError(failure))
        for submitted in self._requests.values():
            submitted.fail(self.dead)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(self.dead)
        self.died.set()

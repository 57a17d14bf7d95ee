"""The engine's process: takes commands, steps the engine, sends what each step gave."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from kvikk.engine import Capacity, Engine, EngineConfig, EngineOutput, TierStats, load_engine
from kvikk.errors import InvalidRequest, KvikkError, QueueFull
from kvikk.logs import set_up_logging
from kvikk.server.errors import PinNotFound
from kvikk.server.messages import (
    Abort,
    Add,
    Added,
    Call,
    Command,
    Dying,
    Event,
    Failure,
    HostKV,
    Outputs,
    Pin,
    Ready,
    Refused,
    Reply,
    RequestState,
    Shutdown,
    Snapshot,
    Start,
    Stats,
    TokenOutput,
)

logger = logging.getLogger(__name__)

PARENT_CHECK_S = 1.0
GATHER_S, GATHER_AT_MOST_S = 0.001, 0.01
"""An idle engine begins when this long nothing has come after a request, and this long after it at the latest."""
EVICTION_BURST_BLOCKS = 64
"""Evictions between two steps from which a log line is written."""


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the front listens: for commands it sends, and for events it receives."""

    commands: str
    events: str


def failure_of(error: BaseException) -> Failure:
    """An error as it crosses the border between the processes."""
    if isinstance(error, KvikkError):
        return Failure(message=str(error), code=error.code, http_status=error.http_status, param=error.param)
    return Failure(message=f"{type(error).__name__}: {error}", code=KvikkError.code, http_status=KvikkError.http_status)


def run_engine(config: EngineConfig, addresses: Addresses, max_waiting: int, log_level: int) -> None:
    """Load the model, then serve commands until `Shutdown` or the parent's end. The target of a spawned process.

    Signals that end a terminal's process group are the parent's to handle: it drains, then says `Shutdown`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_up_logging(log_level, "kvikk engine")
    link = Link(addresses)
    try:
        loaded, engine, capacity = load_engine(config)
        link.send(_ready(loaded.model.spec, engine, capacity, config))
        EngineLoop(engine, link, max_waiting=max_waiting).run()
        engine.close()
    except BaseException as error:
        if not isinstance(error, KvikkError):
            logger.exception("the engine cannot go on")
        link.send(Dying(failure_of(error)))
        link.close()
        raise SystemExit(1) from None
    link.close()


class Link:
    """The engine's end of the two sockets."""

    def __init__(self, addresses: Addresses) -> None:
        self._context = zmq.Context(io_threads=1)
        self._commands = self._context.socket(zmq.PULL)
        self._events = self._context.socket(zmq.PUSH)
        for socket, address in ((self._commands, addresses.commands), (self._events, addresses.events)):
            socket.set_hwm(0)
            socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def send(self, event: Event) -> None:
        """Queue an event for the front."""
        self._events.send(self._encoder.encode(event))

    def receive(self, timeout_s: float) -> Iterator[Command]:
        """The commands that are there; waits up to `timeout_s` for the first."""
        if not self._poller.poll(int(timeout_s * 1000)):
            return
        while True:
            try:
                yield self._decoder.decode(self._commands.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def close(self) -> None:
        """Send what is queued, for a second at most."""
        self._commands.close(linger=0)
        self._events.close(linger=1000)
        self._context.term()


class EngineLoop:
    """Commands and steps by turns; between two steps all commands that came are carried out.

    Args:
        engine: driven by this loop alone.
        link: to the front.
        max_waiting: requests that may wait while memory or seats are short.
        clock: seconds, the engine's own.
    """

    def __init__(
        self, engine: Engine, link: Link, *, max_waiting: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._link = link
        self._max_waiting = max_waiting
        self._clock = clock
        self._left_waiting = 0
        self._unstarted: set[str] = set()
        """Requests of which no token has been sent."""
        self._generated_tokens = 0
        self._evicted_blocks = 0
        self._is_stopping = False

    def run(self) -> None:
        """Until `Shutdown` or the parent's end."""
        parent = multiprocessing.parent_process()
        while not self._is_stopping and (parent is None or parent.is_alive()):
            was_idle = not self._engine.has_work
            for command in self._link.receive(PARENT_CHECK_S if was_idle else 0.0):
                self._carry_out(command)
            if was_idle:
                self._gather()
            if self._engine.has_work:
                self._step()

    def _gather(self) -> None:
        """After idling, take in what comes together with the first request: it would wait for a whole step else.

        Requests that start together also end together, and their successors start together: none interrupts another.
        """
        until_s = self._clock() + GATHER_AT_MOST_S
        has_news = self._engine.has_work
        while has_news and self._clock() < until_s:
            has_news = False
            for command in self._link.receive(GATHER_S):
                has_news = True
                self._carry_out(command)

    def _step(self) -> None:
        outputs = self._engine.step()
        self._left_waiting = len(self._engine.scheduler.waiting)
        self._generated_tokens += sum(out.token is not None for out in outputs)
        stats = self._stats()
        if stats.evicted_blocks - self._evicted_blocks >= EVICTION_BURST_BLOCKS:
            logger.info(
                "evicted %d blocks at once: %d cached are left, %d held, %d free of %d",
                stats.evicted_blocks - self._evicted_blocks,
                stats.cached_blocks,
                stats.held_blocks,
                stats.free_blocks,
                stats.total_blocks,
            )
        self._evicted_blocks = stats.evicted_blocks
        self._link.send(Outputs([self._output(out) for out in outputs], stats))

    def _output(self, out: EngineOutput) -> TokenOutput:
        request, start = out.request, None
        if request.id in self._unstarted:
            self._unstarted.discard(request.id)
            start = Start(request.cached_tokens, request.queued_s or 0.0, out.prompt_logprobs)
        return TokenOutput(
            id=request.id,
            choice=out.choice,
            token=out.token,
            finish_reason=None if out.finish_reason is None else str(out.finish_reason),
            stop_token_id=out.stop_token_id,
            failure=None if out.error is None else failure_of(out.error),
            start=start,
            kv_cache=request.kv_usage,
        )

    # Commands

    def _carry_out(self, command: Command) -> None:
        match command:
            case Add():
                self._add(command)
            case Abort():
                self._engine.abort(command.id, command.choice)
                if not self._engine.is_active(command.id):
                    self._unstarted.discard(command.id)
                self._tell_stats()
            case Call():
                self._link.send(self._call(command))
            case Shutdown():
                self._is_stopping = True

    def _add(self, command: Add) -> None:
        try:
            self._check_queue()
            self._engine.add(command.prompt_token_ids, command.params, request_id=command.id, salt=command.salt)
        except KvikkError as error:
            logger.info("refused %s (%d prompt tokens): %s", command.id, len(command.prompt_token_ids), error)
            self._link.send(Refused(id=command.id, failure=failure_of(error)))
        else:
            self._unstarted.add(command.id)
            self._link.send(Added(command.id))

    def _check_queue(self) -> None:
        """Refuse what would make the queue longer than it may be.

        New requests stand in the queue until the next step even when there is room for them: only if the last step
        left some waiting do all of them count.
        """
        scheduler = self._engine.scheduler
        seats = 0 if self._left_waiting else scheduler.config.max_num_seqs - len(scheduler.running)
        if len(scheduler.waiting) >= self._max_waiting + max(0, seats):
            raise QueueFull(
                f"{len(scheduler.waiting)} requests wait and {len(scheduler.running)} texts run: at most "
                f"--max-waiting-requests {self._max_waiting} may wait; try again later"
            )

    def _call(self, call: Call) -> Reply:
        method = CALLS.get(call.method)
        try:
            if method is None:
                raise InvalidRequest(f"the engine has no method {call.method!r}: it has {', '.join(CALLS)}")
            return Reply(number=call.number, value=method(self, **call.arguments))
        except KvikkError as error:
            return Reply(number=call.number, failure=failure_of(error))

    def _snapshot(self) -> Snapshot:
        pins = [Pin(name=name, blocks=blocks) for name, blocks in self._engine.prefix.pins().items()]
        return Snapshot(stats=self._stats(), pins=pins, requests=self._request_states())

    def _reset(self) -> int:
        dropped = self._engine.prefix.reset()
        logger.info("prefix cache reset: %d blocks forgotten", dropped)
        self._tell_stats()
        return dropped

    def _pin(self, name: str, token_ids: list[int], salt: str) -> int:
        blocks = self._engine.pin(name, token_ids, salt=salt)
        self._tell_stats()
        return blocks

    def _unpin(self, name: str) -> int:
        blocks = self._engine.prefix.pins().get(name)
        if blocks is None:
            raise PinNotFound(f"there is no pin {name!r}: GET /v1/cache lists them")
        self._engine.prefix.unpin(name)
        self._tell_stats()
        return blocks

    # What the engine says of itself

    def _tell_stats(self) -> None:
        """The memory changed between two steps."""
        self._link.send(Outputs([], self._stats()))

    def _stats(self) -> Stats:
        engine = self._engine
        pool, scheduler, counters = engine.pool, engine.scheduler, engine.prefix.counters
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            total_blocks=pool.total,
            free_blocks=pool.free,
            held_blocks=pool.held,
            cached_blocks=pool.cached,
            pinned_blocks=engine.prefix.pinned,
            steps=engine.steps,
            computed_tokens=engine.computed_tokens,
            generated_tokens=self._generated_tokens,
            prefix_queries=counters.queries,
            prefix_hits=counters.hits,
            resumed_tokens=counters.resumed,
            recomputed_tokens=counters.recomputed,
            inserted_blocks=counters.inserted_blocks,
            evicted_blocks=counters.evicted_blocks,
            preemptions=scheduler.preemptions,
            compactions=engine.kv.counters.compactions,
            dropped_tokens=engine.kv.counters.dropped_tokens,
            freed_frames=engine.kv.counters.freed_frames,
            tier=TierStats() if engine.tier is None else engine.tier.stats,
            drafts=scheduler.rounds.counters.copy(),
            fallbacks={str(reason): count for reason, count in scheduler.rounds.fallbacks.items()},
            host=_host_kv(engine),
        )

    def _request_states(self) -> list[RequestState]:
        now = self._clock()
        states = []
        for request in self._engine.requests:
            generated = sum(len(row.generated) for row in request.rows)
            is_running = any(row.is_running for row in request.rows)
            states.append(
                RequestState(
                    id=request.id,
                    state="waiting" if not is_running else "decode" if generated else "prefill",
                    age_s=now - request.arrival_s,
                    prompt_tokens=len(request.prompt_token_ids),
                    cached_tokens=request.cached_tokens,
                    generated_tokens=generated,
                    blocks=request.held_blocks,
                    texts=request.params.n,
                    preemptions=sum(row.preemptions for row in request.rows),
                    kv_cache=request.kv_usage,
                )
            )
        return states


CALLS: dict[str, Callable[..., Any]] = {
    "snapshot": EngineLoop._snapshot,
    "reset": EngineLoop._reset,
    "pin": EngineLoop._pin,
    "unpin": EngineLoop._unpin,
}
"""What the front may call by name."""


def _host_kv(engine: Engine) -> HostKV:
    """The host's part of the KV, as it stands."""
    rests = engine.kv.rests
    if rests is None:
        return HostKV()
    counters, block_bytes = rests.counters, engine.kv.store.token_bytes * engine.kv.page_size
    return HostKV(
        parted=rests.parted,
        used_bytes=rests.used_bytes,
        total_bytes=rests.total_bytes,
        saved_bytes=counters.saved_blocks * block_bytes,
        loaded_bytes=counters.loaded_blocks * block_bytes,
        found_blocks=counters.found_blocks,
        partings=counters.partings,
        refused=counters.refused,
    )


def _ready(spec: Any, engine: Engine, capacity: Capacity, config: EngineConfig) -> Ready:
    return Ready(
        model=spec.name,
        max_model_len=engine.limits.max_model_len,
        length_reason=engine.limits.length_reason,
        vocabulary=spec.vocabulary,
        max_num_seqs=config.scheduler.max_num_seqs,
        blocks=capacity.blocks,
        block_size=capacity.geometry.page_size,
        block_bytes=capacity.geometry.block_bytes,
        capacity=str(capacity),
        dtype=capacity.geometry.format,
        device=str(config.model.torch_device()),
        host_bytes=_host_kv(engine).total_bytes,
    )

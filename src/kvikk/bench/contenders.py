"""The ways to compute decode attention that a benchmark compares, each behind the same few calls, and its check."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kvikk.attention.gpu.flashinfer import (
    FLASHINFER_ROUTES,
    HOW_TO_INSTALL,
    FlashInferDecode,
    FlashInferRoute,
    is_installed,
    why_not,
)
from kvikk.attention.gpu.rows import DecodeRoute
from kvikk.bench.attention_shape import AttentionShape
from kvikk.bench.decode_cases import Placed
from kvikk.bench.traces import checked_names
from kvikk.errors import ConfigError, KvikkError

log = logging.getLogger(__name__)

Row = dict[str, Any]
OURS: Final = "worklist"
ROUTES: Final = (OURS, *FLASHINFER_ROUTES)
MOST_ERROR: Final = 0.02
"""Largest distance from the reference, relative to its length: bf16 rounds by 0.004, a forgotten chunk shows above."""
SAMPLED_ROWS: Final = 2


class CannotServe(ConfigError):
    """A route that is not made for a case; the text says why."""


class DeviceSpoilt(KvikkError):
    """A fault after which the GPU computes nothing more in this process."""

    code = "device_spoilt"


def chosen_routes(names: str) -> list[str]:
    """The routes of a list separated by commas; `auto` is every one that is installed.

    Raises:
        ConfigError: a name that is none, or whose package is not installed.
    """
    if names == "auto":
        return list(ROUTES) if is_installed() else [OURS]
    chosen = checked_names("--routes", names, ROUTES)
    if not is_installed() and set(chosen) & set(FLASHINFER_ROUTES):
        raise ConfigError(f"--routes {names} names FlashInfer's: {HOW_TO_INSTALL}, or leave them out")
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A route, ready to plan the rows of a placed case.

    Args:
        name: of the route.
        route: computes.
        placed: what.
        is_apart: whether it reads the pools of `Placed.apart`.
    """

    name: str
    route: DecodeRoute
    placed: Placed
    is_apart: bool

    @property
    def plans_on_device(self) -> bool:
        """Whether a plan can be a part of a graph."""
        return self.name == OURS

    def plan(self, lengths: Sequence[int] | None = None) -> None:
        """Plan the placed rows; `lengths` are those of the rows now, as far as the host knows better than the case."""
        if isinstance(self.route, FlashInferDecode):
            self.route.plan(self.placed.rows, self.placed.lengths if lengths is None else lengths)
        else:
            self.route.plan(self.placed.rows)

    def attend_all(self, q: Tensor, out: Tensor, *, scale: float) -> None:
        """All layers, one after the other, each from the same queries into the same output."""
        for layer in range(self.placed.store.geometry.layers):
            self.route.attend(layer, q, out, scale=scale)

    def error(self, q: Tensor, *, scale: float) -> float:
        """How far the last layer's output is from the reference, on the longest rows and the last. Plan first."""
        layer = self.placed.store.geometry.layers - 1
        out = torch.full_like(q, float("nan"))
        self.route.attend(layer, q, out, scale=scale)
        by_length = sorted(range(len(self.placed.lanes)), key=lambda row: -max(self.placed.lanes[row]))
        worst = 0.0
        for row in {*by_length[:SAMPLED_ROWS], len(by_length) - 1}:
            right = self.placed.expected(layer, row, q[row], scale=scale, apart=self.is_apart)
            distance = float((out[row].float() - right).norm() / right.norm())
            worst = max(worst, distance if distance == distance else float("inf"))
        return worst


def _worklist(placed: Placed, shape: AttentionShape) -> DecodeRoute:
    from kvikk.attention.gpu.worklist import WorkListDecode  # imports triton: only where it is used

    return WorkListDecode(placed.store, shape.q_heads, len(placed.lanes), ragged=placed.is_ragged)


class Contenders:
    """Makes contenders; FlashInfer's buffers are made once for all cases.

    Args:
        shape: of all cases.
        rows: of the largest case.
        entries: block-table entries of the largest case.
    """

    def __init__(self, shape: AttentionShape, *, rows: int, entries: int) -> None:
        self.shape = shape
        self._rows = rows
        self._entries = entries
        self._kept: dict[tuple[str, int, bool], FlashInferDecode] = {}

    def make(self, name: str, placed: Placed, *, fixed: bool = False) -> Contender:
        """A route for a case; `fixed` as of `FlashInferDecode`.

        Raises:
            CannotServe: the route is not made for it.
        """
        if name == OURS:
            return Contender(name=name, route=_worklist(placed, self.shape), placed=placed, is_apart=False)
        route: FlashInferRoute = "fa2" if name == "fa2" else "persistent"
        if placed.is_ragged:
            raise CannotServe("it reads whole rows only")
        is_apart = route == "persistent" and bool(placed.apart)
        store = placed.apart[0] if is_apart else placed.store
        sms = torch.cuda.get_device_properties(store.device).multi_processor_count
        reason = why_not(route, store.geometry, self.shape.q_heads, store.blocks, sms)
        if reason is not None:
            raise CannotServe(reason)
        views = placed.views(apart=is_apart)
        fixed = fixed and route == "fa2"  # the other's buffers never move
        key = (name, len(placed.lanes) if fixed else self._rows, fixed)
        if key not in self._kept:
            self._kept[key] = FlashInferDecode(
                route, views, q_heads=self.shape.q_heads, rows=key[1], entries=self._entries, fixed=fixed
            )
        self._kept[key].layers = views
        return Contender(name=name, route=self._kept[key], placed=placed, is_apart=is_apart)


def guarded(measure: Callable[[], Row]) -> Row:
    """What `measure` returns, or why there is nothing: a refusal, or a failure that later cases survive.

    Raises:
        DeviceSpoilt: they do not.
    """
    nothing: Row = {"time_us": None, "failure": None, "is_refused": False}
    try:
        return nothing | measure()
    except CannotServe as error:
        return nothing | {"failure": str(error), "is_refused": True}
    except Exception as error:
        log.warning("a route failed: %r", error)
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise DeviceSpoilt(f"the GPU cannot go on after {error!r}") from error
        return nothing | {"failure": repr(error)}

"""The garbage collector and what must not wait for it: a full collection takes as long as dozens of decode steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_heap(owner: object) -> None:
    """Leave all that exists now out of garbage collections while `owner` lives.

    With torch loaded there are half a million objects that will stay, and going through them stops the host for 30 ms
    and more. What is garbage now is collected first. What becomes garbage later is freed as ever if it is no cycle; a
    cycle of older objects than the owner is found once the owner is gone, by the collection after.

    All frozen objects of the process are thawed then: another owner that lives on has full collections again.

    Args:
        owner: can be weakly referenced, and is part of no cycle: frozen, it would never be freed.
    """
    _freeze()
    weakref.finalize(owner, gc.unfreeze).atexit = False


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Within, all that exists already is left out of garbage collections, as `freeze_heap` does for an owner."""
    _freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    gc.collect()  # makes it forget how large the heap was: it would wait for a quarter as much to be new

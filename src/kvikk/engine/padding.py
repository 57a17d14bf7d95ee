"""Steps of few sizes: what a CPU's libraries compile for every number of rows stays bounded.

oneDNN compiles a matrix product anew for each number of rows and keeps a thousand of them; torch keeps a description
beside each. That is 0.6 MiB for every number of rows and shape of weight, strewn over the heap between the tensors of
the steps, so that the heap cannot close up either: with steps of any size a process grows by hundreds of MiB, and
most steps wait some milliseconds for the compiler.
"""

from __future__ import annotations

from kvikk.attention.plan import QueryRun
from kvikk.types import NULL_BLOCK, Position

EXACT_ROWS = 32
"""Up to here every number of rows is a size: each row more costs the small steps of decoding 2 % or more."""
SIZES_PER_DOUBLING = 8
"""From `FINE_ROWS` on: 4 % more rows than needed on average, and 80 sizes up to 1,024 rows."""
FINE_ROWS = 64


def padded_size(rows: int) -> int:
    """The smallest size of a step that holds `rows` rows: any up to 32, even ones to 64, above it an eighth apart."""
    if rows <= EXACT_ROWS:
        return rows
    power_below = 1 << (rows - 1).bit_length() - 1
    between = 2 if rows <= FINE_ROWS else power_below // SIZES_PER_DOUBLING
    return -(-rows // between) * between


def spare_run(tokens: int, page_size: int) -> QueryRun:
    """A run of `tokens` tokens that fills a step up: it reads the null block, stores nothing, and has no reader."""
    return QueryRun(blocks=[NULL_BLOCK] * -(-tokens // page_size), start=Position(0), length=tokens, write=False)

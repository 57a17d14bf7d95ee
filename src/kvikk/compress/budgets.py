"""How much of its KV a row may keep: a share, tokens or bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Literal

from kvikk.errors import ConfigError
from kvikk.quantities import BYTES, parse_amount

MAX_AMOUNT = {"share": 1, "tokens": 2**31, "bytes": 2**50}
WAYS = "write a share (25%, 0.25), tokens for each KV head on average (2048), or memory of the request (512MiB)"


@dataclass(frozen=True)
class Budget:
    """How many slots the lanes of a row may keep on average, what is kept in any case included.

    Args:
        amount: a share above 0 and up to 1, a whole number of tokens, or bytes.
        unit: which of these.
    """

    amount: float
    unit: Literal["share", "tokens", "bytes"]

    def __post_init__(self) -> None:
        most = MAX_AMOUNT[self.unit]
        if not 0 < self.amount <= most:
            raise ConfigError(f"{self} is no budget: it must be above 0 and at most {Budget(most, self.unit)}")
        if self.unit == "tokens" and self.amount != int(self.amount):
            raise ConfigError(f"{self} is no budget: it must be a whole number, or a share up to 100%")

    @classmethod
    def parse(cls, value: object) -> Budget:
        """The budget that a text or a number stands for: `25%`, `0.25`, `2048`, `512MiB`.

        A number up to 1 with a decimal point is a share, and so is one below 1; others are tokens.

        Raises:
            ConfigError: it stands for none, or is out of its limits.
        """
        if isinstance(value, float):
            return cls(value, "share" if value <= 1 else "tokens")
        is_text = isinstance(value, int | str) and not isinstance(value, bool)
        amount = parse_amount(str(value)) if is_text else None
        if amount is None:
            raise ConfigError(f"{value!r} is no budget: {WAYS}")
        number, unit = amount
        if unit in BYTES:
            return cls(number * BYTES[unit], "bytes")
        if unit == "%":
            return cls(number / 100, "share")
        is_share = 0 < number < 1 or (number <= 1 and "." in str(value))
        return cls(number, "share" if is_share else "tokens")

    @property
    def is_everything(self) -> bool:
        """Whether nothing is ever dropped."""
        return self.unit == "share" and self.amount == 1

    def slots(self, length: int, *, token_bytes: int) -> int:
        """Slots that a lane keeps on average at a trigger: rounded down, at least 1, and no more than there are tokens.

        Args:
            length: tokens of the row so far, kept or not; a share is of these.
            token_bytes: what a slot in each lane takes: K and V, and what is noted of it.
        """
        if self.unit == "share":
            wanted = floor(self.amount * length + 1e-6)  # a share of 0.7 is a little less than seven tenths
        else:
            wanted = int(self.amount) // (token_bytes if self.unit == "bytes" else 1)
        return max(1, min(wanted, length))

    def __str__(self) -> str:
        if self.unit == "share":
            return f"{self.amount * 100:.15g}%"
        unit = self.unit.removesuffix("s") if self.amount == 1 else self.unit
        return f"{self.amount:.16g} {unit}"

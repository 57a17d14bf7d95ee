"""Every error that kvikk raises on purpose: one tree, each with a code and the HTTP status a server gives it."""

from __future__ import annotations

from typing import ClassVar, Final

LONGEST_TEXT: Final = 1500
"""Characters of what a client is told: what it quotes of the request may be of any length."""


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """A text with its middle left out where it is longer than so many characters: its end is the way out."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}[... {len(text) - 2 * half:,} characters ...]{text[-half:]}"


class KvikkError(Exception):
    """The root.

    `code` is stable and machine-readable; `http_status` is what a server answers; `param` names the field of the
    request that is wrong, where it is one.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    param: str | None = None


class InvalidRequest(KvikkError, ValueError):
    """A request that is wrong in itself: its text says the value, the limit and the way out.

    Args:
        message: that text, with its middle left out where it quotes something long.
        param: the name of the field that is wrong, where it is one field.
    """

    code = "invalid_request"
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(shortened(message))
        self.param = param


class PromptTooLong(InvalidRequest):
    """The prompt cannot be held: longer than the model's positions or than the KV memory."""

    code = "context_length_exceeded"


class ConfigError(KvikkError, ValueError):
    """An option, or a combination of options, that cannot be honoured."""

    code = "invalid_config"
    http_status = 400


class ModelError(KvikkError):
    """A model that cannot be loaded or is not supported, by name and reason."""

    code = "model_error"


class QueueFull(KvikkError):
    """As many requests wait as may; nothing was queued, and it may be tried again."""

    code = "queue_full"
    http_status = 503


class OutOfBlocks(KvikkError):
    """Fewer blocks are free than were asked for; nothing was reserved."""

    code = "out_of_blocks"
    http_status = 503


class PinRefused(KvikkError):
    """Pinning these tokens would leave too little memory for a request of the maximum length."""

    code = "pin_refused"
    http_status = 409


class PoolCorrupt(KvikkError):
    """The block accounting does not add up. This is a fault in kvikk: please report it with the message."""

    code = "pool_corrupt"


class PolicyFailed(KvikkError):
    """A policy for the KV cache broke its contract, by name: it is the policy's author who can mend it."""

    code = "policy_failed"


class StepFailed(KvikkError):
    """A step's computation failed; its requests end with this error, the others run on."""

    code = "step_failed"

"""Errors that only a server has."""

from __future__ import annotations

from kvikk.errors import KvikkError
from kvikk.server.messages import Failure


class EngineError(KvikkError):
    """An error that the engine process sent: its code, status and field are those of the error raised there."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.code = failure.code  # type: ignore[misc]
        self.http_status = failure.http_status  # type: ignore[misc]
        self.param = failure.param


class EngineDead(KvikkError):
    """The engine process has ended; no request can be served any more."""

    code = "engine_dead"
    http_status = 503


class Draining(KvikkError):
    """The server is going down."""

    code = "draining"
    http_status = 503


class RequestTimeout(KvikkError):
    """A request took longer than `--request-timeout-s` and was aborted."""

    code = "timeout"
    http_status = 504


class ModelNotFound(KvikkError):
    """The request names a model that is not served here."""

    code = "model_not_found"
    http_status = 404
    param = "model"


class PinNotFound(KvikkError):
    """There is no pin of that name."""

    code = "pin_not_found"
    http_status = 404
    param = "name"


class ClientGone(KvikkError):
    """The client hung up; what it had asked for was aborted."""

    code = "client_gone"
    http_status = 499

"""What `kvikk serve` can be told besides the engine's options."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvikk.configuration import secret
from kvikk.engine import EngineConfig
from kvikk.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Where the server listens, and who may ask.

    Args:
        host: address to listen on; 0.0.0.0 for all.
        port: to listen on.
        api_key: keys that clients must send as `Authorization: Bearer ...`, separated by commas.
        api_key_file: file of such keys, one a line.
        admin_api_key: key for the cache's endpoints and the live page; with client keys and without this one they are
            closed.
        allowed_origins: origins of web pages that may ask from a browser, separated by commas; none by default.
        max_body_bytes: longest request body.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = secret()
    api_key_file: str | None = None
    admin_api_key: str | None = secret()
    allowed_origins: str | None = None
    max_body_bytes: int = 8 * 2**20

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--port {self.port} is no port: it must lie between 0 (any free one) and 65535")
        if self.max_body_bytes < 1024:
            raise ConfigError(f"--max-body-bytes {self.max_body_bytes} is too little for a request: at least 1024")


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """How requests are taken.

    Args:
        served_model_name: the name that clients must use, or several separated by commas; the model's own by default.
        chat_template: file of a Jinja chat template, instead of the model's own.
        tool_call_parser: form in which the model writes tool calls: auto, hermes (also Qwen) or llama.
        max_waiting_requests: requests that may wait in the queue; one more gets 503 with Retry-After.
        max_choices: texts for one prompt (`n`) at most.
        request_timeout_s: a request that takes longer is aborted.
        drain_timeout_s: after SIGTERM, how long running requests may go on.
    """

    served_model_name: str | None = None
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    max_waiting_requests: int = 1024
    max_choices: int = 16
    request_timeout_s: float = 3600.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_waiting_requests < 1:
            raise ConfigError(f"--max-waiting-requests {self.max_waiting_requests} must be at least 1")
        if self.max_choices < 1:
            raise ConfigError(f"--max-choices {self.max_choices} must be at least 1")
        for flag, value in (
            ("--request-timeout-s", self.request_timeout_s),
            ("--drain-timeout-s", self.drain_timeout_s),
        ):
            if not 0 < value < 10**7:
                raise ConfigError(f"{flag} {value} must be above 0 and below 10,000,000 seconds")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Everything `kvikk serve` can be told."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)

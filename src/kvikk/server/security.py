"""Who may ask, for what, and how much: keys, salts, the length of bodies. Plain ASGI middleware."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvikk.errors import ConfigError
from kvikk.server.config import HttpConfig
from kvikk.server.openai.problems import problem

OPEN_PATHS = ("/health", "/version", "/metrics", "/docs", "/redoc", "/openapi.json", "/page/")
"""Neither texts nor single requests can be learned there. A path ending in `/` stands for all below it."""
ADMIN_PATHS = ("/v1/cache", "/live")
SHORTEST_KEY = 8


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys that are accepted, as digests. None at all: everything is open.

    Args:
        clients: for the API.
        admin: for the cache's endpoints and the live page, and for the API too.
    """

    clients: tuple[bytes, ...] = ()
    admin: bytes | None = None

    @property
    def are_needed(self) -> bool:
        """Whether clients must send a key."""
        return bool(self.clients)

    def knows(self, key: str) -> bool:
        """Whether a key opens the API. Takes the same time whichever keys there are."""
        return _among(_digest(key), (*self.clients, *((self.admin,) if self.admin else ())))

    def is_admin(self, key: str) -> bool:
        """Whether a key opens the operator's side."""
        return self.admin is not None and _among(_digest(key), (self.admin,))


def read_keys(config: HttpConfig) -> Keys:
    """The keys that flags, environment and file name.

    Raises:
        ConfigError: the file cannot be read, or a key is too short to be one.
    """
    given = (config.api_key or "").split(",")
    if config.api_key_file is not None:
        try:
            given += Path(config.api_key_file).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {config.api_key_file} cannot be read: {error}") from None
        if not any(line.strip() for line in given):
            raise ConfigError(f"--api-key-file {config.api_key_file} holds no key: write one a line")
    keys = [key.strip() for key in given if key.strip()]
    admin = (config.admin_api_key or "").strip()
    for key in [*keys, *([admin] if admin else [])]:
        if len(key) < SHORTEST_KEY:
            raise ConfigError(f"an API key has {len(key)} characters: at least {SHORTEST_KEY}, best 32 random ones")
    return Keys(clients=tuple(map(_digest, keys)), admin=_digest(admin) if admin else None)


class Guard:
    """Lets through what has the right key, and gives each key a salt of its own for the prefix cache.

    The salt goes to `scope["state"]["salt"]`: prompts of different keys share no cached blocks, so that no tenant can
    find out by timing, or from `cached_tokens`, what another has asked.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or 403, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = bearer(scope)
        refused = self._refusal(scope["method"], scope["path"], key)
        if refused is not None:
            message, status = refused
            headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
            await problem(message, status, code="invalid_api_key", headers=headers)(scope, receive, send)
            return
        scope.setdefault("state", {})["salt"] = _salt(key) if self._keys.are_needed else ""
        await self._app(scope, receive, send)

    def _refusal(self, method: str, path: str, key: str) -> tuple[str, int] | None:
        is_open = path == "/" or any(path == o or (o.endswith("/") and path.startswith(o)) for o in OPEN_PATHS)
        if is_open or method == "OPTIONS":
            return None
        if any(path == admin or path.startswith(admin + "/") for admin in ADMIN_PATHS):
            if self._keys.admin is not None:
                if self._keys.is_admin(key):
                    return None
                return "the admin key is needed: send it as Authorization: Bearer KEY (--admin-api-key)", 401
            if self._keys.are_needed:
                return "this is closed: start the server with --admin-api-key to open it to an operator", 403
            return None
        if self._keys.are_needed and not self._keys.knows(key):
            what = "the API key is wrong" if key else "an API key is needed"
            return f"{what}: send Authorization: Bearer KEY", 401
        return None


class BodyLimit:
    """Refuses bodies that are longer than `limit` bytes, by their header or as they come."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self._limit:
            await problem(self._text(int(announced)), 413, code="body_too_large")(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise HTTPException(413, self._text(received))
            return message

        await self._app(scope, counted, send)

    def _text(self, size: int) -> str:
        return f"the body has {size:,} bytes or more, at most {self._limit:,}: send less, or raise --max-body-bytes"


def bearer(scope: Scope) -> str:
    """The key in a request's Authorization header; empty when there is none."""
    value: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = value.decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _salt(key: str) -> str:
    """The same after a restart, so that what is cached elsewhere is found again."""
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"kvikk salt").hexdigest()


def _among(digest: bytes, known: Sequence[bytes]) -> bool:
    found = False
    for each in known:
        found |= hmac.compare_digest(digest, each)
    return found

"""Every error in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvikk.errors import KvikkError, shortened
from kvikk.server.openai.requests import NOT_SUPPORTED, Body, ChatBody, CompletionBody
from kvikk.server.openai.responses import Problem, ProblemBody

logger = logging.getLogger(__name__)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
RETRY_AFTER_S = 1
LONGEST_VALUE = 80

COMMON: dict[int | str, dict[str, Any]] = {
    400: {"model": ProblemBody, "description": "The request is wrong; the text names the field, value and limit."},
    401: {"model": ProblemBody, "description": "A key is needed, or the one given is wrong."},
    404: {"model": ProblemBody, "description": "No such model here."},
    413: {"model": ProblemBody, "description": "The body is longer than --max-body-bytes."},
    500: {"model": ProblemBody, "description": "A fault in the engine or its computation."},
    503: {"model": ProblemBody, "description": "The queue is full, the server goes down, or the engine is dead."},
    504: {"model": ProblemBody, "description": "It took longer than --request-timeout-s."},
}
"""For the OpenAPI page: what any endpoint may answer."""


def problem_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> ProblemBody:
    """An error in OpenAI's form; what a client sent of any length is cut in it."""
    field = None if param is None else shortened(param, LONGEST_VALUE)
    kind = TYPES.get(status, "server_error")
    return ProblemBody(error=Problem(message=shortened(message), type=kind, param=field, code=code))


def problem(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An answer that says what went wrong."""
    return Response(
        problem_body(message, status, param=param, code=code).model_dump_json(),
        status,
        dict(headers or {}),
        "application/json",
    )


def problem_of(error: KvikkError) -> ProblemBody:
    """The body for one of kvikk's own errors."""
    return problem_body(str(error), error.http_status, param=error.param, code=error.code)


def answer_error(error: KvikkError) -> Response:
    """The answer for one of kvikk's own errors; what may be tried again says when."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.http_status == 503 else {}
    return Response(problem_of(error).model_dump_json(), error.http_status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Answer every error of the app in this form."""

    @app.exception_handler(KvikkError)
    async def own(_: Request, error: KvikkError) -> Response:
        return answer_error(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        message, param = describe(error.errors())
        return problem(message, 400, param=param, code="invalid_request")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        text = str(error.detail)
        if error.status_code == 404:
            text = f"there is nothing at {request.url.path}: see /docs for what there is"
        elif error.status_code == 405:
            text = f"{request.method} is not allowed at {request.url.path}: see /docs"
        elif error.status_code == 400:
            text = "the body cannot be read: it must be JSON in UTF-8"
        return problem(text, error.status_code, code="invalid_request", headers=error.headers)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem("a fault in the server; its log has more", 500, code="internal_error")


def describe(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """The sentence and the field for what pydantic found: field, value, limit and way out."""
    if any(error["type"] == "json_invalid" for error in errors):
        reason = next(error for error in errors if error["type"] == "json_invalid")
        detail = reason.get("ctx", {}).get("error", "")
        return f"the body is not valid JSON ({detail} at character {reason['loc'][-1]})", None
    if any(error["loc"] == ("body",) for error in errors):
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    unknown = next((error for error in errors if error["type"] == "extra_forbidden"), None)
    if unknown is not None:
        name = str(unknown["loc"][-1])
        return f"unknown field {_path(unknown['loc'])!r}: {_hint(name)}", _path(unknown["loc"])
    first = errors[0]
    field = next((part for part in first["loc"][1:] if isinstance(part, str)), "body")
    same = [error for error in errors if len(error["loc"]) > 1 and error["loc"][1] == field]
    reasons = list(dict.fromkeys(str(error["msg"]) for error in same or errors))
    if first["type"] == "missing":
        return f"{_path(first['loc'])} is missing", _path(first["loc"])
    path = _path(first["loc"]) if len(same) == 1 else field
    return f"{path} is {_shown(first['input'])}: {'; or '.join(reasons[:4])}", path


def _path(location: Sequence[int | str]) -> str:
    """`messages[0].content`, without `body` and without pydantic's names of alternatives."""
    text = ""
    for part in location[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.replace("_", "").isalnum():
            text += f".{part}" if text else part
    return text or "body"


def _hint(name: str) -> str:
    if name in NOT_SUPPORTED:
        return NOT_SUPPORTED[name]
    known = sorted({field for body in (ChatBody, CompletionBody) for field in _names(body)})
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "see /docs for the fields there are"


def _names(body: type[Body]) -> list[str]:
    return [field.alias or name for name, field in body.model_fields.items()]


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + f"... ({len(text):,} characters)"

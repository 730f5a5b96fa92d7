"""Every error in OpenAI's shape, with the status that says what to do about it."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from dodo.errors import (
    EngineClosed,
    FingerprintMismatch,
    InputError,
    NuggetsFileError,
    QueueFull,
    StoreDamaged,
    StoreFull,
    UnknownContext,
    UnsupportedFileError,
    WindowError,
    is_out_of_memory,
)
from dodo.serving.answers import HungUp
from dodo.serving.intake import TooLong

__all__ = ["STATUSES", "ApiError", "asked_in", "failure", "install"]

log = logging.getLogger(__name__)

_KINDS: tuple[tuple[type[Exception], int, str], ...] = (
    (UnknownContext, 404, "context_not_found"),
    (FingerprintMismatch, 409, "context_of_another_model"),
    (TooLong, 413, "text_too_long"),
    (UnsupportedFileError, 415, "unsupported_type"),
    (NuggetsFileError, 400, "bad_nuggets_file"),
    (WindowError, 400, "context_length_exceeded"),
    (InputError, 400, "bad_input"),
    (QueueFull, 429, "queue_full"),
    (EngineClosed, 503, "shutting_down"),
    (StoreDamaged, 500, "store_damaged"),
    (StoreFull, 507, "store_full"),
    (TimeoutError, 504, "timeout"),
    (HungUp, 499, "hung_up"),
)
"""First match counts, so the narrower ones come first."""

_CODES = {
    400: "bad_input",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_type",
}

STATUSES = {
    400: "The input can't be used: an empty document, a damaged file, a prompt that does not fit the window.",
    401: "The key is missing or wrong.",
    403: "Another site's page asks, or under another host's name.",
    404: "There is no such context or model.",
    409: "The context was made by another model.",
    413: "The body, or the text in it, is too large.",
    415: "A file or body of a type that is not supported.",
    422: "A field is missing, unknown, or has a value out of range; or the body is not JSON.",
    429: "Too many requests are waiting; Retry-After says when to come again.",
    503: "The server is shutting down.",
    504: "It took too long.",
    507: "The disk, or what the store may hold, is full, or the memory too small; nothing was changed.",
}
"""What each status means, for the documentation."""


class ApiError(Exception):
    """An error that an HTTP client is to see."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@contextmanager
def asked_in(param: str | None) -> Iterator[None]:
    """A context that is not there is what this field of the request asks for; None: its path does."""
    try:
        yield
    except UnknownContext as error:
        raise ApiError(404, str(error), code="context_not_found", param=param) from None


def failure(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of the answer to a request that ended with this error. What nobody foresaw goes into the log."""
    headers: dict[str, str] = {}
    if isinstance(error, ApiError):
        return error.status, _body(error.status, str(error), error.code, error.param), headers
    if isinstance(error, RequestValidationError | ValidationError):
        errors = [dict(e) for e in error.errors()]
        if isinstance(error, RequestValidationError):  # which says first where the field is: body, query, path
            errors = [{**e, "loc": e["loc"][1:] if e["type"] != "json_invalid" else e["loc"]} for e in errors]
        message, param = _first(errors)
        return 422, _body(422, message, "invalid_value", param), headers
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        if error.status_code == 400 and "parsing the body" in str(error.detail):  # what Python's JSON says no to in other ways
            return 422, _body(422, "the body is not JSON that can be read", "invalid_value", None), headers
        return error.status_code, _body(error.status_code, str(error.detail), _CODES.get(error.status_code), None), headers
    for kind, status, code in _KINDS:
        if isinstance(error, kind):
            if isinstance(error, QueueFull):
                headers = {"Retry-After": str(math.ceil(error.retry_after))}
            if isinstance(error, FingerprintMismatch | StoreDamaged | StoreFull | TimeoutError):
                headers = {"x-should-retry": "false"}  # OpenAI's clients ask again otherwise, which helps with none of these
            message = str(error) or "the request took longer than this server allows; ask for less"
            return status, _body(status, message, code, None), headers
    if is_out_of_memory(error):
        log.warning("out of memory: %s", str(error).strip().split("\n")[0])
        headers = {"x-should-retry": "false"}
        told = "there is too little memory for this; send less, or compress it more"
        return 507, _body(507, told, "out_of_memory", None), headers
    log.error("request failed", exc_info=error)
    return 500, _UNFORESEEN, headers


def install(app: FastAPI) -> None:
    """Let the app answer with these."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        status, body, headers = failure(error)
        return JSONResponse(body, status, headers)

    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(_UNFORESEEN, 500)  # Starlette raises the error once more behind this, and so it gets into the log

    known = (ApiError, RequestValidationError, ValidationError, HTTPException, *(kind for kind, _, _ in _KINDS))
    for kind in (*known, RuntimeError, MemoryError):  # as which memory that runs out comes
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Exception, unforeseen)


def _body(status: int, message: str, code: str | None, param: str | None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _first(errors: Sequence[Any]) -> tuple[str, str | None]:
    """What is wrong with the first bad field, and its name as in messages[0].role."""
    field = errors[0]["loc"][:1]  # if it takes several types, what is wrong with the one that fits best
    error = max((e for e in errors if e["loc"][:1] == field), key=lambda e: (len(e["loc"]), not e["type"].endswith("_type")))
    if error["type"] == "json_invalid":
        told = str(error.get("ctx", {}).get("error", error["msg"]))
        place = f" at character {error['loc'][-1]}" if error["loc"] and "column" not in told else ""
        return f"the body is not JSON: {told}{place}", "body"
    path = [part for part in error["loc"] if isinstance(part, int) or (part != "str" and "[" not in part)]  # or a type's name
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if error["type"] == "extra_forbidden":
        return f"{name} is not supported by this server; leave it out", name
    message = str(error["msg"]).removeprefix("Value error, ")
    return (f"{name}: {message}", name) if name else (message, None)


_UNFORESEEN = _body(500, "something went wrong in the server; its log has more", "internal_error", None)

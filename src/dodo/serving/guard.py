"""Who may ask, and how much: those with a key, and, where there are none, programs on this machine but not pages of other sites.

A page on the web can make a browser send requests to this machine, also under a name of its own that leads here. Browsers say
which page asks (Origin) and under which name (Host), so both are checked. All of it happens before a body is read.
"""

import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dodo.serving.failures import ApiError, failure
from dodo.serving.settings import is_loopback

__all__ = ["BodyLimit", "Browsers", "Keys", "bearer"]

PROTECTED = ("/v1/", "/metrics")
"""Beginnings of the paths that need a key."""

bearer = HTTPBearer(auto_error=False, description="One of the keys in the file that --api-key-file names, if it does.")


class Keys:
    """Middleware that lets requests of the API through that show a key: `Authorization: Bearer KEY`.

    Args:
        app: what stands behind it.
        keys: one of them is wanted; the time that the check takes tells nothing of them.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PROTECTED) or self._shown(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        reason = "the API key is missing or wrong; send it as: Authorization: Bearer KEY"
        await _refuse(ApiError(401, reason, code="invalid_api_key"), scope, receive, send)

    def _shown(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        found = [secrets.compare_digest(given.strip().encode(), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(found)


class BodyLimit:
    """Middleware that refuses bodies of too many bytes: at once where their length is announced, or as soon as they have come.

    Args:
        app: what stands behind it.
        limit: bytes.
    """

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reason = f"the body has more than the {self._limit:,} bytes that this server takes"
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self._limit:
            await _refuse(ApiError(413, reason, code="body_too_large"), scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            part = await receive()
            read += len(part.get("body", b""))
            if read > self._limit:
                raise HTTPException(413, reason)  # FastAPI lets no other error out of the reading of a body
            return part

        await self._app(scope, limited, send)


class Browsers:
    """Middleware that refuses requests of other sites' pages, and, without keys, those under other names than this machine's.

    Args:
        app: what stands behind it.
        origins: whose pages may ask.
        any_host: under whichever name.
    """

    def __init__(self, app: ASGIApp, *, origins: Sequence[str], any_host: bool) -> None:
        self._app, self._origins, self._any_host = app, frozenset(origins), any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (reason := self._refusal(Headers(scope=scope))):
            await _refuse(ApiError(403, reason, code="forbidden"), scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._any_host and not is_loopback(_name(f"//{host}")):
            return "without keys this server is asked as localhost only; start it with --api-key-file for other names"
        if origin is None or origin in self._origins or "*" in self._origins:
            return None
        if origin.partition("://")[2] == host:
            return None
        return f"pages of {origin[:80]} may not ask; start the server with --cors-origin to let them"


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    status, body, headers = failure(error)
    await JSONResponse(body, status, headers)(scope, receive, send)


def _name(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""

"""Who may ask: those with a key, and, where there are none, programs on this machine but not pages of other sites.

A page on the web can make a browser send requests to this machine, also under a name of its own that leads here. Browsers say
which page asks (Origin) and under which name (Host), so both are checked.
"""

import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dodo.serving.failures import ApiError, failure
from dodo.serving.settings import is_loopback

__all__ = ["Browsers", "bearer", "check_key"]

bearer = HTTPBearer(auto_error=False, description="One of the keys in the file that --api-key-file names, if it does.")


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Raise a 401 unless the request has one of the keys, or there are none. The time it takes tells nothing of them."""
    if not keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    found = [secrets.compare_digest(given.strip().encode(), key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(found):
        raise ApiError(401, "the API key is missing or wrong; send it as: Authorization: Bearer KEY", code="invalid_api_key")


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
            status, body, headers = failure(ApiError(403, reason, code="forbidden"))
            await JSONResponse(body, status, headers)(scope, receive, send)
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


def _name(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""

"""The page at `/`: static files, which a browser is told to run nothing beside.

The files are under /page, so that at every other path the API itself says what is wrong. They hold no secret and need no key.
"""

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

__all__ = ["HEADERS", "PAGE", "install"]

PAGE = Path(__file__).parent / "page"

_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"

HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""Scripts, styles and connections of this server's own, in nobody else's frame; asked for anew, so that an update is seen."""


def install(app: FastAPI) -> None:
    """Let the app serve the page."""

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=HEADERS)

    app.mount("/page", _Files(directory=PAGE), name="page")


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response

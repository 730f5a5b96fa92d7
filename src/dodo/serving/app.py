"""The app: routes, middleware and the model, put together.

app = make_app(Settings(store=Path("contexts")))
uvicorn.run(app)
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from dodo import __version__
from dodo.model import Dodo
from dodo.serving import about, completions, contexts, failures, inspections, pages, reconstruction
from dodo.serving.guard import BodyLimit, Browsers, Keys, bearer
from dodo.serving.metrics import Metrics, Observed
from dodo.serving.schemas import ErrorBody
from dodo.serving.service import Service
from dodo.serving.settings import Settings
from dodo.serving.store import AnyStore

__all__ = ["make_app"]


def make_app(settings: Settings, dodo: Dodo | None = None, *, store: AnyStore | None = None) -> FastAPI:
    """An ASGI app that serves one model.

    Args:
        settings: see there.
        dodo: the model; None loads the one that the settings name when the app starts.
        store: of the contexts, closed when the app ends; None opens the folder that the settings name.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        model = await asyncio.to_thread(settings.loading.load) if dodo is None else dodo
        service = app.state.service = Service.start(settings, model, metrics, now=int(time.time()), store=store)
        try:
            yield
        finally:
            await asyncio.to_thread(service.close)

    documented: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": text} for status, text in failures.STATUSES.items()
    }
    app = FastAPI(
        title="Dodo",
        version=__version__,
        summary="Answers over compressed contexts, as OpenAI's clients ask for them.",
        lifespan=lifespan,
        responses=documented,
        dependencies=[Depends(bearer)],
    )
    failures.install(app)
    for part in (contexts, inspections, reconstruction, completions, about):
        app.include_router(part.router)
    pages.install(app)
    app.add_middleware(BodyLimit, limit=settings.max_body)
    if settings.keys:
        app.add_middleware(Keys, keys=settings.keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    app.add_middleware(Browsers, origins=settings.cors_origins, any_host=bool(settings.keys))
    app.add_middleware(Observed, metrics=metrics)
    return app

"""What the routes share: one model, its engine, its store."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from dodo.model import Dodo
from dodo.serving.engine import Engine
from dodo.serving.failures import ApiError
from dodo.serving.intake import Intake
from dodo.serving.metrics import Metrics
from dodo.serving.prompting import Prompting
from dodo.serving.settings import Settings
from dodo.serving.store import AnyStore, Store

__all__ = ["Asked", "Service", "open_store"]


@dataclass(frozen=True)
class Service:
    """Made when the app starts, and closed when it ends."""

    settings: Settings
    dodo: Dodo
    engine: Engine
    store: AnyStore
    prompting: Prompting
    intake: Intake
    metrics: Metrics
    started: int

    @classmethod
    def start(cls, settings: Settings, dodo: Dodo, metrics: Metrics, *, now: int, store: AnyStore | None = None) -> "Service":
        """Open the store, unless it is given, and start the engine."""
        store = store or open_store(settings)
        engine = Engine(dodo, max_batch=settings.max_batch, max_queue=settings.max_queue, max_states=settings.max_states)
        metrics.watch(engine, store)
        prompting = Prompting(dodo)
        intake = Intake(dodo, engine, prompting, settings, compressed=metrics.compressed.inc)
        return cls(settings, dodo, engine, store, prompting, intake, metrics, now)

    def close(self) -> None:
        """Stop the engine, and let go of the store."""
        self.engine.close()
        self.store.close()

    @property
    def model(self) -> str:
        """See `Settings.name`."""
        return self.settings.name

    def check_model(self, name: str) -> None:
        """Raise a 404 if it is not the one that is served."""
        if name != self.model:
            raise ApiError(
                404, f"there is no model {name[:80]!r} here, but {self.model!r}", code="model_not_found", param="model"
            )


def open_store(settings: Settings) -> Store:
    """The store that the settings name.

    Raises:
        InputError: its folder can't be used.
    """
    return Store(settings.store, memory_limit=settings.memory_limit, disk_limit=settings.disk_limit, storage=settings.storage)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Asked = Annotated[Service, Depends(_service)]
"""The service."""

"""The server on Ray: the same app in several replicas behind Ray Serve's proxies, over one store.

    client -> a proxy, at the host and port, on each machine with replicas
           -> a replica: app, model, engine
           -> the store: an actor on the machine where the command runs

Each replica is the app of `app.py` with all of its middleware: it sees the headers as they were sent, answers in a stream, and
ends what it does when a client hangs up. Engine and queue are of each replica, and so are the figures at /metrics and in /health:
they tell of the one that happened to be asked, but for the store's, which are of the whole. Ray's proxies answer at /-/healthz
and /-/routes by themselves, without a key, and tell nothing but that the app is there.

One process opens the folder of the contexts for all replicas, since what SQLite keeps in shared memory does not reach other
machines. It is started again, over the same folder, should it die.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI

from dodo.errors import DodoError, InputError
from dodo.nuggets import Nuggets
from dodo.serving.app import make_app
from dodo.serving.settings import Settings
from dodo.serving.store import Context, Store

__all__ = ["Replicas", "deployed"]

APP, STORE, NAMESPACE = "dodo", "dodo-store", "dodo"

_TRIES = 2
"""Of a replica to start, before it is given up."""


@dataclass(frozen=True)
class Replicas:
    """How many, and what each reserves.

    cpus: of each, and the number of its threads.
    gpus: of each; a fraction shares one. 0: it sees none.
    """

    number: int = 1
    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.number < 1 or self.cpus <= 0 or self.gpus < 0:
            raise InputError(f"{self} can't be had; replicas must be at least 1, their CPUs above 0 and GPUs not below 0")


@contextmanager
def deployed(settings: Settings, replicas: Replicas, *, host: str, port: int) -> Iterator[None]:
    """Inside, replicas answer at the host and port. Ray must be connected.

    Args:
        settings: of each replica; the store's folder is of this machine.
        replicas: how many, and how large.
        host, port: where Ray's proxies listen, on each machine that has one.

    Raises:
        DodoError: Ray Serve is not installed, runs on this cluster already, or the replicas did not start.
    """
    try:
        import ray
        from ray import serve
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError as error:
        raise DodoError(f"this needs {error.name}: pip install 'dodo-lm[ray]'") from None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if serve.status().proxies:
        reason = "Ray Serve runs on this cluster already, perhaps listening where others can ask"
        raise DodoError(f"{reason}; end it with: serve shutdown")
    settings = replace(settings, loading=settings.loading.from_anywhere())
    limits = {"memory_limit": settings.memory_limit, "disk_limit": settings.disk_limit, "storage": settings.storage}
    folder = settings.store.absolute()
    Store(folder).close()  # if it can't be used, that is said here
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    store: Any = ray.remote(Store).options(
        name=STORE, namespace=NAMESPACE, num_cpus=0, max_restarts=-1, max_concurrency=16, scheduling_strategy=here
    )
    app: Any = serve.deployment(
        serve.ingress(_builder(settings))(),
        name=APP,
        num_replicas=replicas.number,
        max_ongoing_requests=2 * (settings.max_batch + settings.max_queue),  # so that it is the engine that refuses
        max_constructor_retry_count=_TRIES,
        graceful_shutdown_timeout_s=5,
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
    )
    kept = store.remote(folder, **limits)
    try:
        try:
            _told(kept.totals.remote())
            serve.start(http_options={"host": host, "port": port})
            serve.run(app.bind(), name=APP, route_prefix="/")
        except RuntimeError as error:
            last = str(error).strip().splitlines()[-1]
            raise DodoError(f"the replicas did not start: {last}") from None
        yield
    finally:
        serve.shutdown()
        ray.kill(kept)


def _builder(settings: Settings) -> Callable[[], FastAPI]:
    def build() -> FastAPI:
        import ray

        store = SharedStore(ray.get_actor(STORE, namespace=NAMESPACE))
        return make_app(settings, settings.loading.load(), store=store)

    return build


class SharedStore:
    """A `Store` in another process, asked as if it were here. Not from an event loop's thread: it waits for the answers.

    Args:
        actor: a Ray actor of class `Store`.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def close(self) -> None:
        """Leave the store to the others."""

    def add(self, nuggets: Nuggets, *, name: str | None = None) -> Context:
        """See `Store.add`."""
        return _told(self._actor.add.remote(nuggets, name=name))

    def delete(self, context_id: str) -> None:
        """See `Store.delete`."""
        _told(self._actor.delete.remote(context_id))

    def get(self, context_id: str) -> Context:
        """See `Store.get`."""
        return _told(self._actor.get.remote(context_id))

    def load(self, context_id: str) -> Nuggets:
        """See `Store.load`."""
        return _told(self._actor.load.remote(context_id))

    def read(self, context_id: str) -> bytes:
        """See `Store.read`."""
        return _told(self._actor.read.remote(context_id))

    def page(self, *, limit: int, after: str | None = None, ascending: bool = False) -> Sequence[Context]:
        """See `Store.page`."""
        return _told(self._actor.page.remote(limit=limit, after=after, ascending=ascending))

    def totals(self) -> dict[str, int]:
        """See `Store.totals`."""
        return _told(self._actor.totals.remote())


def _told(answer: Any) -> Any:
    """What an actor answers, or its error as it was raised there."""
    from ray.exceptions import RayTaskError

    future: Future[Any] = answer.future()
    try:
        return future.result()
    except RayTaskError as error:
        raise error.cause from None

"""Figures for Prometheus: of requests, tokens, the engine and the store."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dodo.serving.engine import Engine
from dodo.serving.store import AnyStore

__all__ = ["Metrics", "Observed"]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """One server's figures, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("dodo_requests", "HTTP requests.", ["method", "route", "status"], registry=registry)
        self.seconds = Histogram(
            "dodo_request_seconds", "From a request to the end of its answer.", ["route"], buckets=_SECONDS, registry=registry
        )
        self.first_token = Histogram(
            "dodo_first_token_seconds",
            "From a completion's submission to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.compressed = Counter("dodo_compressed_tokens", "Tokens of the texts that were compressed.", registry=registry)

    def watch(self, engine: Engine, store: AnyStore) -> None:
        """Show, whenever asked, how these stand."""
        self._registry.register(_Standing(engine, store))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)


class _Standing:
    """A collector: gauges that are read off when they are asked for."""

    def __init__(self, engine: Engine, store: AnyStore) -> None:
        self._engine, self._store = engine, store

    def collect(self) -> Any:
        stats = self._engine.stats()
        yield GaugeMetricFamily("dodo_requests_running", "Answers being read or decoded.", stats.running)
        yield GaugeMetricFamily("dodo_requests_queued", "Answers that wait.", stats.queued)
        yield GaugeMetricFamily("dodo_states", "Keys and values held by running answers, in tokens.", stats.states)
        yield GaugeMetricFamily("dodo_generated_tokens", "Tokens generated since the start.", stats.tokens)
        for name, value in self._store.totals().items():
            yield GaugeMetricFamily(f"dodo_store_{name}", f"Of the store: {name.replace('_', ' ')}.", value)


class Observed:
    """Middleware that counts requests by route and status, and measures them."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 499  # unless an answer begins, the client hung up

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            status = 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            known = scope["method"] in ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
            self._metrics.requests.labels(scope["method"] if known else "other", route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - began)

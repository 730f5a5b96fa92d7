"""What the server says of itself: its model, whether it is well, its figures."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dodo import __version__
from dodo.prompts import QUESTION
from dodo.serving.service import Asked, Service

__all__ = ["router"]

router = APIRouter(tags=["server"])


@router.get("/v1/models")
def models(service: Asked) -> dict[str, Any]:
    """List the one model there is."""
    return {"object": "list", "data": [_model(service)]}


@router.get("/v1/models/{name:path}")
def model(name: str, service: Asked) -> dict[str, Any]:
    """Show the model."""
    service.check_model(name)
    return _model(service)


@router.get("/health")
def health(request: Request) -> dict[str, Any]:
    """Whether the model is loaded and answers. Needs no key."""
    service: Service = request.app.state.service
    service.engine.check_open()
    stats = service.engine.stats()
    return {"status": "ok", "version": __version__, "running": stats.running, "queued": stats.queued}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(service: Asked) -> Response:
    """Figures for Prometheus."""
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(service: Service) -> dict[str, Any]:
    dodo = service.dodo
    return {
        "id": service.model,
        "object": "model",
        "created": service.started,
        "owned_by": "dodo",
        "window": dodo.compressor.window,
        "ratio": dodo.config.ratio,
        "trained_ratios": dodo.config.trained_ratios,
        "by_use": dodo.config.by_use,
        "fingerprint": vars(dodo.fingerprint),
        "question_prompt": QUESTION,
    }

"""`POST /v1/contexts/ID/reconstruction`: a text rebuilt from its nuggets. Paper: Section 4 (autoencoding)."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dodo.serving.completions import Prepared, joined, respond
from dodo.serving.formats import TextFormat
from dodo.serving.schemas import ReconstructionRequest
from dodo.serving.service import Asked

__all__ = ["router"]

router = APIRouter(prefix="/v1/contexts", tags=["contexts"])

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "As a completion; with stream=true, chunks and then [DONE]."}
}


@router.post("/{context_id}/reconstruction", responses=_STREAM)
async def reconstruct(context_id: str, asked: ReconstructionRequest, request: Request, service: Asked) -> Response:
    """Rebuild the text of a context, as far as its nuggets allow."""

    async def prepare() -> Prepared:
        nuggets = await joined(service, [context_id], (), param=None)
        assert nuggets is not None
        return Prepared(nuggets, [None], tokens=service.dodo.rebuilt_tokens(nuggets)[0])

    form = TextFormat(service.prompting.token)
    return await respond(request, service, asked, prepare, form, wanted=asked.max_tokens, top=None)

"""`POST /v1/inspect`: what would become of a text, without keeping it. Paper: Figure 7.

A text is scored once; looking at it with another ratio then only selects.
"""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from dodo.architecture import state_bytes
from dodo.files import is_nuggets
from dodo.inspection import Inspection, Span, inspect_scores, visible
from dodo.serving import documents
from dodo.serving.answers import unless_hung_up
from dodo.serving.documents import File
from dodo.serving.failures import ApiError
from dodo.serving.schemas import InspectedSpan, InspectedToken, InspectionObject, InspectionRequest
from dodo.serving.service import Asked, Service

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["contexts"])


@router.post("/inspect", response_model=InspectionObject, openapi_extra=documents.body(InspectionRequest))
async def inspect(request: Request, service: Asked) -> Response:
    """Score each token of a text or a file, select as for a context, and say what it would cost. Nothing is kept."""
    source, wanted = await documents.read(request, InspectionRequest)

    async def work() -> str:
        async with asyncio.timeout(service.settings.timeout):
            text = await asyncio.to_thread(_text, source)
            scored = await service.intake.scored(text, wanted.use)

        def select() -> str:
            seen = inspect_scores(
                service.dodo, scored.placed, scored.scores, ratio=wanted.ratio, nuggets=wanted.nuggets, use=wanted.use
            )
            shown = _shown(service, seen, spans=wanted.spans, text=text if isinstance(source, File) else None)
            return shown.model_dump_json()

        return await asyncio.to_thread(select)

    return Response(await unless_hung_up(request, work()), media_type="application/json")


def _text(source: str | File) -> str:
    if isinstance(source, str):
        return source
    if is_nuggets(source.data, source.name):
        raise ApiError(400, "a nuggets file holds no text to look at; send the text that it was made of", code="bad_input")
    return source.text()


def _shown(service: Service, seen: Inspection, *, spans: bool, text: str | None) -> InspectionObject:
    base = service.dodo.compressor.base
    each = state_bytes(base.config, bytes_per_number=base.dtype.itemsize)
    return InspectionObject(
        text=text,
        n=seen.n,
        k=seen.k,
        states=seen.states,
        ratio=len(seen.tokens) / seen.states,
        bytes=each * seen.states,
        full_bytes=each * len(seen.tokens),
        trained=seen.trained,
        kept_first=sum(token.kept_first for token in seen.tokens),
        selected=[token.index for token in seen.tokens if token.selected],
        spans=[_span(span) for span in seen.spans()] if spans else None,
    )


def _span(span: Span) -> InspectedSpan:
    text = visible(span.text)
    mark = "" if text.strip() else "↵" if "\n" in text else text or span.tokens[0].token
    tokens = [InspectedToken(index=token.index, score=token.score, rank=token.rank) for token in span.tokens]
    return InspectedSpan(text=text, mark=mark, shade=span.shade, tokens=tokens)

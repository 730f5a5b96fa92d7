"""`/v1/contexts`: documents kept compressed. Added from texts and files, listed, shown, downloaded, deleted."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response, StreamingResponse

from dodo.files import is_nuggets
from dodo.nuggets import Nuggets
from dodo.serving import documents
from dodo.serving.answers import UNBUFFERED, unless_hung_up
from dodo.serving.documents import File
from dodo.serving.failures import ApiError, asked_in, failure
from dodo.serving.schemas import ContextList, ContextObject, ContextRequest, Deleted
from dodo.serving.service import Asked, Service
from dodo.serving.store import AnyStore, Context

__all__ = ["router"]

router = APIRouter(prefix="/v1/contexts", tags=["contexts"])

Report = Callable[[dict[str, Any]], None]


@router.post(
    "",
    status_code=201,
    response_model=ContextObject,
    openapi_extra=documents.body(ContextRequest),
    responses={200: {"content": {"text/event-stream": {}}, "description": "Events, where they are asked for."}},
)
async def add(request: Request, service: Asked) -> Response:
    """Compress a text or a file and keep it; or keep a nuggets file.

    With `Accept: text/event-stream` it answers with events: `progress` with a stage and the share that is done, then `done` with
    the context, or `error`.
    """
    source, wanted = await documents.read(request, ContextRequest)
    if "text/event-stream" in request.headers.get("accept", ""):
        return StreamingResponse(_events(service, source, wanted), media_type="text/event-stream", headers=UNBUFFERED)

    async def work() -> ContextObject:
        async with asyncio.timeout(service.settings.timeout):
            return await _keep(service, source, wanted, lambda event: None)

    made = await unless_hung_up(request, work())
    return JSONResponse(made.model_dump(), 201, {"Location": f"/v1/contexts/{made.id}"})


@router.get("")
def page(
    service: Asked,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> ContextList:
    """List contexts, the latest first, a page at a time."""
    with asked_in("after"):
        found = service.store.page(limit=limit + 1, after=after, ascending=order == "asc")
    data = [ContextObject.of(context) for context in found[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return ContextList(data=data, first_id=first, last_id=last, has_more=len(found) > limit)


@router.get("/{context_id}")
def show(context_id: str, service: Asked) -> ContextObject:
    """Show one."""
    return ContextObject.of(service.store.get(context_id))


@router.delete("/{context_id}")
def delete(context_id: str, service: Asked) -> Deleted:
    """Delete one. Answers that are being made over it go on."""
    service.store.delete(context_id)
    return Deleted(id=context_id)


@router.get(
    "/{context_id}/nuggets",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "A .nuggets file."}},
)
async def download(context_id: str, service: Asked) -> Response:
    """Download its nuggets: a safetensors file, which `Nuggets.load` reads."""
    data = await run_in_threadpool(service.store.read, context_id)
    headers = {"Content-Disposition": f'attachment; filename="{context_id}.nuggets"'}
    return Response(data, media_type="application/octet-stream", headers=headers)


async def _keep(service: Service, source: str | File, wanted: ContextRequest, report: Report) -> ContextObject:
    nuggets = await _nuggets(service, source, wanted, report)
    report({"stage": "storing"})
    name = source.name[-200:] or None if isinstance(source, File) and wanted.name is None else wanted.name
    context = await _stored(service.store, nuggets, name)
    told = filter(None, (service.dodo.beyond_window(int(nuggets.lengths + nuggets.sinks)), service.dodo.warning_of(nuggets)))
    return ContextObject.of(context, "; ".join(told) or None)


async def _stored(store: AnyStore, nuggets: Nuggets, name: str | None) -> Context:
    """Add a context. A thread can't be stopped: what it stores when nobody waits for it any more is deleted once it is there."""
    loop = asyncio.get_running_loop()

    def forget(added: asyncio.Task[Context]) -> None:
        if not added.cancelled() and added.exception() is None:
            loop.run_in_executor(None, store.delete, added.result().id)  # an id is of one request, whatever shares the file

    adding = asyncio.create_task(asyncio.to_thread(store.add, nuggets, name=name))
    try:
        return await asyncio.shield(adding)
    except asyncio.CancelledError:
        adding.add_done_callback(forget)
        raise


async def _nuggets(service: Service, source: str | File, wanted: ContextRequest, report: Report) -> Nuggets:
    if isinstance(source, File):
        report({"stage": "reading", "bytes": len(source.data)})
        if is_nuggets(source.data, source.name):
            if {"ratio", "nuggets", "use"} & wanted.model_fields_set:
                raise ApiError(400, "a nuggets file is compressed already; leave ratio, nuggets and use out", code="bad_input")
            return await service.intake.file(source.data)
        source = await asyncio.to_thread(source.text)
    tokens = 0

    def begun(count: int) -> None:
        nonlocal tokens
        tokens = count
        report({"stage": "waiting", "tokens": count})

    def share(done: float) -> None:
        report({"stage": "compressing", "tokens": tokens, "done": round(done, 3)})

    how: dict[str, Any] = {"ratio": wanted.ratio, "nuggets": wanted.nuggets, "use": wanted.use}
    return await service.intake.document(source, **how, begun=begun, report=share)


async def _events(service: Service, source: str | File, wanted: ContextRequest) -> AsyncIterator[str]:
    loop, coming = asyncio.get_running_loop(), asyncio.Queue[tuple[str, dict[str, Any]] | None]()

    def report(event: dict[str, Any]) -> None:  # also from the model's thread
        loop.call_soon_threadsafe(coming.put_nowait, ("progress", event))

    async def work() -> None:
        try:
            async with asyncio.timeout(service.settings.timeout):
                made = await _keep(service, source, wanted, report)
            last = ("done", made.model_dump())
        except Exception as error:  # the status has been sent: what went wrong is an event
            last = ("error", failure(error)[1])
        loop.call_soon(coming.put_nowait, last)  # behind the reports that are on their way
        loop.call_soon(coming.put_nowait, None)

    task = asyncio.create_task(work())
    try:
        while (event := await coming.get()) is not None:
            yield f"event: {event[0]}\ndata: {json.dumps(event[1], ensure_ascii=False)}\n\n"
    finally:
        task.cancel()

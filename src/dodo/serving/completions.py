"""`POST /v1/chat/completions` and `/v1/completions`: answers over stored contexts, over long messages, or by the plain base."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from dodo.errors import InputError
from dodo.nuggets import Nuggets
from dodo.serving import request as engine_request
from dodo.serving.answers import Answers, Streamed, unless_hung_up
from dodo.serving.failures import ApiError, asked_in, failure
from dodo.serving.formats import ChatFormat, Format, TextFormat, Usage
from dodo.serving.schemas import ChatRequest, CompletionRequest, Sampling
from dodo.serving.service import Asked, Service

__all__ = ["Prepared", "joined", "respond", "router"]

router = APIRouter(prefix="/v1", tags=["completions"])

CHAT_TOKENS, TEXT_TOKENS = 256, 16
"""Of an answer, where the request does not say; the second is OpenAI's."""

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "The completion; with stream=true, chunks and then [DONE]."}
}


@dataclass(frozen=True)
class Prepared:
    """What is asked.

    nuggets: what the prompts stand behind.
    prompts: token ids; None asks for the text of the nuggets.
    tokens: of an answer, where the request does not say.
    ends, goes_on: see `request.Request`.
    """

    nuggets: Nuggets | None
    prompts: Sequence[Sequence[int] | None]
    tokens: int
    ends: frozenset[int] = frozenset()
    goes_on: bool = False


@router.post("/chat/completions", responses=_STREAM)
async def chat(asked: ChatRequest, request: Request, service: Asked) -> Response:
    """Answer the last message.

    With `context_ids` the conversation stands behind these contexts, and its last message is asked as a question about them.
    """

    async def prepare() -> Prepared:
        turns = [("system" if message.role == "developer" else message.role, message.text) for message in asked.messages]
        conversation = await service.intake.turns(turns)
        nuggets = await joined(service, asked.context_ids, conversation.nuggets)
        over = nuggets is not None
        ids = await asyncio.to_thread(service.prompting.conversation, conversation.turns, over_contexts=over)
        return Prepared(nuggets, [ids], CHAT_TOKENS, ends=service.prompting.ends)

    service.check_model(asked.model)
    top = (asked.top_logprobs or 0) if asked.logprobs else None
    wanted = asked.max_completion_tokens or asked.max_tokens
    limit = "max_completion_tokens" if asked.max_completion_tokens else "max_tokens"
    form = ChatFormat(service.prompting.token)
    return await respond(request, service, asked, prepare, form, wanted=wanted, top=top, limit=limit)


@router.post("/completions", responses=_STREAM)
async def complete(asked: CompletionRequest, request: Request, service: Asked) -> Response:
    """Go on with the prompt, behind the contexts if there are any."""

    async def prepare() -> Prepared:
        nuggets = await joined(service, asked.context_ids, ())
        tokens = service.prompting.document if nuggets is None else service.prompting.continuation
        rows = [p if isinstance(p, list) else await asyncio.to_thread(tokens, _filled(p)) for p in asked.prompts]
        return Prepared(nuggets, rows, TEXT_TOKENS, goes_on=True)

    service.check_model(asked.model)
    form = TextFormat(service.prompting.token)
    return await respond(request, service, asked, prepare, form, wanted=asked.max_tokens, top=asked.logprobs)


def _filled(prompt: str) -> str:
    if not prompt:
        raise InputError("the prompt is empty")
    return prompt


async def joined(
    service: Service, ids: Sequence[str], more: Sequence[Nuggets], *, param: str | None = "context_ids"
) -> Nuggets | None:
    """Stored contexts and the nuggets of messages as one text. param: where the request names them."""

    def join() -> Nuggets | None:
        parts = [service.store.load(i) for i in ids]
        for part in parts:
            service.dodo.check(part)
        parts += more
        if len({part.scheme for part in parts}) > 1:
            parts = [part.compact() for part in parts]
        parts = [part.to(dtype=service.dodo.compressor.base.dtype) for part in parts]
        return Nuggets.cat(parts) if len(parts) > 1 else parts[0] if parts else None

    with asked_in(param):
        return await asyncio.to_thread(join)


async def respond(
    request: Request,
    service: Service,
    asked: Sampling,
    prepare: Callable[[], Awaitable[Prepared]],
    form: Format,
    *,
    wanted: int | None,
    top: int | None,
    limit: str = "max_tokens",
) -> Response:
    """Answer a request, whole or as a stream.

    Args:
        asked: how to choose tokens, and how to answer.
        prepare: finds out what is asked; part of the time that the request may take.
        form: how the answer is written.
        wanted: tokens of each answer, if the request says so.
        top: so many of the likeliest tokens with each token; None: none.
        limit: the field that says how many are wanted.

    Raises:
        ApiError: more tokens or answers than the server gives.
    """
    settings = service.settings
    deadline = time.monotonic() + settings.timeout
    if wanted is not None and wanted > settings.max_new_tokens:
        raise ApiError(400, f"answers have {settings.max_new_tokens:,} tokens at most here", code="bad_input", param=limit)

    async def begin() -> tuple[Answers, Usage]:
        async with asyncio.timeout(settings.timeout):
            prepared = await prepare()
        nuggets, rows, default, copies = prepared.nuggets, prepared.prompts, prepared.tokens, asked.n or 1
        lengths = [1 if row is None else len(row) for row in rows]
        if len(rows) * copies > settings.max_choices:
            raise ApiError(
                400, f"there are {settings.max_choices} answers to a request at most here", code="bad_input", param="n"
            )
        window, longest = service.dodo.compressor.window, max(lengths)
        if nuggets is not None and int(nuggets.next_positions) + longest + (wanted or default) > window:
            nuggets = await asyncio.to_thread(nuggets.compact)
        room = window - longest - (0 if nuggets is None else int(nuggets.next_positions))
        tokens = wanted or max(1, min(default, settings.max_new_tokens, room))
        requests = [
            engine_request.Request(
                nuggets,
                row,
                tokens,
                temperature=asked.temperature or 0.0,
                top_p=1.0 if asked.top_p is None else asked.top_p,
                seed=None if asked.seed is None else asked.seed + copy,
                stop=asked.stops,
                top_logprobs=top,
                ends=prepared.ends,
                goes_on=prepared.goes_on,
            )
            for row in rows
            for copy in range(copies)
        ]
        states, original = (0, 0) if nuggets is None else (int(nuggets.states), int(nuggets.lengths + nuggets.sinks))
        usage = Usage(sum(lengths), states * len(rows), original * len(rows))
        return Answers(service.engine, requests, seconds=deadline - time.monotonic()), usage

    head = {"id": form.id, "created": int(time.time()), "model": service.model}
    if asked.stream:
        answers, usage = await unless_hung_up(request, begin())
        shown = asked.stream_options is not None and asked.stream_options.include_usage
        return Streamed(_events(answers, form, head, usage if shown else None, service), answers)

    async def work() -> dict[str, Any]:
        answers, usage = await begin()
        try:
            return await _whole(answers, form, head, usage, service)
        finally:
            answers.cancel()

    return JSONResponse(await unless_hung_up(request, work()))


async def _whole(answers: Answers, form: Format, head: dict[str, Any], usage: Usage, service: Service) -> dict[str, Any]:
    pieces: dict[int, list[engine_request.Piece]] = {}
    began = time.perf_counter()
    async for index, piece in answers:
        if not pieces:
            service.metrics.first_token.observe(time.perf_counter() - began)
        pieces.setdefault(index, []).append(piece)
    choices = await asyncio.to_thread(lambda: [form.choice(index, pieces[index]) for index in sorted(pieces)])
    tokens = sum(piece.token_id is not None for row in pieces.values() for piece in row)
    return {**head, "object": form.whole, "choices": choices, "usage": usage.shown(tokens)}


async def _events(
    answers: Answers, form: Format, head: dict[str, Any], usage: Usage | None, service: Service
) -> AsyncIterator[str]:
    head = {**head, "object": form.chunk} | ({} if usage is None else {"usage": None})
    seen: set[int] = set()
    tokens, began = 0, time.perf_counter()
    try:
        async for index, piece in answers:
            if not seen:
                service.metrics.first_token.observe(time.perf_counter() - began)
            if index not in seen and (first := form.begun(index)) is not None:
                yield _event({**head, "choices": [first]})
            seen.add(index)
            tokens += piece.token_id is not None
            if piece.text or piece.finish or piece.logprob is not None:
                yield _event({**head, "choices": [form.part(index, piece)]})
        if usage is not None:
            yield _event({**head, "choices": [], "usage": usage.shown(tokens)})
    except Exception as error:  # the status has been sent: what went wrong is an event
        yield _event(failure(error)[1])
        return
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"

"""Laws of the engine: answers are the same alone and in company, and nobody's trouble is another's."""

import asyncio
import copy
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dodo.architecture import layers_of
from dodo.errors import DodoError, EngineClosed, FingerprintMismatch, InputError, QueueFull, WindowError
from dodo.model import Dodo
from dodo.nuggets import Nuggets
from dodo.serving import engine as engine_module
from dodo.serving.batch import Batch
from dodo.serving.batch_cache import BatchCache
from dodo.serving.engine import Engine, Piece, Request, Ticket
from dodo.serving.progress import reporting
from tests.conftest import small_config, stir, tiny_model, tokens
from tests.standins.models import byte_tokenizer

FAMILIES = ["llama", "mistral, sliding", "gemma2", "gemma3"]
NEW = 8


def make_dodo(family: str = "llama") -> Dodo:
    """A tiny Dodo whose adapters do something and whose answers do not end by themselves."""
    model = tiny_model(family)
    model.generation_config.eos_token_id = None
    plain = copy.deepcopy(model)
    dodo = Dodo.from_model(model, byte_tokenizer(), small_config(keep_first=True))
    stir(dodo.compressor)
    dodo.stamp()
    dodo.plain = plain  # type: ignore[attr-defined]
    return dodo


@pytest.fixture
def dodo() -> Dodo:
    return make_dodo()


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Makes engines that are closed after the test."""
    made: list[Engine] = []

    def make(dodo: Dodo, **settings: int) -> Engine:
        made.append(Engine(dodo, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def context(dodo: Dodo, seed: int, *, length: int = 30, ratio: float = 3) -> Nuggets:
    with torch.no_grad():
        return dodo.compressor.encode(tokens(1, length, seed=seed), ratio=ratio)


def question(seed: int, length: int = 5) -> list[int]:
    return tokens(1, length, seed=100 + seed)[0].tolist()


def requests(dodo: Dodo, count: int, **settings: Any) -> list[Request]:
    """Over texts and with questions of different lengths."""
    return [
        Request(context(dodo, i, length=20 + 7 * i), question(i, 3 + i % 4), settings.pop("max_new_tokens", NEW + i), **settings)
        for i in range(count)
    ]


def ids(pieces: list[Piece]) -> list[int]:
    return [piece.token_id for piece in pieces if piece.token_id is not None]


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def decoded(dodo: Dodo, token_ids: list[int]) -> str:
    return dodo.tokenizer.decode(token_ids, skip_special_tokens=True)


def reference(dodo: Dodo, request: Request) -> list[int]:
    if request.nuggets is not None:
        prompts = None if request.input_ids is None else [list(request.input_ids)]
        return dodo.generate_ids(request.nuggets, prompts, max_new_tokens=request.max_new_tokens)[0]
    prompt = torch.tensor([list(request.input_ids)])
    made = dodo.plain.generate(  # type: ignore[attr-defined]
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens, do_sample=False, pad_token_id=0
    )
    return made[0, prompt.shape[1] :].tolist()


@contextmanager
def held_up(engine: Engine) -> Iterator[None]:
    """Within it, the model's thread does nothing."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(60)

    done = engine.run(wait)
    begun.wait(60)
    try:
        yield
    finally:
        go_on.set()
        done.result(60)


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


# -- answers


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_in_company_equal_those_alone_and_the_librarys(family: str, start: Callable[..., Engine]) -> None:
    dodo = make_dodo(family)
    asked = requests(dodo, 8)
    asked[2] = dataclasses.replace(asked[2], nuggets=None)
    asked[5] = dataclasses.replace(asked[5], nuggets=None)
    expected = [reference(dodo, request) for request in asked]
    engine = start(dodo)
    assert [ids(list(engine.submit(request))) for request in asked] == expected
    made: list[list[Piece]] = [[] for _ in asked]
    readers: list[Ticket] = []
    for request in asked:  # each joins when those before it are some tokens on
        readers.append(engine.submit(request))
        for i, reader in enumerate(readers):
            made[i].append(next(reader))
    for i, reader in enumerate(readers):
        made[i].extend(reader)
    assert [ids(pieces) for pieces in made] == expected


def test_rows_over_nuggets_share_one_pass_and_rows_of_the_base_another(dodo: Dodo, start: Callable[..., Engine]) -> None:
    asked = [*requests(dodo, 5), *(Request(None, question(i), NEW) for i in range(3))]
    engine, seen = start(dodo), []
    hook = dodo.compressor.base.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with held_up(engine):
        tickets = [engine.submit(request) for request in asked]
    for ticket in tickets:
        list(ticket)
    hook.remove()
    assert seen[:5] == [(5, 6), (5, 1), (3, 5), (5, 1), (3, 1)]


def test_prompts_that_wait_are_read_together_but_no_more_than_so_many_tokens_between_two_of_an_answer(
    dodo: Dodo, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 20)
    asked = [
        Request(context(dodo, i, length=20 + 9 * i), question(i, length), NEW) for i, length in enumerate((7, 2, 9, 30, 5, 4))
    ]
    running = dataclasses.replace(asked[0], max_new_tokens=60)
    expected = [reference(dodo, request) for request in (running, *asked)]
    engine, seen = start(dodo), []
    ticket = engine.submit(running)
    first = next(ticket)
    with held_up(engine):
        tickets = [engine.submit(request) for request in asked]
        hook = dodo.compressor.base.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
    assert [ids([first, *ticket]), *(ids(list(each)) for each in tickets)] == expected
    hook.remove()
    assert [shape for shape in seen if shape[1] > 1] == [(2, 7), (1, 9), (1, 20), (1, 10), (2, 5)]
    assert all(one[1] == 1 or other[1] == 1 for one, other in itertools.pairwise(seen))


def test_without_a_prompt_the_text_is_rebuilt_also_in_company(dodo: Dodo, start: Callable[..., Engine]) -> None:
    asked = requests(dodo, 3)
    asked[1] = dataclasses.replace(asked[1], input_ids=None)
    expected = [reference(dodo, request) for request in asked]
    engine = start(dodo)
    with held_up(engine):
        tickets = [engine.submit(request) for request in asked]
    assert [ids(list(ticket)) for ticket in tickets] == expected


def test_a_prompt_read_in_pieces_gives_the_same(
    dodo: Dodo, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 3)
    asked = [Request(context(dodo, 1), question(1, 20), NEW), Request(None, question(2, 17), NEW), *requests(dodo, 2)]
    engine = start(dodo)
    with held_up(engine):
        tickets = [engine.submit(request) for request in asked]
    assert [ids(list(ticket)) for ticket in tickets] == [reference(dodo, request) for request in asked]


def test_a_seed_gives_the_same_answer_alone_and_in_company(dodo: Dodo, start: Callable[..., Engine]) -> None:
    asked = [dataclasses.replace(r, temperature=1.3, top_p=0.9, seed=i % 3) for i, r in enumerate(requests(dodo, 6))]
    engine = start(dodo)
    alone = [ids(list(engine.submit(request))) for request in asked]
    with held_up(engine):
        tickets = [engine.submit(request) for request in reversed(asked)]
    assert [ids(list(ticket)) for ticket in reversed(tickets)] == alone
    assert alone[0] != reference(dodo, asked[0])
    other = ids(list(engine.submit(dataclasses.replace(asked[0], seed=77))))
    assert other != alone[0]


def test_log_probabilities_are_those_of_a_full_forward_pass(dodo: Dodo, start: Callable[..., Engine]) -> None:
    request = dataclasses.replace(requests(dodo, 3)[2], temperature=1.0, seed=1, top_logprobs=4)
    pieces = list(start(dodo).submit(request))
    made = torch.tensor(ids(pieces))
    assert request.nuggets is not None
    with torch.no_grad():
        whole = torch.tensor([[*request.input_ids, *made.tolist()]])
        expected = dodo.compressor.decode(request.nuggets, whole)[0, len(request.input_ids) - 1 : -1].log_softmax(-1)
    found = torch.tensor([piece.logprob for piece in pieces])
    torch.testing.assert_close(found, expected.gather(1, made[:, None])[:, 0], atol=1e-4, rtol=0)
    best = expected.topk(4)
    assert [[token for token, _ in piece.top or ()] for piece in pieces] == best.indices.tolist()
    torch.testing.assert_close(
        torch.tensor([[value for _, value in piece.top or ()] for piece in pieces]), best.values, atol=1e-4, rtol=0
    )


# -- ends


def test_an_answer_of_all_its_tokens_ends_for_its_length(dodo: Dodo, start: Callable[..., Engine]) -> None:
    pieces = list(start(dodo).submit(Request(context(dodo, 0), question(0), 3)))
    assert [piece.finish for piece in pieces] == [None, None, "length"]
    assert text(pieces) == decoded(dodo, ids(pieces))


def test_an_end_token_ends_an_answer_and_is_not_in_it(dodo: Dodo, start: Callable[..., Engine]) -> None:
    request = Request(context(dodo, 0), question(0), NEW)
    answer = reference(dodo, request)
    end = answer[4]
    dodo.compressor.base.generation_config.eos_token_id = [0, end]
    pieces = list(start(dodo).submit(request))
    assert ids(pieces) == answer[: answer.index(end)]
    assert (pieces[-1].token_id, pieces[-1].finish) == (None, "stop")
    assert text(pieces) == decoded(dodo, ids(pieces))


def test_stop_texts_split_over_tokens_never_show(dodo: Dodo, start: Callable[..., Engine]) -> None:
    request = Request(context(dodo, 0), question(0), NEW)
    engine = start(dodo)
    whole = text(list(engine.submit(request)))
    for begin in range(len(whole) - 2):
        stop = whole[begin : begin + 3]
        pieces = list(engine.submit(dataclasses.replace(request, stop=["never said", stop])))
        assert text(pieces) == whole[: whole.index(stop)]
        assert pieces[-1].finish == "stop"
    pieces = list(engine.submit(dataclasses.replace(request, stop=[whole[-2:] + "more"])))
    assert text(pieces) == whole  # what was held back comes at the end
    assert pieces[-1].finish == "length"


# -- one's trouble is not another's


def test_a_cancelled_request_leaves_and_the_others_go_on(dodo: Dodo, start: Callable[..., Engine]) -> None:
    asked = requests(dodo, 4)
    expected = [reference(dodo, request) for request in asked]
    engine = start(dodo)
    endless = engine.submit(dataclasses.replace(asked[0], max_new_tokens=150))
    unread = engine.submit(dataclasses.replace(asked[1], max_new_tokens=150))
    next(endless)
    tickets = [engine.submit(request) for request in asked[1:]]
    endless.cancel()
    unread.cancel()
    assert [ids(list(ticket)) for ticket in tickets] == expected[1:]
    assert len(list(endless)) < 149
    assert eventually(lambda: (engine.stats().running, engine.stats().states) == (0, 0))


def test_a_cancelled_request_in_the_queue_frees_its_place_at_once(dodo: Dodo, start: Callable[..., Engine]) -> None:
    engine = start(dodo, max_queue=1)
    with held_up(engine):
        waiting = engine.submit(requests(dodo, 1)[0])
        waiting.cancel()
        assert list(waiting) == []
        engine.submit(requests(dodo, 1)[0])


def test_a_full_queue_refuses_at_once(dodo: Dodo, start: Callable[..., Engine]) -> None:
    engine = start(dodo, max_batch=1, max_queue=2)
    with held_up(engine):
        tickets = [engine.submit(request) for request in requests(dodo, 2)]
        assert engine.stats().queued == 2
        with pytest.raises(QueueFull, match="2 requests are waiting") as refused:
            engine.submit(requests(dodo, 1)[0])
    assert refused.value.retry_after >= 1
    assert [len(list(ticket)) for ticket in tickets] == [NEW, NEW + 1]


def test_a_prompt_whose_pass_fails_fails_alone(dodo: Dodo, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(dodo, 4)
    expected = [reference(dodo, request) for request in asked]
    step, bad = Batch.step, asked[2]

    def failing(self: Batch, tokens: int = 1) -> torch.Tensor:
        if any(row.request is bad for row in self.rows):
            raise MemoryError("no room")
        return step(self, tokens)

    monkeypatch.setattr(Batch, "step", failing)
    engine = start(dodo)
    with held_up(engine):
        tickets = [engine.submit(request) for request in asked]
    with pytest.raises(MemoryError, match="no room"):
        list(tickets[2])
    assert [ids(list(tickets[i])) for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]


def test_memory_that_runs_out_when_a_row_leaves_ends_no_other_engine(
    dodo: Dodo, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = requests(dodo, 2)
    expected = reference(dodo, short)
    engine = start(dodo)

    def leave(self: BatchCache, row: int) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(BatchCache, "leave", leave)
        with held_up(engine):
            tickets = [engine.submit(request) for request in (short, dataclasses.replace(long, max_new_tokens=100))]
        assert ids(list(tickets[0])) == expected
        with pytest.raises(MemoryError, match="no room"):
            list(tickets[1])
    assert ids(list(engine.submit(short))) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [1, engine_module.PROMPT_TOKENS], ids=["decoding", "reading"])
def test_logits_that_are_no_numbers_end_their_row_alone_greedy_or_sampled(
    tokens: int, value: float, dodo: Dodo, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(dodo, 4)
    asked[2] = dataclasses.replace(asked[2], temperature=1.0)
    expected = [reference(dodo, asked[i]) for i in (0, 3)]
    whole = Batch.step

    def step(self: Batch, count: int = 1) -> torch.Tensor:
        logits = whole(self, count)
        for i, row in enumerate(self.rows):
            if count == tokens and any(row.request is bad for bad in asked[1:3]):
                logits[i, 5] = value
        return logits

    monkeypatch.setattr(Batch, "step", step)
    engine = start(dodo)
    with held_up(engine):
        tickets = [engine.submit(request) for request in asked]
    for ticket in tickets[1:3]:
        with pytest.raises(DodoError, match="no numbers"):
            list(ticket)
    assert [ids(list(tickets[i])) for i in (0, 3)] == expected


def test_a_prompt_that_fails_fails_alone(dodo: Dodo, start: Callable[..., Engine]) -> None:
    asked = requests(dodo, 3)
    good = asked[1].nuggets
    assert good is not None
    damaged = dataclasses.replace(good, values=good.values[..., :3, :])
    engine = start(dodo)
    with held_up(engine):
        tickets = [engine.submit(r) for r in (asked[0], dataclasses.replace(asked[1], nuggets=damaged), asked[2])]
    with pytest.raises(RuntimeError):
        list(tickets[1])
    assert [ids(list(tickets[i])) for i in (0, 2)] == [reference(dodo, asked[i]) for i in (0, 2)]


def test_a_pass_that_fails_ends_its_rows_and_the_engine_goes_on(
    dodo: Dodo, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(dodo)
    request = requests(dodo, 1)[0]
    expected = reference(dodo, request)

    whole = Batch.step

    def step(self: Batch, tokens: int = 1) -> torch.Tensor:
        if tokens == 1:
            raise MemoryError("no room")
        return whole(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr("dodo.serving.batch.Batch.step", step)
        with pytest.raises(MemoryError, match="no room"):
            list(engine.submit(request))
    assert ids(list(engine.submit(request))) == expected


def test_closing_ends_what_is_unanswered_with_an_error(dodo: Dodo, start: Callable[..., Engine]) -> None:
    engine = start(dodo, max_batch=1)
    first, second = requests(dodo, 2, max_new_tokens=150)
    running, waiting = engine.submit(first), engine.submit(second)
    next(running)
    with held_up(engine):
        job = engine.run(len, "abc")
        closing = threading.Thread(target=engine.close)
        closing.start()
        eventually(lambda: engine._closed)
    closing.join(30)
    for ticket in (running, waiting):
        with pytest.raises(EngineClosed):
            list(ticket)
    with pytest.raises(EngineClosed):
        job.result(0)
    with pytest.raises(EngineClosed):
        engine.submit(first)
    with pytest.raises(EngineClosed):
        engine.run(len, "abc")
    engine.close()


# -- room


def test_memory_is_given_back_when_all_have_left(dodo: Dodo, start: Callable[..., Engine]) -> None:
    engine = start(dodo)
    with held_up(engine):
        tickets = [engine.submit(request) for request in requests(dodo, 8)]
    sizes = []
    for ticket in tickets:
        for _ in ticket:
            sizes.append(engine._over_nuggets.cache.allocated)
    assert max(rows for rows, _ in sizes) == 8
    assert eventually(lambda: engine.stats().running == 0)
    assert engine.run(lambda: engine._over_nuggets.cache.allocated).result(30) == (0, 0)


def test_requests_wait_until_there_is_room_for_their_states(dodo: Dodo, start: Callable[..., Engine]) -> None:
    asked = requests(dodo, 3)
    expected = [reference(dodo, request) for request in asked]
    engine = start(dodo, max_states=max(request.states for request in asked))
    seen = []
    hook = dodo.compressor.base.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    with held_up(engine):
        tickets = [engine.submit(request) for request in asked]
    assert [ids(list(ticket)) for ticket in tickets] == expected
    hook.remove()
    assert set(seen) == {1}
    with pytest.raises(InputError, match="holds at most"):
        engine.submit(dataclasses.replace(asked[2], max_new_tokens=100))


def test_where_nobody_waits_no_room_is_made_for_prompts(
    dodo: Dodo, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, made = start(dodo), []

    def noted(*args: Any, **settings: Any) -> Batch:
        made.append(1)
        return Batch(*args, **settings)

    monkeypatch.setattr(engine_module, "Batch", noted)
    assert len(list(engine.submit(requests(dodo, 1)[0]))) == NEW
    assert len(made) == 1


# -- across threads


def test_tickets_are_read_from_an_event_loop_in_another_thread(dodo: Dodo, start: Callable[..., Engine]) -> None:
    asked = requests(dodo, 6)
    engine = start(dodo, max_batch=4)

    async def read(request: Request) -> list[int]:
        return ids([piece async for piece in engine.submit(request)])

    async def read_all() -> list[list[int]]:
        return await asyncio.gather(*map(read, asked))

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: asyncio.run(read_all())).result(60)
    assert made == [reference(dodo, request) for request in asked]


def test_a_reader_that_gives_up_waiting_can_go_on_later(dodo: Dodo, start: Callable[..., Engine]) -> None:
    engine = start(dodo)
    request = requests(dodo, 1)[0]

    async def read() -> list[int]:
        with held_up(engine):
            ticket: Ticket = engine.submit(request)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ticket.__anext__(), 0.01)
        return ids([piece async for piece in ticket])

    assert asyncio.run(read()) == reference(dodo, request)


def test_other_work_runs_on_the_models_thread_between_tokens(dodo: Dodo, start: Callable[..., Engine]) -> None:
    request = dataclasses.replace(requests(dodo, 1)[0], max_new_tokens=100)
    expected, answer = context(dodo, 3), reference(dodo, request)
    engine = start(dodo)
    ticket = engine.submit(request)
    first = next(ticket)
    made = engine.run(context, dodo, 3).result(60)
    assert engine.run(lambda: threading.current_thread().name).result(60) == "dodo-engine"
    assert engine.stats().running == 1
    torch.testing.assert_close(made.keys, expected.keys)
    with pytest.raises(ZeroDivisionError):
        engine.run(divmod, 1, 0).result(60)
    assert ids([first, *ticket]) == answer


@contextmanager
def slow(dodo: Dodo) -> Iterator[list[float]]:
    """Within it, each layer takes its time over long texts; says when each of them was at it."""
    begun: list[float] = []

    def wait(_: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if args[0].shape[1] > 50:
            begun.append(time.monotonic())
            time.sleep(0.05)

    hooks = [layer.register_forward_pre_hook(wait, with_kwargs=True) for layer in layers_of(dodo.compressor.base)]
    yield begun
    for hook in hooks:
        hook.remove()


def test_answers_go_on_while_a_long_text_is_compressed_and_both_are_as_if_alone(dodo: Dodo, start: Callable[..., Engine]) -> None:
    request = dataclasses.replace(requests(dodo, 1)[0], max_new_tokens=150)
    answer, expected = reference(dodo, request), context(dodo, 3, length=100)
    engine, shares = start(dodo), list[float]()

    def compress() -> tuple[int, Nuggets, int]:
        before = engine.stats().tokens
        with reporting(dodo.compressor, 100, shares.append):
            made = context(dodo, 3, length=100)
        return before, made, engine.stats().tokens

    with slow(dodo) as begun:
        ticket = engine.submit(request)
        first = next(ticket)
        before, made, after = engine.run(compress).result(60)
    assert len(begun) == 6  # two layers for the features, four to encode
    assert after - before >= 2  # half of the time is theirs
    assert torch.equal(made.keys, expected.keys) and torch.equal(made.indices, expected.indices)
    assert shares == sorted(shares) and shares[-1] == 1 and len(shares) == 5  # the last layer ends early
    assert ids([first, *ticket]) == answer


def test_a_question_that_comes_while_a_long_text_is_compressed_is_answered_before_it_is_done(
    dodo: Dodo, start: Callable[..., Engine]
) -> None:
    request = requests(dodo, 1)[0]
    expected = reference(dodo, request)
    engine = start(dodo)
    with slow(dodo) as begun:
        compressing = engine.run(context, dodo, 3)
        other = engine.run(lambda: context(dodo, 4, length=100))
        assert eventually(lambda: len(begun) >= 1)
        ticket = engine.submit(dataclasses.replace(request, max_new_tokens=1))
        assert ids(list(ticket)) == expected[:1]
        assert compressing.done() and not other.done()
        other.result(60)


def test_work_that_is_cancelled_or_that_closing_meets_ends_at_the_next_layer(dodo: Dodo, start: Callable[..., Engine]) -> None:
    engine = start(dodo)
    for stop, error in ((None, CancelledError), (engine.close, EngineClosed)):
        with slow(dodo) as begun:
            compressing = engine.run(lambda: context(dodo, 4, length=100))
            assert eventually(lambda begun=begun: len(begun) >= 1)
            (stop or compressing.cancel)()
            with pytest.raises(error):
                compressing.result(60)
            assert len(begun) < 6


# -- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": []}, "the prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_a_request_out_of_range_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Request(**({"nuggets": None, "input_ids": [3], "max_new_tokens": 1} | change))


def test_what_the_model_can_not_read_is_refused(dodo: Dodo, start: Callable[..., Engine]) -> None:
    engine, request = start(dodo), requests(dodo, 1)[0]
    assert request.nuggets is not None
    with pytest.raises(InputError, match="token ids"):
        engine.submit(dataclasses.replace(request, input_ids=[97]))
    with pytest.raises(WindowError, match="256"):
        engine.submit(dataclasses.replace(request, max_new_tokens=240))
    other = dataclasses.replace(request.nuggets.fingerprint, adapter="another")
    with pytest.raises(FingerprintMismatch, match="compressed text"):
        engine.submit(dataclasses.replace(request, nuggets=dataclasses.replace(request.nuggets, fingerprint=other)))
    with pytest.raises(InputError, match="max_batch"):
        Engine(dodo, max_batch=0)

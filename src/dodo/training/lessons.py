"""What is taught before the first step: the scorer, how surprising each token is to the base, what it costs to lose it, and what
questions ask for; the memory of ICAE, to be read.

Beyond the paper, whose scorer learns by the straight-through term alone. What can't be guessed from the tokens before it must
be in the nuggets, so there they should be dense, and an untrained scorer's selection is worse than a fixed stride; surprisal
comes from the base itself, adapters off. What losing a token costs comes from trained adapters, and is nearer to the purpose.
What questions ask for is something else: scores fitted to surprisal tell nothing of it.

The decoder of ICAE is the frozen base, which knows how to read embeddings of tokens and nothing else: of a text's own embeddings,
it rebuilds most at once, of anything that is not near to them nothing, and then no loss tells the encoder the way.

Shapes: B texts, T tokens.
"""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import get_args

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dodo.adapters import PHI
from dodo.architecture import backbone, token_nats
from dodo.compressor import Compressor
from dodo.config import Use
from dodo.coverage import TEMPER, lost_share
from dodo.data.batches import Batch
from dodo.errors import InputError
from dodo.icae import Icae

__all__ = [
    "answers_in",
    "cost_of_loss",
    "embedding_loss",
    "learn_asked",
    "learn_cost",
    "learn_embeddings",
    "learn_surprisal",
    "surprisal",
    "surprisal_loss",
]

LARGEST_SCORE = 4.0  # e^4 = 55 nats; beyond it the exponential goes on as a straight line


@torch.no_grad()
def surprisal(compressor: Compressor, input_ids: Tensor) -> Tensor:
    """-log p(x_i | x_<i) of the base, in nats, for the tokens after the first.

    Args:
        input_ids: int64 [B, T], without padding.

    Returns:
        fp32 [B, T - 1].
    """
    with compressor.adapters.use(None):
        states = backbone(compressor.base)(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    return token_nats(compressor.base, states, input_ids[:, 1:])


def surprisal_loss(compressor: Compressor, input_ids: Tensor) -> Tensor:
    """Poisson loss of exp(score) against the surprisal of each token; its gradient goes to the scorer alone. Where questions have
    a score of their own, it learns the same."""
    wanted = surprisal(compressor, input_ids)
    fits: list[Tensor] = []
    for use in get_args(Use) if compressor.scorer.by_use else ("text",):
        scores = compressor.score(input_ids, use)[:, 1:]
        within = scores.clamp(max=LARGEST_SCORE)
        fits.append((within.exp() + math.exp(LARGEST_SCORE) * (scores - within) - wanted * scores).mean())
    return torch.stack(fits).mean()


def learn_surprisal(compressor: Compressor, batches: Sequence[Batch], *, lr: float = 1e-3) -> float:
    """Fit the scorer to surprisal, one step per batch, the rate going linearly to zero.

    Args:
        batches: their documents are read, all of one length.

    Returns:
        Mean loss over the last tenth of the steps.
    """
    return _learn(
        compressor.scorer.parameters(), (surprisal_loss(compressor, batch.documents) for batch in batches), len(batches), lr
    )


@torch.no_grad()
def cost_of_loss(compressor: Compressor, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """What tokens cost in rebuilding, of which some are lost, for nuggets are taken at random: one in one to two times `reach`.

    Args:
        batch: of texts to be rebuilt.

    Returns:
        fp32 [B, T] twice: -log p of each token of the documents in nats, and the share to which it is lost; 0 for a BOS token.
    """
    reach = compressor.config.reach
    documents, real = batch.documents, batch.document_mask
    at_random = torch.from_numpy(rng.random(documents.shape)).to(documents.device)
    nuggets = compressor.encode(documents, real, ratio=float(rng.uniform(1, 2)) * reach, select_by=at_random)
    states = compressor.decode(nuggets, batch.decoder, batch.decoder_mask, soft_token=True, states=True)
    each = [token_nats(compressor.base, row[:-1], wanted[:-1]) for row, wanted in zip(states, batch.targets, strict=True)]
    losses = torch.zeros(documents.shape, device=documents.device)
    shares = torch.zeros_like(losses)
    first = documents.shape[1] - batch.decoder.shape[1]  # 1 behind a BOS token
    for row, loss in enumerate(each):
        losses[row, first:] = loss
        places = nuggets.indices[row][nuggets.mask[row]].cpu().numpy()
        tokens = np.arange(first, documents.shape[1])
        distance = places[np.searchsorted(places, tokens)] - tokens  # the last token is always a nugget
        shares[row, first:] = torch.from_numpy(lost_share(distance, reach)).to(losses)
    return losses, shares


def learn_cost(compressor: Compressor, batches: Sequence[Batch], *, seed: int = 0, lr: float = 1e-3) -> float:
    """Fit the scorer to what a token costs that is lost, one step per batch, the rate going linearly to zero.

    A Poisson regression of the losses of these adapters in rebuilding: a token that is lost to a share costs so much of
    exp(TEMPER s), as selection by coverage has it. Where questions have a score of their own, it learns the same.

    Args:
        batches: of texts to be rebuilt.
        seed: of the random nuggets.

    Returns:
        Mean loss over the last tenth of the steps.
    """

    def loss(number: int, batch: Batch) -> Tensor:
        losses, shares = cost_of_loss(compressor, batch, np.random.default_rng((seed, number)))
        fits: list[Tensor] = []
        for use in get_args(Use) if compressor.scorer.by_use else ("text",):
            scores = TEMPER * compressor.score(batch.documents, use)
            fits.append((shares * scores.exp() - losses * scores).sum() / shares.sum())
        return torch.stack(fits).mean()

    return _learn(compressor.scorer.parameters(), (loss(number, batch) for number, batch in enumerate(batches)), len(batches), lr)


def answers_in(tokenizer: PreTrainedTokenizerBase, batch: Batch) -> Tensor:
    """Where in the documents of a batch of questions their answers stand, word for word, wherever they do.

    A document that the tokenizer does not turn into the same tokens once more has none.

    Returns:
        bool [B, T].

    Raises:
        InputError: a tokenizer that can't say where its tokens stand.
    """
    if not tokenizer.is_fast:
        raise InputError(f"{type(tokenizer).__name__} can't say where its tokens stand in a text; a fast tokenizer is needed")
    found = torch.zeros_like(batch.document_mask)
    answers: dict[int, set[str]] = {}
    for question, row in enumerate(range(len(batch.targets)) if batch.rows is None else batch.rows.tolist()):
        wanted = batch.targets[question]
        ids = wanted[wanted != -100][:-1].tolist()  # without EOS
        answers.setdefault(row, set()).add(str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)).strip())
    for row, mine in answers.items():
        ids = batch.documents[row][batch.document_mask[row]].tolist()
        first = int(ids[:1] == [tokenizer.bos_token_id])
        text = str(tokenizer.decode(ids[first:], clean_up_tokenization_spaces=False))
        literally = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        again = tokenizer(text, return_offsets_mapping=True, **literally)
        if again["input_ids"] != ids[first:]:
            continue
        begins, ends = torch.tensor(again["offset_mapping"]).unbind(-1)
        for answer in filter(None, mine):
            for at in re.finditer(re.escape(answer), text):
                found[row, first : len(ids)] |= (begins < at.end()) & (ends > at.start())
    return found


def learn_asked(
    compressor: Compressor, tokenizer: PreTrainedTokenizerBase, batches: Sequence[Batch], *, asked: float, lr: float = 1e-3
) -> float:
    """Add to what the scorer knows which tokens are asked for, one step per batch, the rate going linearly to zero.

    A Poisson regression on what a lost token costs in selection by coverage, exp(TEMPER s). Where one score serves all uses, it
    is fitted to what it was, and `asked` more where an answer stands: a token that answers with probability p comes to asked p
    more. Where questions have a score of their own, that is fitted to the cost c for the text, and `asked` times as much more
    where an answer stands: it comes to c (1 + asked p). The score for the text is fitted to what it was.

    Args:
        batches: of questions.
        asked: above 0.

    Returns:
        Mean loss over the last tenth of the steps.
    """
    with torch.no_grad():
        before = [(TEMPER * compressor.score(batch.documents)).exp() for batch in batches]

    def loss(batch: Batch, known: Tensor) -> Tensor:
        found = asked * answers_in(tokenizer, batch)
        if not compressor.scorer.by_use:
            return fitted(batch, "questions", known + found)
        return fitted(batch, "text", known) + fitted(batch, "questions", known * (1 + found))

    def fitted(batch: Batch, use: Use, wanted: Tensor) -> Tensor:
        scores = TEMPER * compressor.score(batch.documents, use)
        return (scores.exp() - wanted * scores)[batch.document_mask].mean()

    return _learn(compressor.scorer.parameters(), map(loss, batches, before), len(batches), lr)


def embedding_loss(compressor: Compressor, batch: Batch) -> Tensor:
    """1 - cosine between each memory slot, one for each token, and the token's embedding, the mean; with gradients to phi and
    memory tokens."""
    model = Icae(compressor)
    most = len(model.tokens)
    documents, real = batch.documents[:, :most], batch.document_mask[:, :most]
    memory = model.encode(documents, real, slots=real.sum(-1))
    wanted = compressor.base.get_input_embeddings()(documents)
    near = torch.nn.functional.cosine_similarity(memory.states.float(), wanted[:, : memory.states.shape[1]].float(), dim=-1)
    return 1 - near[real[:, : near.shape[1]]].mean()


def learn_embeddings(compressor: Compressor, batches: Collection[Batch], *, lr: float = 3e-3) -> float:
    """Teach phi and aligned memory tokens to give each token's embedding back, one step per batch, the rate going to zero.

    Args:
        batches: their documents are read, one slot for each token, as far as there are memory tokens.

    Returns:
        Mean loss over the last tenth of the steps.
    """
    assert compressor.memory is not None
    learners = [*compressor.adapters.parameters(PHI), compressor.memory.embeddings]
    return _learn(learners, (embedding_loss(compressor, batch) for batch in batches), len(batches), lr)


def _learn(learners: Iterable[torch.nn.Parameter], losses: Iterable[Tensor], steps: int, lr: float) -> float:
    """A step for each loss, which is not worked out before its turn."""
    optimizer = torch.optim.AdamW(learners, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    found: list[float] = []
    for step, loss in enumerate(losses):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 10) * (1 - step / steps)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    last = found[-max(1, len(found) // 10) :]
    return sum(last) / len(last)

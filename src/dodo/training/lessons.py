"""What the scorer is taught before the first step: how surprising each token is to the base, and what questions ask for.

Beyond the paper, whose scorer learns by the straight-through term alone. What can't be guessed from the tokens before it must
be in the nuggets, so there they should be dense, and an untrained scorer's selection is worse than a fixed stride; surprisal
comes from the base itself, adapters off. What questions ask for is something else: scores fitted to surprisal tell nothing of it.

Shapes: B texts, T tokens.
"""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dodo.architecture import backbone
from dodo.compressor import Compressor
from dodo.data.batches import Batch
from dodo.errors import InputError
from dodo.selection import TEMPER

__all__ = ["answers_in", "learn_asked", "learn_surprisal", "surprisal", "surprisal_loss"]

CHUNK = 256
LARGEST_SCORE = 4.0  # e^4 = 55 nats


@torch.no_grad()
def surprisal(compressor: Compressor, input_ids: Tensor) -> Tensor:
    """-log p(x_i | x_<i) of the base, in nats, for the tokens after the first.

    Args:
        input_ids: int64 [B, T], without padding.

    Returns:
        fp32 [B, T - 1].
    """
    head = compressor.base.get_output_embeddings()
    with compressor.adapters.use(None):
        states = backbone(compressor.base)(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    states_ND, targets_N = states.flatten(0, 1), input_ids[:, 1:].flatten()
    losses = [
        torch.nn.functional.cross_entropy(head(some).float(), wanted, reduction="none")
        for some, wanted in zip(states_ND.split(CHUNK), targets_N.split(CHUNK), strict=True)
    ]
    return torch.cat(losses).view(input_ids.shape[0], -1)


def surprisal_loss(compressor: Compressor, input_ids: Tensor) -> Tensor:
    """Poisson loss of exp(score) against the surprisal of each token; its gradient goes to the scorer alone."""
    wanted = surprisal(compressor, input_ids)
    scores = compressor.score(input_ids)[:, 1:]
    return (scores.clamp(max=LARGEST_SCORE).exp() - wanted * scores).mean()


def learn_surprisal(compressor: Compressor, batches: Sequence[Batch], *, lr: float = 1e-3) -> float:
    """Fit the scorer to surprisal, one step per batch, the rate going linearly to zero.

    Args:
        batches: their documents are read, all of one length.

    Returns:
        Mean loss over the last tenth of the steps.
    """
    return _learn(compressor, (surprisal_loss(compressor, batch.documents) for batch in batches), len(batches), lr)


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

    A Poisson regression on what a lost token costs in selection by coverage, exp(TEMPER s): it is fitted to what it was, and
    `asked` more where an answer stands. So a token that answers with probability p comes to asked p more.

    Args:
        batches: of questions.
        asked: above 0.

    Returns:
        Mean loss over the last tenth of the steps.
    """
    with torch.no_grad():
        before = [(TEMPER * compressor.score(batch.documents)).exp() for batch in batches]

    def loss(batch: Batch, known: Tensor) -> Tensor:
        scores = TEMPER * compressor.score(batch.documents)
        wanted = known + asked * answers_in(tokenizer, batch)
        return (scores.exp() - wanted * scores)[batch.document_mask].mean()

    return _learn(compressor, map(loss, batches, before), len(batches), lr)


def _learn(compressor: Compressor, losses: Iterable[Tensor], steps: int, lr: float) -> float:
    """A step for each loss, which is not worked out before its turn."""
    optimizer = torch.optim.AdamW(compressor.scorer.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
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

"""How good the compressor is on unseen texts: loss and accuracy per length, ratio and way of selecting; BLEU of rebuilt texts.

Selection of checkpoints goes by this, never by a test set.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch

from dodo.data.batches import Batch, Objective, QuestionSource, TextSource
from dodo.errors import InputError
from dodo.icae import Icae
from dodo.model import Dodo
from dodo.training.objectives import Way, batch_loss, encode, remember
from dodo.training.recipe import Mixture, Running

__all__ = ["Rebuilt", "fixed_batches", "question_batches", "rebuild", "validate"]


@dataclass(frozen=True)
class Rebuilt:
    """Texts and their greedy reconstructions. bleu: 0 to 100, sacrebleu's corpus BLEU with 13a tokens."""

    bleu: float
    texts: list[str]
    rebuilt: list[str]


def fixed_batches(text: TextSource, mixture: Mixture, running: Running, *, seed: int = 0) -> dict[str, Batch]:
    """The same batches for every validation, one for each text objective of the mixture, length and ratio; the texts are the
    same at each ratio. Distillation is checked by the loss of continuation, recall beside autoencoding by the latter's.

    Raises:
        InputError: no text is as long as one of the lengths, with something behind it for a continuation.
    """
    made: dict[str, Batch] = {}
    if not any(getattr(mixture, name) for name in get_args(Objective) if name != "question"):
        return made
    behind = 2 if mixture.continuation or mixture.distillation else 0
    if longer := sorted(length for length in running.validation_lengths if length + behind > text.longest):
        more = f" and {behind} to go on with" if behind else ""
        lengths = ", ".join(map(str, longer))
        raise InputError(
            f"running.validation_lengths: no held-out text has {lengths} tokens{more}; the longest has {text.longest}"
        )
    for length in running.validation_lengths:
        for name, batch in _of_length(text, mixture, running.validation_texts, length, seed).items():
            for ratio in running.validation_ratios:
                made[f"{name}n{length}/r{ratio:g}"] = dataclasses.replace(batch, ratio=ratio)
    return made


def _of_length(text: TextSource, mixture: Mixture, texts: int, length: int, seed: int) -> dict[str, Batch]:
    def rng() -> np.random.Generator:
        return np.random.default_rng((seed, length))

    made = {}
    if mixture.autoencoding:
        made[""] = text.autoencoding(texts, length, 1.0, rng())
    elif mixture.recall:
        made["recall/"] = text.recall(texts, length, 1.0, rng())
    if mixture.continuation or mixture.distillation:
        following = max(2, min(mixture.following, length // 2, text.longest - length))
        made["continuation/"] = text.continuation(texts, length, following, 1.0, rng())
    if mixture.autoregressive:
        window = round(mixture.window.mode)
        held, segment = mixture.nuggets(window), mixture.segment
        made["autoregressive/"] = text.autoregressive(texts, length, 1.0, rng(), window=window, segment=segment, nuggets=held)
    return made


def question_batches(questions: QuestionSource, mixture: Mixture, running: Running, *, seed: int = 0) -> dict[str, Batch]:
    """Likewise for questions: `validation_texts` documents, or all, of the median length or little more, two questions each; and,
    if questions are trained among other paragraphs, a quarter as many documents as long as these get."""
    count, middle, ratios = running.validation_texts, len(questions) // 2, running.validation_ratios
    made = {"question": questions.batch(count * questions.median, 2, 1.0, np.random.default_rng((seed, 1)), at=middle)}
    if mixture.among:
        most, few = round(mixture.among.high), max(1, count // 4)
        made[f"question/n{most}"] = questions.batch(few * most, 2, 1.0, np.random.default_rng((seed, 2)), at=middle, among=most)
    return {f"{name}/r{ratio:g}": dataclasses.replace(batch, ratio=ratio) for name, batch in made.items() for ratio in ratios}


@torch.no_grad()
def validate(dodo: Dodo, batches: dict[str, Batch], ways: Sequence[Way] = ("scorer", "stride")) -> dict[str, float]:
    """Loss (nats per token) and accuracy of each batch: `loss/n64/r5/scorer`, `accuracy/...`; `loss` is the first way's mean."""
    found: dict[str, float] = {}
    for name, batch in batches.items():
        for way in ways:
            loss = batch_loss(dodo.compressor, batch, way)
            found[f"loss/{name}/{way}"] = loss.sum / loss.tokens
            found[f"accuracy/{name}/{way}"] = loss.correct / loss.tokens
    for way in ways:
        losses = [value for key, value in found.items() if key.startswith("loss/") and key.endswith(way)]
        found["loss" if way == ways[0] else f"loss/{way}"] = sum(losses) / len(losses)
    return found


@torch.no_grad()
def rebuild(dodo: Dodo, batch: Batch, *, texts: int, way: Way = "scorer") -> Rebuilt:
    """Greedy reconstruction of the first texts of an autoencoding batch."""
    import sacrebleu

    few = dataclasses.replace(
        batch,
        documents=batch.documents[:texts],
        document_mask=batch.document_mask[:texts],
        decoder=batch.decoder[:texts],
    )
    longest = few.decoder.shape[1] + 1
    if way == "memory":
        new = Icae(dodo.compressor).generate_ids(remember(dodo.compressor, few), None, max_new_tokens=longest)
    else:
        dodo.stamp()  # the adapters have changed since
        new = dodo.generate_ids(dodo.adopt(encode(dodo.compressor, few, way)), None, max_new_tokens=longest)
    originals = dodo.tokenizer.batch_decode(few.decoder.tolist(), clean_up_tokenization_spaces=False)
    rebuilt = dodo.tokenizer.batch_decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Rebuilt(sacrebleu.corpus_bleu(rebuilt, [originals]).score, originals, rebuilt)

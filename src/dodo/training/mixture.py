"""From a recipe to its batches and ways of selecting, each a function of the step only.

Paper: Sections 4 and 6 (which objectives at what lengths); the mixture and the handover are beyond it.
"""

import dataclasses
from typing import get_args

import numpy as np

from dodo.data.batches import Batch, Draw, Objective, QuestionSource, TextSource, draw_skewed
from dodo.training.objectives import Way
from dodo.training.recipe import Recipe

__all__ = ["BatchMaker", "way_at"]

_OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


class BatchMaker:
    """Makes batch number i of a run.

    Args:
        recipe: its mixture, token counts and seed.
        text: None if no objective reads plain text.
        questions: None if there are none.
    """

    def __init__(self, recipe: Recipe, text: TextSource | None, questions: QuestionSource | None) -> None:
        self.recipe, self.text, self.questions = recipe, text, questions
        weights = np.array([getattr(recipe.mixture, name) for name in _OBJECTIVES])
        self._weights = weights / weights.sum()
        self._divisor: tuple[int, float] | None = None

    def __call__(self, number: int) -> Batch:
        """Batch `number`, the same whenever it is asked for.

        The batches of one step have one objective and one length: processes that work side by side take as long. They have one
        divisor, so that each token with a loss counts alike in the step, in whichever batch it is.
        """
        batch, per_step = self._made(number), self.recipe.running.batches_per_step
        if per_step == 1:
            return batch
        step = number // per_step
        if self._divisor is None or self._divisor[0] != step:
            others = [batch if i == number else self._made(i) for i in range(step * per_step, (step + 1) * per_step)]
            self._divisor = step, sum(other.loss_tokens for other in others) / per_step
        return dataclasses.replace(batch, divisor=self._divisor[1])

    def _made(self, number: int) -> Batch:
        seed, step = self.recipe.running.seed, number // self.recipe.running.batches_per_step
        shared, rng = np.random.default_rng((seed, step, 3)), np.random.default_rng((seed, number))
        mixture, tokens = self.recipe.mixture, self.recipe.running.tokens
        objective = _OBJECTIVES[int(shared.choice(len(_OBJECTIVES), p=self._weights))]
        ratio = round(draw_skewed(self._ratio_range(step, objective), rng), 2)
        if objective == "question":
            assert self.questions is not None
            near, last = int(shared.integers(len(self.questions))), len(self.questions) - 1
            at = int(rng.integers(max(0, near - 100), min(last, near + 100) + 1))  # others of about that length
            among = round(draw_skewed(mixture.among, shared)) if mixture.among else 0
            batch = self.questions.batch(tokens, mixture.questions_per_document, ratio, rng, at=at, among=among)
        else:
            assert self.text is not None
            drawn = {"autoencoding": mixture.length, "recall": mixture.length, "autoregressive": mixture.whole}
            length = min(round(draw_skewed(drawn.get(objective, mixture.context), shared)), self.text.usual)
            count = max(1, round(tokens / length))
            if objective == "autoencoding":
                batch = self.text.autoencoding(count, length, ratio, rng)
            elif objective == "recall":
                batch = self.text.recall(count, length, ratio, rng)
            elif objective == "autoregressive":
                window = round(draw_skewed(mixture.window, rng))
                held, segment = mixture.nuggets(window), mixture.segment
                batch = self.text.autoregressive(count, length, ratio, rng, window=window, segment=segment, nuggets=held)
            else:
                following = max(2, min(mixture.following, length // 2))
                length = min(length, self.text.usual - following)
                batch = self.text.continuation(count, length, following, ratio, rng, distil=objective == "distillation")
        return dataclasses.replace(batch, number=number)

    def _ratio_range(self, step: int, objective: Objective) -> Draw:
        mixture = self.recipe.mixture
        ratio = (mixture.question_ratio if objective == "question" else None) or mixture.ratio
        if mixture.ratio_from is None or step >= mixture.ratio_steps:
            return ratio
        done = step / mixture.ratio_steps
        high = min(ratio.high, max(ratio.low, mixture.ratio_from + done * (ratio.high - mixture.ratio_from)))
        return Draw(ratio.low, high, min(ratio.mode, high))


def way_at(recipe: Recipe, number: int) -> Way:
    """How the tokens of batch `number` are selected."""
    if recipe.model == "compressive":
        return "pooled"
    if recipe.model == "icae":
        return "memory"
    if recipe.model == "full":
        return "whole"
    begin, end = recipe.selection.handover
    step = number // recipe.running.batches_per_step
    share = 1.0 if step >= end else 0.0 if step < begin else (step - begin) / (end - begin)
    return "scorer" if np.random.default_rng((recipe.running.seed, number, 1)).random() < share else "stride"

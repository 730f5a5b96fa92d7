"""From a recipe to its batches and ways of selecting, each a function of the step only.

Paper: Section 4 (which objectives at what lengths); the mixture and the handover are beyond it.
"""

import numpy as np
import torch

from dodo.data.batches import Batch, Draw, Objective, QuestionSource, TextSource, draw_skewed
from dodo.training.objectives import Selecting, Way
from dodo.training.recipe import Recipe

__all__ = ["BatchMaker", "selecting_at"]

_OBJECTIVES: tuple[Objective, ...] = ("autoencoding", "continuation", "question", "distillation")


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

    def __call__(self, number: int) -> Batch:
        """Batch `number`, the same whenever it is asked for."""
        import dataclasses

        rng = np.random.default_rng((self.recipe.running.seed, number))
        mixture, tokens = self.recipe.mixture, self.recipe.running.tokens
        objective = _OBJECTIVES[int(rng.choice(len(_OBJECTIVES), p=self._weights))]
        ratio = round(draw_skewed(self._ratio_range(number // self.recipe.running.accumulate), rng), 2)
        if objective == "question":
            assert self.questions is not None
            batch = self.questions.batch(tokens, mixture.questions_per_document, ratio, rng)
        else:
            assert self.text is not None
            drawn = mixture.length if objective == "autoencoding" else mixture.context
            length = min(round(draw_skewed(drawn, rng)), self.text.longest)
            count = max(1, round(tokens / length))
            if objective == "autoencoding":
                batch = self.text.autoencoding(count, length, ratio, rng)
            else:
                following = max(2, min(mixture.following, length // 2))
                length = min(length, self.text.longest - following)
                batch = self.text.continuation(count, length, following, ratio, rng, distil=objective == "distillation")
        return dataclasses.replace(batch, number=number)

    def _ratio_range(self, step: int) -> Draw:
        mixture = self.recipe.mixture
        if mixture.ratio_from is None or step >= mixture.ratio_steps:
            return mixture.ratio
        done = step / mixture.ratio_steps
        high = max(mixture.ratio.low, mixture.ratio_from + done * (mixture.ratio.high - mixture.ratio_from))
        return Draw(mixture.ratio.low, high, min(mixture.ratio.mode, high))


def selecting_at(recipe: Recipe, number: int) -> Selecting:
    """How the tokens of batch `number` are selected."""
    selection = recipe.selection
    step = number // recipe.running.accumulate
    rng = np.random.default_rng((recipe.running.seed, number, 1))
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    begin, end = selection.handover
    done = 1.0 if step >= end else 0.0 if step < begin else (step - begin) / (end - begin)
    share = selection.first_share + done * (1 - selection.first_share)
    noise = selection.noise * max(0.0, 1 - step / selection.noise_until) if selection.noise_until else selection.noise
    if selection.start != "scorer" and rng.random() >= share:
        return Selecting(selection.start, generator=generator)
    way: Way = "best-of-block" if rng.random() < selection.blocks else "scorer"
    return Selecting(way, noise=noise, generator=generator)

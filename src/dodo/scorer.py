"""The scorer: two feed-forward layers that say how much a token is wanted as a nugget.

Paper: Eq. 6; Table 5 (16.8M parameters at d = 4096: Linear(d, d) and Linear(d, 1)). Scores are logits; the sigmoid of Eq. 6
is monotonous, so top-k and thresholds work on them as they are.

Beyond the paper a scorer can have two outputs, one for each use of a text: what is needed to rebuild it or read on, and what
questions about it ask for.
"""

from typing import get_args

import torch
from torch import Tensor, nn

from dodo.config import Use
from dodo.errors import InputError

__all__ = ["Scorer"]


class Scorer(nn.Module):
    """Linear(d, d), ReLU, Linear(d, 1) in fp32, whatever the base's dtype, on features scaled to a mean square of one.

    Args:
        width: d, the base's hidden size.
        by_use: a score for each use, Linear(d, 2), in place of one for all.
        seed: of the initial weights; drawn apart from the global generator.
    """

    def __init__(self, width: int, *, by_use: bool = False, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.hidden = nn.Linear(width, width, dtype=torch.float32)
            self.output = nn.Linear(width, len(get_args(Use)) if by_use else 1, dtype=torch.float32)

    @property
    def by_use(self) -> bool:
        """Whether each use has a score of its own."""
        return self.output.out_features > 1

    def forward(self, features: Tensor, use: Use = "text") -> Tensor:
        """Score each token.

        Args:
            features: [..., d], hidden states after layer iota of the base with adapters off; any floating dtype.
            use: whose score; of no effect where one serves all.

        Returns:
            fp32 [...], one score per token.

        Raises:
            InputError: no such use.
        """
        if use not in get_args(Use):
            raise InputError(f"texts are compressed for {' or '.join(map(repr, get_args(Use)))}, not for {use!r}")
        features = nn.functional.rms_norm(features.to(self.hidden.weight.dtype), features.shape[-1:])
        hidden = torch.relu(self.hidden(features))
        return self.output(hidden)[..., get_args(Use).index(use) if self.by_use else 0]

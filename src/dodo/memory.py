"""Memory tokens: the embeddings that ICAE appends to a text, and how many of them a text gets.

Paper: Section 4.1, the baseline ICAE (Ge et al. 2023), which appends 128 whatever the text's length. Texts that get fewer take
the first ones.

Shapes: B texts, M memory tokens, d width.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dodo.errors import InputError
from dodo.selection import count_nuggets

__all__ = ["MemoryTokens"]


class MemoryTokens(nn.Module):
    """Trained embeddings, fp32 [M, d], whatever the base's dtype.

    Args:
        embeddings: [M, d], floating.
        fixed: every text gets all M; otherwise ceil(n / r) of them, at most M.
        aligned: each stands at the position where its part of the text ends, and what comes out of it is made as long as an
            embedding (see `Icae`); otherwise as in Ge et al.

    Raises:
        InputError: there are none.
    """

    def __init__(self, embeddings: Tensor, *, fixed: bool, aligned: bool = False) -> None:
        super().__init__()
        if embeddings.ndim != 2 or not len(embeddings):
            raise InputError(
                f"memory tokens must be [tokens, width] with at least one token, not of shape {list(embeddings.shape)}"
            )
        self.embeddings = nn.Parameter(embeddings.float())
        self.fixed, self.aligned = fixed, aligned

    @classmethod
    def fresh(cls, base: PreTrainedModel, count: int, *, fixed: bool, aligned: bool = False, seed: int = 0) -> "MemoryTokens":
        """M = `count` untrained ones: drawn from a normal distribution with mean and spread of the base's own embeddings, a tenth
        of the spread where their positions tell them apart."""
        if count < 1:
            raise InputError(f"the number of memory tokens must be at least 1, not {count}")
        weight = base.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        own = weight.detach().float()
        noise = torch.randn(count, own.shape[1], generator=torch.Generator().manual_seed(seed))
        spread = own.std(0) * (0.1 if aligned else 1.0)
        return cls(own.mean(0) + spread * noise.to(own.device), fixed=fixed, aligned=aligned)

    def __len__(self) -> int:
        return len(self.embeddings)

    def counts(self, tokens: Tensor, *, ratio: float) -> Tensor:
        """How many memory tokens texts get.

        Args:
            tokens: int64 [B], n of each text.
            ratio: r; without effect on fixed ones. A text for which M are too few gets M, and so a higher ratio.

        Returns:
            int64 [B].
        """
        found = [len(self) if self.fixed else min(count_nuggets(n, ratio=ratio), len(self)) for n in tokens.tolist()]
        return torch.tensor(found, device=tokens.device)

"""A term that is zero in the forward pass and gives the scorer the gradient of the attention logits.

Paper: Section 2.4, Eq. 17 and 18. Added to the logits of every attention to a nugget, in all layers and heads, the term
s - StopGrad(s) makes autograd sum d loss / d xi over queries, heads and layers into d loss / d s.
"""

from torch import Tensor

__all__ = ["straight_through"]


def straight_through(scores: Tensor) -> Tensor:
    """s - StopGrad(s): exactly zero, with gradient one.

    Args:
        scores: finite, any shape and dtype. s - s is exactly 0 in every floating type, however large s is.

    Returns:
        Zeros of the same shape and dtype, attached to the graph of `scores`.
    """
    return scores - scores.detach()

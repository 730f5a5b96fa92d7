"""Rotary positions: turning cached keys from one position to another.

Rotations add, so a key at position p becomes one at p + delta by one more rotation. This moves documents, joins them, and
makes positions compact. What base needs which frequencies is read off the model in `architecture`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rotary"]


@dataclass(frozen=True)
class Rotary:
    """Rotation frequencies of a base, all that is needed to move its keys.

    frequencies: one fp32 [R / 2] tensor per distinct rotation, radians per position; R of the head's D dimensions turn.
    layers: for each layer, which of `frequencies` it uses, or -1 where it has no rotation.
    """

    frequencies: tuple[Tensor, ...]
    layers: tuple[int, ...]

    def rotate(self, keys: Tensor, delta: Tensor, *, layer: int) -> Tensor:
        """Turn keys by `delta` positions.

        Args:
            keys: [B, H, K, D], any floating dtype; computed in fp32.
            delta: int64 [B, K], positions to add; may be negative.
            layer: whose keys they are.

        Returns:
            A new tensor like `keys`.
        """
        if self.layers[layer] < 0:
            return keys.clone()
        where = "cpu" if keys.device.type == "mps" else keys.device  # not every device has fp64
        frequencies = self.frequencies[self.layers[layer]].to(where)
        half = frequencies.shape[0]
        angle = delta.to(where).double()[:, None, :, None] * frequencies.double()  # [B, 1, K, R / 2]
        cos, sin = angle.cos().float().to(keys.device), angle.sin().float().to(keys.device)
        turning = keys[..., : 2 * half].float()
        first, second = turning[..., :half], turning[..., half:]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(keys.dtype)
        return torch.cat([turned, keys[..., 2 * half :]], dim=-1)

"""Nuggets: the keys and values, in every layer, of the few tokens that stand for a text.

Paper: z_{1:k}^{1:L} of Eq. 5, 7 and 14. Plain tensors and what is needed to use them elsewhere: positions, scores, token
ids, rotation frequencies, fingerprints. The file format is in `nuggets_file`.

Shapes: L layers, B texts, H key/value heads, K states (nuggets, and the kept first token if there is one), D head width.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dodo.config import PositionScheme, Use
from dodo.errors import FingerprintMismatch, InputError
from dodo.rotary import Rotary

if TYPE_CHECKING:
    from dodo.attention import NuggetCache
    from dodo.nuggets_file import StorageType

__all__ = ["Fingerprint", "Nuggets"]


@dataclass(frozen=True)
class Fingerprint:
    """What nuggets belong to: short hashes of the base's weights, of its tokenizer, and of the adapters and scorer."""

    base: str
    tokenizer: str
    adapter: str

    def check(self, other: "Fingerprint", *, what: str) -> None:
        """Raise FingerprintMismatch, naming the parts, if `other` differs."""
        names = [f.name for f in dataclasses.fields(self)]
        if differing := [name for name in names if getattr(self, name) != getattr(other, name)]:
            detail = ", ".join(f"{n} {getattr(other, n)} instead of {getattr(self, n)}" for n in differing)
            raise FingerprintMismatch(
                f"{what} was made with another {' and '.join(differing)} ({detail}); "
                "take the model that it was made with, compress the text again, or override if you know that they agree"
            )


@dataclass(frozen=True, eq=False)
class Nuggets:
    """A batch of compressed texts. Never changed in place; asking questions leaves it as it is.

    keys, values: [L, B, H, K, D], rotated to `positions`; zeros where `mask` is false.
    positions: int64 [B, K], rotary positions of the keys.
    indices: int64 [B, K], places of the selected tokens in the text, first token 0, ascending.
    scores: fp32 [B, K].
    token_ids: int64 [B, K].
    mask: bool [B, K], false for padding, which is on the right.
    lengths: int64 [B], n: tokens of each text that competed for selection (a kept first token is not among them).
    next_positions: int64 [B], where the decoder goes on.
    sinks: int64 [B], how many of each text's states are kept first tokens, beyond the k nuggets.
    scheme: how `positions` were given.
    ratio: the ratio that was asked for, or None if a number was.
    use: what the scorer chose them for; None if one score serves all uses, or it did not choose them.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    indices: Tensor
    scores: Tensor
    token_ids: Tensor
    mask: Tensor
    lengths: Tensor
    next_positions: Tensor
    sinks: Tensor
    scheme: PositionScheme
    ratio: float | None
    rotary: Rotary
    fingerprint: Fingerprint
    use: Use | None = None

    def __repr__(self) -> str:
        n, k = self.lengths.tolist(), self.k.tolist()
        shown = (n[0], k[0]) if len(n) == 1 else (n, k)
        return f"Nuggets(n={shown[0]}, k={shown[1]}, ratio={self.achieved_ratio:.2f}, {self.nbytes:,} bytes, {self.dtype})"

    # -- sizes

    @property
    def batch_size(self) -> int:
        """B, number of texts."""
        return self.keys.shape[1]

    @property
    def k(self) -> Tensor:
        """int64 [B], nuggets of each text, kept first tokens not counted."""
        return self.mask.sum(-1) - self.sinks

    @property
    def states(self) -> Tensor:
        """int64 [B], states held for each text: nuggets and kept first tokens."""
        return self.mask.sum(-1)

    @property
    def achieved_ratio(self) -> float:
        """Tokens of the texts over states held; kept first tokens are in both."""
        return float(self._tokens) / float(self.states.sum())

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.keys.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held, padding left out."""
        return self._bytes_per_state * int(self.states.sum())

    @property
    def full_cache_nbytes(self) -> int:
        """Bytes of the keys and values of all tokens of the texts, in the same dtype: what an ordinary cache takes."""
        return self._bytes_per_state * self._tokens

    @property
    def _tokens(self) -> int:
        return int((self.lengths + self.sinks).sum())

    @property
    def _bytes_per_state(self) -> int:
        L, _, H, _, D = self.keys.shape
        return 2 * L * H * D * self.keys.element_size()

    # -- use

    def to_cache(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "NuggetCache":
        """A transformers `Cache` that begins with these nuggets; a copy, so generation leaves the nuggets alone.

        Give the model, within `Dodo.decoding`, `position_ids` that go on at `next_positions`, and an `attention_mask`
        [B, K + new] if texts differ in length.
        """
        from dodo.attention import NuggetCache

        here = self.to(device=device, dtype=dtype)
        return NuggetCache(tuple(here.keys), tuple(here.values), here.positions, here.mask)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Nuggets":
        """The same nuggets on another device, keys and values in another floating dtype."""
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor) and device is not None
        }
        here = dataclasses.replace(self, **moved)
        if dtype is None or dtype == here.dtype:
            return here
        return dataclasses.replace(here, keys=here.keys.to(dtype), values=here.values.to(dtype))

    def shift(self, offset: int) -> "Nuggets":
        """The same texts `offset` positions further on (or back): keys are re-rotated, values stay.

        Equals encoding the texts at those positions, because attention sees differences of positions only.

        Raises:
            InputError: a position would be negative.
        """
        if self.mask.any() and int(self.positions[self.mask].min()) + offset < 0:
            raise InputError(f"shifting by {offset} would give negative positions")
        return self._moved_to(self.positions + offset, next_positions=self.next_positions + offset)

    def compact(self) -> "Nuggets":
        """The same texts with states at 0 .. K-1 and the decoder right behind: they look like an ordinary short prefix."""
        ranks = torch.arange(self.mask.shape[1], device=self.mask.device).expand_as(self.positions)
        moved = self._moved_to(torch.where(self.mask, ranks, 0), next_positions=self.states)
        return dataclasses.replace(moved, scheme="compact")

    def _moved_to(self, positions: Tensor, *, next_positions: Tensor) -> "Nuggets":
        delta = torch.where(self.mask, positions - self.positions, 0)
        keys = torch.stack([self.rotary.rotate(key, delta, layer=i) for i, key in enumerate(self.keys)])
        return dataclasses.replace(self, keys=keys, positions=positions, next_positions=next_positions)

    # -- batches and joins

    def __getitem__(self, row: int) -> "Nuggets":
        """The nuggets of one text, without padding; of several texts a copy, which does not hold on to the others.

        Raises IndexError past the end, so iteration works.
        """
        if not -self.batch_size <= row < self.batch_size:
            raise IndexError(f"text {row} of {self.batch_size}")
        row %= self.batch_size
        states = int(self.mask[row].sum())
        rows: dict[str, Any] = {name: getattr(self, name)[row : row + 1, :states] for name in _PER_STATE}
        rows |= {name: getattr(self, name)[row : row + 1] for name in _PER_TEXT}
        rows |= {name: getattr(self, name)[:, row : row + 1, :, :states] for name in ("keys", "values")}
        if self.batch_size > 1:
            rows = {name: tensor.clone() for name, tensor in rows.items()}
        return dataclasses.replace(self, **rows)

    def rows(self, index: Tensor) -> "Nuggets":
        """The texts of these places, int64 [B'], repeats allowed, with the padding that there is; gradients flow."""
        picked: dict[str, Any] = {name: getattr(self, name).index_select(0, index) for name in (*_PER_STATE, *_PER_TEXT)}
        picked |= {name: getattr(self, name).index_select(1, index) for name in ("keys", "values")}
        return dataclasses.replace(self, **picked)

    @classmethod
    def stack(cls, parts: Sequence["Nuggets"]) -> "Nuggets":
        """One batch of several texts, padded on the right to the longest, on the first one's device.

        Raises:
            InputError: nothing to stack, or the parts differ in scheme or dtype.
            FingerprintMismatch: the parts belong to different models.
        """
        first, *_ = parts = _agreeing(parts, "stack", names=("scheme", "dtype"))
        longest = max(part.mask.shape[1] for part in parts)
        joined: dict[str, Any] = {name: torch.cat([_pad(getattr(p, name), 1, longest) for p in parts]) for name in _PER_STATE}
        joined |= {name: torch.cat([getattr(p, name) for p in parts]) for name in _PER_TEXT}
        joined |= {name: torch.cat([_pad(getattr(p, name), 3, longest) for p in parts], dim=1) for name in ("keys", "values")}
        return dataclasses.replace(first, **_asked(parts), **joined)

    @classmethod
    def cat(cls, parts: Sequence["Nuggets"]) -> "Nuggets":
        """One text out of several, each moved to where the one before it ends.

        Each part is a single text. States of all of them are kept, kept first tokens too, on the first one's device.

        Raises:
            InputError: nothing to join, a part is a batch, or the parts differ in scheme or dtype.
            FingerprintMismatch: the parts belong to different models.
        """
        first, *_ = parts = _agreeing(parts, "join", names=("scheme", "dtype"))
        if any(part.batch_size != 1 for part in parts):
            raise InputError("only single texts can be joined; take them out of their batch first: nuggets[i]")
        moved, length = [], 0
        start = int(first.next_positions) - _extent(first)
        for part in (p[0] for p in parts):
            here = part.shift(start - int(part.next_positions) + _extent(part))
            start = int(here.next_positions)
            moved.append(dataclasses.replace(here, indices=here.indices + length))
            length += part._tokens
        joined: dict[str, Any] = {name: torch.cat([getattr(p, name) for p in moved], dim=1) for name in _PER_STATE}
        joined |= {name: torch.cat([getattr(p, name) for p in moved], dim=3) for name in ("keys", "values")}
        joined |= {name: torch.stack([getattr(p, name) for p in moved]).sum(0) for name in ("lengths", "sinks")}
        return dataclasses.replace(first, **joined, **_asked(parts), next_positions=moved[-1].next_positions)

    # -- files

    def save(self, path: str | Path, *, storage: "StorageType | None" = None) -> None:
        """Write a `.nuggets` file, whole or not at all; an existing file is replaced. See `nuggets_file.save`."""
        from dodo import nuggets_file

        nuggets_file.save(self, path, storage=storage)

    @classmethod
    def load(cls, path: str | Path) -> "Nuggets":
        """Read a `.nuggets` file. See `nuggets_file.load`."""
        from dodo import nuggets_file

        return nuggets_file.load(path)


_PER_STATE = ("positions", "indices", "scores", "token_ids", "mask")
_PER_TEXT = ("lengths", "next_positions", "sinks")


def _extent(part: Nuggets) -> int:
    """Positions that one text takes: its tokens in the original scheme, its states in the compact one."""
    return part._tokens if part.scheme == "original" else int(part.states)


def _asked(parts: Sequence[Nuggets]) -> dict[str, Any]:
    """Ratio and use that all parts have, None where they differ."""
    return {name: found.pop() if len(found := {getattr(p, name) for p in parts}) == 1 else None for name in ("ratio", "use")}


def _agreeing(parts: Sequence[Nuggets], verb: str, *, names: tuple[str, ...]) -> list[Nuggets]:
    """The parts, of one model and kind, on the first one's device."""
    if not parts:
        raise InputError(f"there are no nuggets to {verb}")
    first = parts[0]
    for part in parts[1:]:
        first.fingerprint.check(part.fingerprint, what=f"one of the nuggets to {verb}")
        for name in names:
            if getattr(part, name) != getattr(first, name):
                raise InputError(f"can't {verb} nuggets of different {name}: {getattr(first, name)}, {getattr(part, name)}")
    return [part.to(device=first.keys.device) for part in parts]


def _pad(tensor: Tensor, dim: int, length: int) -> Tensor:
    missing = length - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)

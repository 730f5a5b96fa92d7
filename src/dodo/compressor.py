"""Dodo as a contextual compressor: tokens in, nuggets out; nuggets and tokens in, logits out.

Paper: Section 2.3. Eq. 12 to 15 with phi on the encoder's side, theta on the decoder's, the scorer on features of the base
with adapters off, and Eq. 18 in training. Plain functions on tokens and tensors; text and generation are in `model`.

Texts longer than a segment are encoded piece by piece, each piece attending to the nuggets of those before it. Selection
does not depend on the pieces: scores come first, and pieces end at nuggets, so that nothing behind a piece's last nugget is lost.

Shapes: B texts, T tokens, K states, M decoder tokens, V vocabulary.
"""

import copy
import dataclasses
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dodo.adapters import PHI, THETA, Adapters
from dodo.architecture import (
    FeatureLayers,
    backbone,
    check_id_tensor,
    copy_before_head,
    device_of,
    layer_windows,
    rotary_of,
    window_of,
)
from dodo.attention import AllKept, OnePassCache, attention_masks, cache_argument, check_gradient_backend
from dodo.config import DodoConfig, Use
from dodo.coverage import prefer_covering, prefer_runs
from dodo.errors import DodoWarning, InputError, UnsupportedModelError, WindowError
from dodo.memory import MemoryTokens
from dodo.nuggets import Fingerprint, Nuggets
from dodo.scorer import Scorer
from dodo.selection import Selection, count_nuggets, prefer_dense, select_top_k

__all__ = ["Compressor"]


FARTHEST = 256
"""Tokens per nugget above which selection by coverage gives way to one by density: so far from a nugget all is lost alike, and
looking for the best places takes memory and time by the length of gaps."""


_PROBE = 8
"""Tokens."""


class Compressor(nn.Module):
    """Base, adapters, scorer and soft token, and the two passes over them.

    Trainable are both adapters' matrices, the scorer and the soft token; the base is frozen. `memory` holds the memory tokens
    of the baseline ICAE (`icae`); None in all other adapters.

    Args:
        base: a supported language model; it is wrapped with LoRA in place.
        config: see `DodoConfig`.
        fingerprint: stamped on all nuggets made here.
    """

    def __init__(self, base: PreTrainedModel, config: DodoConfig, *, fingerprint: Fingerprint | None = None) -> None:
        super().__init__()
        self.config = config
        self.fingerprint = fingerprint or Fingerprint("", "", "")
        self.window = window_of(base.config)
        self.rotary = rotary_of(base)
        self._features = FeatureLayers(base, config.feature_layer)
        self.adapters = Adapters(base, encoder=config.encoder, decoder=config.decoder, seed=config.seed)
        copy_before_head(base)
        self.base = base
        device = device_of(base)
        self.scorer = Scorer(base.config.hidden_size, by_use=config.scores_by_use, seed=config.seed).to(device)
        self.soft_token = nn.Parameter(_fresh_soft_token(base))
        self.memory: MemoryTokens | None = None

    # -- scores

    def score(self, input_ids: Tensor, use: Use = "text") -> Tensor:
        """s_i = Scorer(x_i^iota) of each token. Paper: Eq. 6.

        Beyond the base's window, each token is scored from the last half to whole window before it.

        Args:
            input_ids: int64 [B, T], right-padded.
            use: what the nuggets are for; of no effect where one score serves all uses.

        Returns:
            fp32 [B, T], with gradient to the scorer only.
        """
        T = input_ids.shape[1]
        with self.adapters.use(None):
            if self.window >= T:
                return self.scorer(self._features(input_ids), use)
            half = self.window // 2
            scores = [self.scorer(self._features(input_ids[:, : self.window]), use)]
            for start in range(self.window, T, half):
                block = input_ids[:, start - half : start + half]
                scores.append(self.scorer(self._features(block)[:, half:], use))
        return torch.cat(scores, dim=1)

    @torch.no_grad()
    def check_moves(self) -> None:
        """See that keys of the base move to other positions as they must, with a few tokens: for families without tests.

        Raises:
            UnsupportedModelError: they do not, or the base can't be computed with at all.
        """
        ids = torch.arange(_PROBE, device=device_of(self.base))[None] % self.base.config.vocab_size
        family, plain = self.base.config.model_type, copy.copy(self)
        plain.config = dataclasses.replace(self.config, positions="original")
        try:
            here, there = (plain.encode(ids, nuggets=_PROBE, start=start) for start in (0, _PROBE))
            moved = here.shift(_PROBE).keys.float()
        except (RuntimeError, AttributeError, TypeError, KeyError, IndexError) as error:
            raise UnsupportedModelError(f"base models of type {family!r} do not work with dodo: {error!r}") from error
        wanted = there.keys.float()
        if float((moved - wanted).abs().max()) > 0.05 * float(wanted.abs().max()):
            raise UnsupportedModelError(
                f"base models of type {family!r} can't hold nuggets: dodo does not know how their keys turn with positions"
            )

    # -- encoder

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        ratio: float | None = None,
        nuggets: int | None = None,
        use: Use = "text",
        scores: Tensor | None = None,
        select_by: Tensor | None = None,
        segment: int | None = None,
        start: int = 0,
    ) -> Nuggets:
        """Compress a batch of texts. Paper: Eq. 7, 14, 15.

        With `keep_first`, the first token of each text is kept beyond the k = ceil(n / r) nuggets and not counted in n,
        unless it is the only one.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], 0 for padding on either side; None means no padding.
            ratio: r; or
            nuggets: k of each text; neither: the configured ratio.
            use: what the nuggets are for; of no effect where one score and one selection serve all uses.
            scores: fp32 [B, T], takes the place of the scorer's.
            select_by: fp32 [B, T], the tokens with the highest of these are kept, whatever the scores, which still get the
                straight-through term: controls, given selections.
            segment: tokens encoded at a time; None: all, or, where they don't fit the window, half of it.
            start: position of the first token.

        Returns:
            Nuggets, with gradients when they are enabled.

        Raises:
            InputError: an empty text, a bad ratio, count or start, a bad shape or dtype, or ids that the base does not know.
            WindowError: the text does not fit the window in the `original` position scheme.
        """
        check_id_tensor(self.base, input_ids)
        if input_ids.numel() == 0:
            raise InputError("there are no texts, or a text has no tokens: there is nothing to compress")
        if start < 0:
            raise InputError(f"start must be a position, 0 or more, not {start}")
        for name, given in (("scores", scores), ("select_by", select_by)):
            if given is not None and given.shape != input_ids.shape:
                raise InputError(f"{name} have shape {list(given.shape)}, input_ids {list(input_ids.shape)}")
        if ratio is None and nuggets is None:
            ratio = self.config.ratio
        input_ids, real, order = _right_padded(input_ids, attention_mask)
        chosen_for = use if self.config.by_use and scores is None and select_by is None else None
        if scores is None:
            scores = self.score(input_ids, use)
        elif order is not None:
            scores = scores.gather(1, order)
        if select_by is not None and order is not None:
            select_by = select_by.gather(1, order)
        selection, sinks = self.select(scores, real, ratio=ratio, nuggets=nuggets, use=use, select_by=select_by)

        compact = self.config.positions == "compact"
        total = int(real.sum(-1).max())
        if not compact and start + total > self.window:
            raise WindowError(
                f"a text of {total:,} tokens does not fit the base's window of {self.window:,} positions; "
                "use positions='compact', which encodes it in segments and keeps its states at positions 0 .. k"
            )
        if segment is None:
            segment = total if start + total <= self.window else self.window // 2
        if segment < 1:
            raise InputError(f"a segment must be at least 1 token, not {segment}")

        common: dict[str, Any] = {
            "sinks": sinks,
            "scheme": "original",
            "ratio": None if ratio is None else float(ratio),
            "use": chosen_for,
            "rotary": self.rotary,
            "fingerprint": self.fingerprint,
        }
        if total <= segment and start + total <= self.window:
            keys, values = self._encode_piece(input_ids, selection, start=start, past=None)
            made = _assembled(input_ids, real, scores, selection, keys, values, start=start, **common)
            return made.compact() if compact else made
        rows = []
        for row in range(input_ids.shape[0]):
            n = int(real[row].sum())
            k = int(selection.mask[row].sum())
            rows.append(
                self._encode_in_segments(
                    input_ids[row : row + 1, :n],
                    scores[row : row + 1, :n],
                    selection.indices[row, :k],
                    segment=segment,
                    start=start,
                    common=common | {"sinks": sinks[row : row + 1]},
                )
            )
        return Nuggets.stack(rows)

    def select(
        self,
        scores: Tensor,
        real: Tensor,
        *,
        ratio: float | None = None,
        nuggets: int | None = None,
        use: Use = "text",
        select_by: Tensor | None = None,
    ) -> tuple[Selection, Tensor]:
        """The tokens that `encode` keeps of texts with these scores, and how many of each are kept first tokens.

        Args:
            scores: fp32 [B, T].
            real: bool [B, T], false for padding, which is on the right.
            ratio, nuggets, use, select_by: see `encode`.

        Returns:
            The selection, kept first tokens among it, and their numbers, int64 [B], 0 or 1.
        """
        if ratio is None and nuggets is None:
            ratio = self.config.ratio
        totals = real.sum(-1)
        if bool((totals == 0).any()):
            raise InputError("a text has no tokens: there is nothing to compress")
        kept_first = torch.zeros_like(real)
        kept_first[:, 0] = (totals > 1) & self.config.keep_first
        sinks = kept_first.sum(-1)
        k = [count_nuggets(n, ratio=ratio, nuggets=nuggets) for n in (totals - sinks).tolist()]
        wanted = torch.tensor(k, device=scores.device)
        if select_by is None:
            select_by = self._preferred(scores, wanted, real & ~kept_first, use)
        select_by = select_by.masked_fill(kept_first, torch.finfo(select_by.dtype).max)  # ties go to the first
        return select_top_k(select_by, wanted + sinks, real), sinks

    def _preferred(self, scores: Tensor, k: Tensor, candidates: Tensor, use: Use) -> Tensor:
        if self.config.selection == "density":
            return prefer_dense(scores, k, candidates)
        if self.config.selection == "coverage":
            prefer = prefer_runs if self.config.runs and use == "text" else prefer_covering
            near = candidates.sum(-1) <= FARTHEST * k
            values = prefer_dense(scores, k, candidates)
            if bool(near.any()):
                values[near] = prefer(scores[near], k[near], candidates[near], reach=self.config.reach)
            return values
        return scores

    def _encode_piece(
        self, input_ids: Tensor, selection: Selection, *, start: int, past: Nuggets | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [L, B, H, K, D] of a piece's selected tokens (after those of `past`), padding zeroed."""
        B, T = input_ids.shape
        positions = torch.arange(start, start + T, device=input_ids.device).expand(B, T)
        cache = OnePassCache(
            self.base.config.num_hidden_layers,
            past=None if past is None else (past.keys, past.values),
            keep=selection.indices,
        )
        kwargs: dict[str, Any] = {cache_argument(self.base): cache}
        if past is not None and any(layer_windows(self.base.config)):
            kwargs["attention_mask"] = attention_masks(
                self.base,
                query_positions=positions,
                key_positions=torch.cat([past.positions, positions], dim=1),
                key_mask=torch.cat([past.mask, torch.ones_like(positions, dtype=torch.bool)], dim=1),
            )
        with self.adapters.use(PHI), suppress(AllKept):
            backbone(self.base)(input_ids=input_ids, position_ids=positions, use_cache=True, **kwargs)
        keys, values = cache.kept()
        if past is None and not bool(selection.mask.all()):
            padding = ~selection.mask[None, :, None, :, None]
            keys, values = keys.masked_fill(padding, 0), values.masked_fill(padding, 0)
        return keys, values

    def _encode_in_segments(
        self, input_ids: Tensor, scores: Tensor, indices: Tensor, *, segment: int, start: int, common: dict[str, Any]
    ) -> Nuggets:
        compact = self.config.positions == "compact"
        n, made, begin = input_ids.shape[1], None, 0
        while begin < n:
            end = min(begin + segment, n)
            held = 0 if made is None else int(made.states)
            if compact and held + (end - begin) > self.window:
                end = begin + self.window - held
                if end - begin < 1:
                    raise WindowError(
                        f"the nuggets of the first {begin:,} tokens fill the base's window of {self.window:,} positions; "
                        "use a higher ratio"
                    )
            chosen = indices[(indices >= begin) & (indices < end)]
            if not len(chosen):  # its nugget lies further on, and what is before a nugget is read with it
                chosen = indices[indices >= end][:1]
                end = int(chosen) + 1
                room = self.window - held if compact else n
                if lost := max(0, end - begin - room):
                    warnings.warn(
                        f"{lost:,} tokens from the {begin + 1:,}th on are lost: the base's window does not reach from them to "
                        "the next nugget; more nuggets keep them",
                        DodoWarning,
                        stacklevel=2,
                    )
                    begin += lost
            elif end < n:
                end = int(chosen[-1]) + 1
            first = held if compact else start + begin
            piece = Selection(indices=(chosen - begin)[None], mask=torch.ones_like(chosen[None], dtype=torch.bool))
            keys, values = self._encode_piece(input_ids[:, begin:end], piece, start=first, past=made)
            so_far = indices[indices < end]
            whole = Selection(indices=so_far[None], mask=torch.ones_like(so_far[None], dtype=torch.bool))
            real = torch.ones_like(input_ids[:, :end], dtype=torch.bool)
            positions = (chosen - begin + first)[None]
            if made is not None:
                positions = torch.cat([made.positions, positions], dim=1)
            here = _assembled(input_ids[:, :end], real, scores[:, :end], whole, keys, values, start=start, **common)
            here = dataclasses.replace(here, positions=positions)
            made = here.compact() if compact else here
            begin = end
        assert made is not None
        return made

    # -- decoder

    def decode(
        self,
        nuggets: Nuggets,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        soft_token: bool = False,
        states: bool = False,
    ) -> Tensor:
        """Logits of the tokens that follow `input_ids`, given nuggets. Paper: Eq. 12, 13; Eq. 18 when gradients are on.

        Args:
            nuggets: of B texts.
            input_ids: int64 [B, M].
            attention_mask: [B, M], 0 for padding on either side.
            soft_token: put the trained token that asks for reconstruction in front (autoencoding, Section 4).
            states: leave out the language-model head, and return the states that it would read (for losses that need not
                keep all logits).

        Returns:
            [B, M, V], or [B, M + 1, V] with the soft token; d in place of V for states; in the base's dtype.

        Raises:
            UnsupportedModelError: gradients are on and the attention backend would drop the straight-through term.
            InputError: batch sizes or shapes differ, there are no tokens, or the base does not know them.
            WindowError: a token's position is beyond the base's window.
        """
        check_id_tensor(self.base, input_ids)
        B = input_ids.shape[0]
        if nuggets.batch_size != B:
            raise InputError(f"{B} rows of tokens, but nuggets of {nuggets.batch_size} texts")
        if B == 0 or (input_ids.shape[1] == 0 and not soft_token):
            raise InputError("there are no tokens to decode")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise InputError(f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}")
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        embeddings = self.base.get_input_embeddings()(input_ids)
        if soft_token:
            embeddings = torch.cat([self.soft_token.to(embeddings.dtype).expand(B, 1, -1), embeddings], dim=1)
            real = torch.cat([torch.ones_like(real[:, :1]), real], dim=1)
        nuggets = nuggets.to(device=embeddings.device, dtype=embeddings.dtype)
        positions = nuggets.next_positions[:, None] + (real.cumsum(-1) - 1).clamp_min(0)
        if (last := int(positions.masked_fill(~real, 0).max())) >= self.window:
            raise WindowError(
                f"position {last:,} does not fit the base's window of {self.window:,}; `Nuggets.compact` brings nuggets together"
            )
        learning = torch.is_grad_enabled() and nuggets.scores.requires_grad
        if learning:
            check_gradient_backend(self.base)
        cache = OnePassCache(nuggets.keys.shape[0], past=(nuggets.keys, nuggets.values))
        masks = attention_masks(
            self.base,
            query_positions=positions,
            key_positions=torch.cat([nuggets.positions, positions], dim=1),
            key_mask=torch.cat([nuggets.mask, real], dim=1),
            scores=nuggets.scores if learning else None,
        )
        inputs: dict[str, Any] = {
            "inputs_embeds": embeddings,
            "attention_mask": masks,
            "position_ids": positions,
            "use_cache": True,
            cache_argument(self.base): cache,
        }
        with self.adapters.use(THETA):
            if states:
                hidden: Tensor = backbone(self.base)(**inputs).last_hidden_state
                return hidden
            logits: Tensor = self.base(**inputs).logits
        return logits


def _fresh_soft_token(base: PreTrainedModel) -> Tensor:
    """The mean of the base's token embeddings, fp32 [d]."""
    embeddings: Any = base.get_input_embeddings()
    weight: Tensor = embeddings.weight.detach()
    return weight.float().mean(0)


def _right_padded(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Move padding to the right, so that causal attention never sees it. Returns ids, bool mask, and the order if changed."""
    if attention_mask is None:
        return input_ids, torch.ones_like(input_ids, dtype=torch.bool), None
    if attention_mask.shape != input_ids.shape:
        raise InputError(f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}")
    real = attention_mask.bool()
    order = (~real).to(torch.int8).argsort(dim=1, stable=True)
    longest = max(1, int(real.sum(-1).max()))
    order = order[:, :longest]
    return input_ids.gather(1, order), real.gather(1, order), order


def _assembled(
    input_ids: Tensor,
    real: Tensor,
    scores: Tensor,
    selection: Selection,
    keys: Tensor,
    values: Tensor,
    *,
    start: int,
    sinks: Tensor,
    **common: Any,
) -> Nuggets:
    totals = real.sum(-1)
    return Nuggets(
        keys=keys,
        values=values,
        positions=torch.where(selection.mask, selection.indices + start, 0),
        indices=selection.indices,
        scores=scores.gather(1, selection.indices).masked_fill(~selection.mask, 0),
        token_ids=input_ids.gather(1, selection.indices).masked_fill(~selection.mask, 0),
        mask=selection.mask,
        lengths=totals - sinks,
        next_positions=totals + start,
        sinks=sinks,
        **common,
    )

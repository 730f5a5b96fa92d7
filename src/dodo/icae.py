"""*ICAE*, the paper's baseline as an autoencoder: memory tokens behind a text, whose outputs are inputs of the decoder.

Paper: Section 4.1, after Ge et al. (2023). Memory tokens are appended to the text; the encoder is the base with a LoRA, phi. What
the last layer gives for the memory tokens, behind the final norm, stands for the text in the decoder, in the place of token
embeddings. The decoder is the frozen base; the soft token asks it to rebuild the text. What is learned is phi, the memory tokens
and the soft token; theta and scorer are not used.

Rows of unequal lengths are put together without gaps, so causal attention needs no mask and every family works as it is.

*Aligned* memory tokens are beyond the paper (docs/decisions/0011-icae.md). They stand behind the text too and see all of it, but
slot i of K has the position of the last token of the text's i-th part of K, and what comes out of it is scaled to the root mean
square of the text's embeddings, which is what the decoder knows how to read.

Shapes: B texts, T document tokens, K memory slots, N decoder tokens, d width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dodo.adapters import PHI
from dodo.architecture import backbone, device_of
from dodo.attention import attention_masks
from dodo.compressor import Compressor
from dodo.errors import InputError, WindowError
from dodo.generation import generated, generation_settings, pad_rows, until_end
from dodo.memory import MemoryTokens

__all__ = ["Icae", "Memory", "last_of_part"]


@dataclass(frozen=True, eq=False)
class Memory:
    """Texts as ICAE holds them.

    states: [B, K, d] in the base's dtype, padded with zeros on the right.
    counts: int64 [B], memory slots of each text.
    """

    states: Tensor
    counts: Tensor


@dataclass(frozen=True, eq=False)
class Icae:
    """A compressor with memory tokens, used as ICAE.

    compressor: base, phi, soft token and memory tokens.

    Raises:
        InputError: there are no memory tokens.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        if self.compressor.memory is None:
            raise InputError(
                "these adapters have no memory tokens (memory.safetensors), which ICAE needs; "
                "recipes/smollm2-135m-icae.yaml trains a set with them"
            )

    @property
    def tokens(self) -> MemoryTokens:
        """What is appended."""
        assert self.compressor.memory is not None
        return self.compressor.memory

    def slots(self, attention_mask: Tensor, *, ratio: float) -> Tensor:
        """Memory slots of texts, int64 [B], at a ratio. As for nuggets, a first token that is kept does not count in n."""
        totals = attention_mask.sum(-1)
        return self.tokens.counts(totals - ((totals > 1) & self.compressor.config.keep_first).long(), ratio=ratio)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, slots: int | Tensor) -> Memory:
        """Read texts into memory.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], 0 for padding, which is on the right; None means no padding.
            slots: of every text, or int64 [B], of each; 1 to M.

        Returns:
            Memory, with gradients when they are enabled.

        Raises:
            InputError: an empty text, or a number of slots that there is not.
            WindowError: a text and its memory tokens are longer than the base's window.
        """
        base, memory = self.compressor.base, self.tokens.embeddings
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        lengths = real.sum(-1)
        if bool((lengths == 0).any()):
            raise InputError("a text has no tokens: there is nothing to compress")
        counts = torch.as_tensor(slots, device=input_ids.device).expand(len(input_ids))
        if int(counts.min()) < 1 or int(counts.max()) > len(memory):
            raise InputError(f"memory slots must be 1 to {len(memory)}, the memory tokens that there are, not {slots}")
        embeddings = base.get_input_embeddings()(input_ids)
        appended = memory.to(embeddings.dtype).expand(len(input_ids), -1, -1)
        inputs, _ = _joined(embeddings, lengths, appended, counts)
        self._check_room(inputs.shape[1], "a text and its memory tokens")
        where = self._where(inputs, lengths, counts) if self.tokens.aligned else {}
        with self.compressor.adapters.use(PHI):
            hidden = backbone(base)(inputs_embeds=inputs, use_cache=False, **where).last_hidden_state
        width = int(counts.max())
        padding = torch.arange(width, device=counts.device) >= counts[:, None]
        states = _behind(hidden, lengths, width)
        if self.tokens.aligned:
            squares = embeddings.float().square().mean(-1).masked_fill(~real.bool(), 0).sum(-1) / lengths  # [B]
            own = states.float().square().mean(-1, keepdim=True)
            states = (states * (squares[:, None, None] / own).sqrt()).to(states.dtype)
        return Memory(states.masked_fill(padding[..., None], 0), counts)

    def _where(self, inputs: Tensor, lengths: Tensor, counts: Tensor) -> dict[str, Any]:
        """Positions and masks of texts and aligned slots behind them: whoever stands before is seen, whatever its position."""
        order = torch.arange(inputs.shape[1], device=inputs.device).expand(len(inputs), -1)
        slot = (order - lengths[:, None]).clamp_min(0)
        positions = torch.where(order < lengths[:, None], order, last_of_part(slot, lengths[:, None], counts[:, None]))
        seen = torch.ones_like(order, dtype=torch.bool)
        masks = attention_masks(self.compressor.base, query_positions=order, key_positions=order, key_mask=seen)
        return {"position_ids": positions, "attention_mask": masks}

    def decode(
        self, memory: Memory, input_ids: Tensor, attention_mask: Tensor | None = None, *, soft_token: bool = False
    ) -> Tensor:
        """States from which the language-model head predicts the tokens that follow `input_ids`, given memory.

        Args:
            memory: of B texts.
            input_ids: int64 [B, N].
            attention_mask: [B, N], 0 for padding, which is on the right; None means no padding.
            soft_token: put the trained token that asks for reconstruction in front.

        Returns:
            [B, N, d], or [B, N + 1, d] with the soft token, in the base's dtype; of no meaning at padding.

        Raises:
            InputError: batch sizes differ.
            WindowError: memory and tokens are longer than the base's window.
        """
        inputs, _ = self._inputs(memory, input_ids, attention_mask, soft_token=soft_token)
        self._check_room(inputs.shape[1], "memory and what follows it")
        base = self.compressor.base
        with self.compressor.adapters.use(None):
            hidden = backbone(base)(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return _behind(hidden, memory.counts, input_ids.shape[1] + soft_token)

    @torch.no_grad()
    def generate_ids(
        self,
        memory: Memory,
        prompts: list[list[int]] | None,
        *,
        max_new_tokens: int,
        pad_token_id: int = 0,
        **generation: Any,
    ) -> list[list[int]]:
        """Continue each text from its memory and a prompt, with transformers' own `generate`.

        Args:
            memory: of B texts.
            prompts: B rows of token ids, not empty; None asks for reconstruction with the soft token.
            max_new_tokens: at most so many tokens.
            pad_token_id, generation: see `generation.generate_ids`.

        Returns:
            New tokens of each row, up to its end token.

        Raises:
            InputError: an empty prompt, or not as many prompts as texts.
            WindowError: memory, prompt and new tokens are longer than the base's window.
        """
        base: Any = self.compressor.base
        device = device_of(base)
        mask: Tensor | None = None
        if prompts is None:
            ids = torch.zeros(len(memory.counts), 0, dtype=torch.long, device=device)
        elif not prompts or not all(prompts):
            raise InputError("the prompt is empty")
        else:
            ids, mask = pad_rows(prompts, pad_token_id, left=False, device=device)
        inputs, real = self._inputs(memory, ids, mask, soft_token=prompts is None, left=True)
        self._check_room(inputs.shape[1] + max_new_tokens, f"memory, prompt and {max_new_tokens:,} new tokens")
        settings, rest = generation_settings(self.compressor, max_new_tokens, pad_token_id, generation)
        with self.compressor.adapters.use(None):
            made = generated(base, {"inputs_embeds": inputs, "attention_mask": real.long()}, settings, rest)
        return [until_end(row, settings.eos_token_id) for row in made.tolist()]

    def _inputs(
        self, memory: Memory, input_ids: Tensor, attention_mask: Tensor | None, *, soft_token: bool, left: bool = False
    ) -> tuple[Tensor, Tensor]:
        """What the decoder reads, and bool [B, L], where it is not padding."""
        if len(memory.counts) != len(input_ids):
            raise InputError(f"{len(input_ids)} rows of tokens, but memory of {len(memory.counts)} texts")
        embeddings = self.compressor.base.get_input_embeddings()(input_ids)
        lengths = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).sum(-1)
        if soft_token:
            soft = self.compressor.soft_token.to(embeddings.dtype).expand(len(embeddings), 1, -1)
            embeddings, lengths = torch.cat([soft, embeddings], dim=1), lengths + 1
        return _joined(memory.states, memory.counts, embeddings, lengths, left=left)

    def _check_room(self, needed: int, what: str) -> None:
        if needed > self.compressor.window:
            raise WindowError(f"{what} need {needed:,} positions, but the base's window has {self.compressor.window:,}")


def last_of_part(slot: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Index of the last token of part `slot` of texts of so many tokens and parts; parts may be empty."""
    return (((slot + 1).clamp_max(counts) * lengths + counts - 1) // counts - 1).clamp_min(0)


def _joined(first: Tensor, lengths: Tensor, second: Tensor, more: Tensor, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Of each row the first `lengths` of `first` and, next to them, the first `more` of `second`.

    Args:
        first, second: [B, ., d]. lengths, more: int64 [B].
        left: pad on the left, not on the right.

    Returns:
        [B, L, d], of the longest row's length L; and bool [B, L], false for padding, which holds copies of something.
    """
    totals = (lengths + more)[:, None]
    longest = int(totals.max())
    places = torch.arange(longest, device=first.device)[None] - (longest - totals if left else 0)
    real = (places >= 0) & (places < totals)
    sources = torch.where(places < lengths[:, None], places, places - lengths[:, None] + first.shape[1])
    both = torch.cat([first, second], dim=1)
    return both.gather(1, sources.masked_fill(~real, 0)[..., None].expand(-1, -1, both.shape[-1])), real


def _behind(hidden: Tensor, lengths: Tensor, width: int) -> Tensor:
    """[B, width, d]: of each row of `hidden` what stands behind its first `lengths`, the last again where there is no more."""
    places = (lengths[:, None] + torch.arange(width, device=hidden.device)).clamp_max(hidden.shape[1] - 1)
    return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))

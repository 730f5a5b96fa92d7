"""Generating over nuggets with transformers' own `generate`: plain functions on token ids.

Paper: Section 2.3 in use; greedy decoding unless told otherwise (Appendix B). Beams, sampling, streamers, stopping criteria and
logits processors are transformers'. The nuggets are copied into a cache for each call and stay as they are.

Shapes: B texts, K states, M prompt tokens.
"""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from dodo.adapters import THETA
from dodo.architecture import check_ids, device_of
from dodo.attention import cache_argument, windows_by_position
from dodo.compressor import Compressor
from dodo.errors import InputError, WindowError
from dodo.nuggets import Nuggets

__all__ = ["TRYING_OUT", "end_ids", "generate_ids", "generated", "generation_settings", "pad_rows", "until_end"]

_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What a greedy call takes from the base's generation config."""

_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
"""What a call that samples takes from it beside those."""

_ONLY: dict[str, Any] = {
    "use_cache": True,
    "return_dict_in_generate": False,
    "generation_config": None,
    "cache_implementation": None,
    "prefill_chunk_size": None,
}
"""Settings that a call can give one value of: what is generated from is a cache already, and what comes back are tokens."""

TRYING_OUT = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
"""Settings with which `generate` tries tokens out and takes some of them back."""

_TAKES_BACK = (5, 14)
"""From here on transformers takes so many tokens back; before, it cut a cache to a length that knew of no nuggets."""


def generate_ids(
    compressor: Compressor,
    nuggets: Nuggets,
    prompts: list[list[int]] | None,
    *,
    max_new_tokens: int,
    pad_token_id: int = 0,
    **generation: Any,
) -> list[list[int]]:
    """Continue each text from its nuggets and a prompt.

    Args:
        compressor: the model that made the nuggets; theta decodes.
        nuggets: of B texts.
        prompts: B rows of token ids, without padding; None asks for reconstruction with the soft token.
        max_new_tokens: at most so many tokens, at least 1.
        pad_token_id: what fills up rows, where the base's generation config has none; always masked.
        generation: anything `transformers.GenerationMixin.generate` takes.

    Returns:
        New tokens of each row, up to its end token; B rows, times `num_return_sequences`.

    Raises:
        InputError: an empty prompt, tokens that the base does not know, or not as many prompts as texts.
        WindowError: the positions do not fit the base's window.
    """
    base: Any = compressor.base
    device, B = device_of(base), nuggets.batch_size
    if prompts is None:
        input_ids, real = None, torch.ones(B, 1, dtype=torch.long, device=device)
    else:
        if len(prompts) != B:
            raise InputError(f"{len(prompts)} prompts for nuggets of {B} texts; give one for each")
        if any(len(p) == 0 for p in prompts):
            raise InputError("the prompt is empty")
        check_ids(base, [*prompts, [pad_token_id]])
        input_ids, real = pad_rows(prompts, pad_token_id, left=True, device=device)
    nuggets = nuggets.to(device=device, dtype=base.dtype)
    _check_room(compressor.window, nuggets, real, max_new_tokens)

    settings, generation = generation_settings(compressor, max_new_tokens, pad_token_id, generation)
    cache = nuggets.to_cache()
    copies = max(settings.num_beams or 1, settings.num_return_sequences or 1)
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    inputs: dict[str, Any] = {
        "attention_mask": torch.cat([nuggets.mask.long(), real], dim=1),
        "position_ids": nuggets.next_positions[:, None] + (real.cumsum(-1) - 1).clamp_min(0),
        cache_argument(base): cache,
    }
    if input_ids is None:
        # generate() wants embeddings of the whole past and uses those that are not in the cache
        soft_token = compressor.soft_token.to(base.dtype)
        inputs["inputs_embeds"] = soft_token.expand(B, nuggets.mask.shape[1] + 1, -1)
    else:
        inputs["input_ids"] = input_ids
    with torch.no_grad(), compressor.adapters.merged(THETA), windows_by_position(base):
        made = generated(base, inputs, settings, generation)
    new = made[:, 0 if input_ids is None else input_ids.shape[1] :]
    return [until_end(row, settings.eos_token_id) for row in new.tolist()]


def generation_settings(
    compressor: Compressor, max_new_tokens: int, pad_token_id: int, generation: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """What a call asks for beside the base's special tokens, greedy unless it says otherwise, and what is no setting.

    A call that samples also has what the base's generation config says of sampling; a greedy one is just that, whatever penalties
    the base's config has.

    Args:
        compressor: of the base; waits for a generation that runs, which has the base's config changed.
        max_new_tokens, pad_token_id, generation: see `generate_ids`.

    Returns:
        A config of this call's own; and streamers, stopping criteria, logits processors, as they were given.

    Raises:
        InputError: a setting that can't be given here.
    """
    for name, only in _ONLY.items():
        if generation.get(name) not in (None, only):
            raise InputError(f"{name} can't be given: text is made from a cache that is there, and comes back as text")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < _TAKES_BACK:
        for name in TRYING_OUT:
            if generation.get(name) is not None:
                raise InputError(f"{name} needs transformers 5.14 or later: {transformers.__version__} cuts nuggets away with it")
    base: Any = compressor.base
    names = (*_ENDS, *_SAMPLED) if generation.get("do_sample") else _ENDS
    with compressor.adapters.lock:
        known = {name: getattr(base.generation_config, name) for name in names}
    settings = GenerationConfig(**{name: value for name, value in known.items() if value is not None})
    settings.update(do_sample=False, max_new_tokens=max_new_tokens, use_cache=True)
    rest: dict[str, Any] = settings.update(**{name: value for name, value in generation.items() if name not in _ONLY})
    if settings.pad_token_id is None:
        settings.pad_token_id = pad_token_id
    return settings, rest


def generated(base: Any, inputs: dict[str, Any], settings: GenerationConfig, rest: dict[str, Any]) -> Tensor:
    """transformers' `generate` with these settings alone: where one is None, it would take the base's own.

    Call it where the base is this thread's: within `adapters.use` or `merged`.
    """
    own, base.generation_config = base.generation_config, settings
    try:
        made: Tensor = base.generate(**inputs, generation_config=settings, **rest)
    finally:
        base.generation_config = own
    return made


def pad_rows(rows: list[list[int]], filler: int, *, left: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of token ids as a batch: ids and mask, int64 [B, longest]."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), filler)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(0, len(row))
        ids[i, place] = torch.tensor(row)
        mask[i, place] = 1
    return ids.to(device), mask.to(device)


def _check_room(window: int, nuggets: Nuggets, real: Tensor, new: int) -> None:
    if new < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {new}")
    needed = int((nuggets.next_positions + real.sum(-1)).max()) + new
    if needed > window:
        raise WindowError(
            f"the text's positions, the prompt and {new:,} new tokens need {needed:,} positions, but the base's window has "
            f"{window:,}; ask for fewer new tokens, or compress the text more"
            + ("" if nuggets.scheme == "compact" else ", or use nuggets.compact()")
        )


def end_ids(ends: int | list[int] | None) -> list[int]:
    """The end tokens of a generation config, of which there are several, one, or none."""
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def until_end(ids: list[int], ends: int | list[int] | None) -> list[int]:
    """Cut at the first end token, which batched generation fills up behind."""
    stops = end_ids(ends)
    return ids[: next((i for i, token in enumerate(ids) if token in stops), len(ids))]

"""Dodo as an autoregressive LM: endless text in bounded memory, by hand or with transformers' own `generate`.

Paper: Section 2.2. The same function as `Autoregressive.forward`, computed as tokens come: one at a time, or in pieces of any
size, which change nothing. At each segment's beginning, tokens that left the window and were not kept are dropped; when memory is
full the oldest nuggets go too. Positions stay within the base's window (docs/decisions/0009-endless-text.md).

Shapes: T tokens of the one text that a stream holds, S states, V vocabulary, H key/value heads, D head width.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from dodo.adapters import PHI, THETA
from dodo.architecture import check_ids, device_of, layer_windows
from dodo.attention import attention_masks, cache_argument, retain, roomy_cache, turn
from dodo.autoregressive import Autoregressive, FeatureStream, held_bytes
from dodo.errors import InputError
from dodo.generation import TRYING_OUT, generated, generation_settings, until_end

__all__ = ["StreamingCache", "feed", "generate_ids", "segments", "settings_of", "streaming"]

_ONLY: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "guidance_scale": 1,
}
"""Settings of `generate` that a stream can take one value of, beside those of `generation_settings`."""


class StreamingCache(Cache):
    """What a stream remembers of its text: keys and values [1, H, S, D] of nuggets, window and current segment in each layer.

    To `generate` it is as long as the text; to the base, which is given `states`, as what is held.

    Args:
        lm: the model and settings.

    Attributes:
        states: the cache that the base reads and writes.
        features: the scorer's own.
        tokens: length of the text so far.
        next_position: where the next token goes, below the base's window.
        positions: int64 [S], of the keys held, ascending.
        kept: bool [S], which of them stay when they leave the window.
        chosen: tokens of the text so far that were kept for their score, held or dropped.
        owed: nuggets owed before the current segment, if the threshold follows the text.
        threshold: Lambda of the current segment.
        unread: the last token made, which is not in yet; nothing where the text came to its end.
        broken: whether a piece of the text failed half way, so that it holds no one knows what; it is then read no further.
    """

    def __init__(self, lm: Autoregressive) -> None:
        self.states = roomy_cache(lm.compressor.base)
        super().__init__(layers=self.states.layers)  # one list, so that both grow
        device = device_of(lm.compressor.base)
        self.lm = lm
        self.features = FeatureStream(lm)
        self.tokens = 0
        self.next_position = 0
        self.positions = torch.empty(0, dtype=torch.long, device=device)
        self.kept = torch.empty(0, dtype=torch.bool, device=device)
        self.chosen = 0
        self.owed = 0.0
        self.threshold = lm.threshold_at(self.owed)
        self._chosen_before = 0  # the current segment
        self.unread: list[int] = []
        self.broken = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "StreamingCache":
        """A copy of what is remembered; the model is the same."""
        memo[id(self.lm)] = self.lm
        copied = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __bool__(self) -> bool:
        return False  # Phi-3's generation throws a true cache away when the text passes its original window

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the text so far, held or dropped."""
        return self.tokens

    @property
    def nbytes(self) -> int:
        """Memory of all keys and values held, the scorer's own among them."""
        return held_bytes(self.states) + self.features.nbytes

    def update(self, *_: Any, **__: Any) -> Any:
        """Refused: the base by itself would read on without dropping anything."""
        raise InputError("a stream is read by `feed`, or by the base within `streaming(lm)`, not by the base alone")

    def crop(self, *_: Any, **__: Any) -> Any:
        """Refused: what was dropped can't come back, and there is one text."""
        raise InputError("a stream holds one text and can't be taken back: no beams or other methods that try tokens out")

    reset = reorder_cache = batch_repeat_interleave = batch_select_indices = crop

    def check(self, lm: Autoregressive) -> None:
        """Raise InputError unless it is of this model, with the same settings."""
        if vars(self.lm) != vars(lm):
            raise InputError(
                "the cache is of another language model, or of other settings, than the one that is to go on with it"
            )

    def note(self, kept: Tensor) -> None:
        """Count tokens whose keys and values are in: bool [T], which of them are kept."""
        positions = torch.arange(self.next_position, self.next_position + len(kept), device=kept.device)
        self.positions, self.kept = torch.cat([self.positions, positions]), torch.cat([self.kept, kept])
        self.tokens += len(kept)
        self.next_position += len(kept)

    def begin_segment(self) -> None:
        """Drop what is not to be seen from the next token on; when its segment would not fit the window, turn back all keys."""
        lm, here = self.lm, self.next_position
        competed = lm.segment - int(lm.keep_first and self.tokens == lm.segment)
        self.owed = lm.owed_behind(self.owed, tokens=competed, kept=self.chosen - self._chosen_before)
        self.threshold, self._chosen_before = lm.threshold_at(self.owed), self.chosen
        base_window = lm.compressor.window
        recent = self.positions >= here - lm.window
        first = torch.zeros_like(self.kept)
        first[:1] = lm.keep_first
        nuggets = self.kept & ~recent & ~first
        nuggets &= nuggets.flip(0).cumsum(0).flip(0) <= lm.capacity
        full = here + lm.segment > base_window
        reach = base_window - base_window // 8 - lm.segment
        if full:
            nuggets &= self.positions >= here - reach
        stay = recent | nuggets | first
        if not bool(stay.all()):
            indices = stay.nonzero()[:, 0]
            retain(self, indices)
            self.positions, self.kept = self.positions[indices], self.kept[indices]
        if full:
            delta = torch.full_like(self.positions, reach + 1 - here)
            delta[:1] *= not lm.keep_first
            turn(self, delta, lm.compressor.rotary)
            self.positions = self.positions + delta
            self.next_position = reach + 1


def segments(cache: StreamingCache, ids: Sequence[int]) -> list[list[int]]:
    """Token ids that follow what a stream has read, cut where its segments end; at least one piece."""
    size = cache.lm.segment
    ends = range(size - cache.tokens % size, len(ids), size)
    return [list(ids[start:end]) for start, end in itertools.pairwise([0, *ends, len(ids)])]


@torch.no_grad()
def feed(cache: StreamingCache, input_ids: Tensor, *, logits_to_keep: int = 0) -> Tensor:
    """Logits of the token behind each token, for tokens that follow what the stream has read. Paper: Eq. 8 to 10.

    Args:
        cache: of the text so far; it takes the new tokens in.
        input_ids: int64 [1, T], T at least 1.
        logits_to_keep: of the last so many tokens only; 0: of all.

    Returns:
        [1, T, V], in the base's dtype; no gradients.

    Raises:
        InputError: not one text, no tokens, or an earlier piece failed half way.
    """
    return _feed(cache, input_ids, logits_to_keep, cache.lm.compressor.base.forward)


def _feed(cache: StreamingCache, input_ids: Tensor, logits_to_keep: int, forward: Callable[..., Any]) -> Tensor:
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise InputError(
            f"a stream holds one text, but the tokens are of shape {list(input_ids.shape)}; stream texts one by one, "
            "without beams or several return sequences"
        )
    if input_ids.shape[1] == 0:
        raise InputError("there are no tokens to read")
    logits = []
    with cache.lm.compressor.adapters.lock:
        if cache.broken:
            raise InputError(
                "an earlier piece of this stream's text failed half way, so it can't go on: begin a new StreamingCache"
            )
        cache.broken, cache.unread = True, []
        while input_ids.shape[1]:
            if cache.tokens and cache.tokens % cache.lm.segment == 0:
                cache.begin_segment()
            rest = cache.lm.segment - cache.tokens % cache.lm.segment
            logits.append(_read(cache, input_ids[:, :rest], logits_to_keep, forward))
            if logits_to_keep == 1:
                logits = logits[-1:]
            input_ids = input_ids[:, rest:]
        cache.broken = False
    return torch.cat(logits, dim=1)[:, -logits_to_keep:]


def _read(cache: StreamingCache, input_ids: Tensor, logits_to_keep: int, forward: Callable[..., Any]) -> Tensor:
    """The next tokens of one segment."""
    lm, base = cache.lm, cache.lm.compressor.base
    scores = lm.compressor.scorer(cache.features(input_ids))[0]
    kept = scores > cache.threshold
    first = int(cache.tokens == 0 and lm.keep_first)
    *flags, lost = torch.cat([kept, scores.isnan().any()[None]]).tolist()  # the one thing that waits for the device
    if lost:
        raise InputError("the scorer gives scores that are no numbers: its weights, or the base's, are damaged")
    cache.chosen += sum(flags[first:])
    kept[:first], flags[:first] = True, [True] * first
    positions = torch.arange(cache.next_position, cache.next_position + len(kept), device=kept.device)
    inputs: dict[str, Any] = {
        cache_argument(base): cache.states,
        "position_ids": positions[None],
        "use_cache": True,
        "logits_to_keep": logits_to_keep,
    }
    if any(layer_windows(base.config)):
        keys = torch.cat([cache.positions, positions])[None]
        inputs["attention_mask"] = attention_masks(
            base, query_positions=positions[None], key_positions=keys, key_mask=torch.ones_like(keys, dtype=torch.bool)
        )
    with _adapters_of(lm, kept, flags):
        logits: Tensor = forward(input_ids=input_ids, **inputs).logits
    cache.note(kept)
    return logits


def _adapters_of(lm: Autoregressive, kept: Tensor, flags: list[bool]) -> AbstractContextManager[None]:
    """Merged copies where all tokens have one adapter, as single ones do. `flags` says the same as `kept`."""
    if all(flags):
        return lm.compressor.adapters.merged(PHI)
    if not any(flags):
        return lm.compressor.adapters.merged(THETA)
    return lm.compressor.adapters.mixed(kept[None])


@contextmanager
def streaming(lm: Autoregressive) -> Iterator[None]:
    """Within it, the base's forward passes over a `StreamingCache` go through `feed`: `base.generate` streams.

    Positions and masks that come with the tokens are ignored, the stream has its own; passes over other caches are as ever. Other
    threads wait with theirs.
    """
    with lm.compressor.adapters.lock:
        base: Any = lm.compressor.base
        plain, replaced = base.forward, vars(base).get("forward")
        base.forward = _streamed(lm, plain)
        try:
            yield
        finally:
            if replaced is None:
                del base.forward
            else:
                base.forward = replaced


def _streamed(lm: Autoregressive, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The base's forward, which passes over a `StreamingCache` by way of `feed`."""
    name = cache_argument(lm.compressor.base)

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(name)
        if not isinstance(cache, StreamingCache):
            return plain(*args, **kwargs)
        cache.check(lm)
        input_ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
        if input_ids is None:
            raise InputError("a stream reads token ids, not embeddings")
        if mask is not None and input_ids.shape[-1] > 1 and not bool(mask[:, -input_ids.shape[-1] :].all()):
            raise InputError("a stream holds one text, without padding")
        logits = _feed(cache, input_ids, int(kwargs.get("logits_to_keep") or 0), plain)
        output: Any = CausalLMOutputWithPast
        return output(logits=logits, **{name: cache})

    return forward


def generate_ids(
    lm: Autoregressive,
    prompt: list[int],
    *,
    max_new_tokens: int,
    cache: StreamingCache | None = None,
    pad_token_id: int = 0,
    **generation: Any,
) -> list[int]:
    """Go on with a text, in bounded memory, with transformers' own `generate`; greedy unless told otherwise.

    Args:
        lm: the model and settings.
        prompt: token ids, at least one; any number.
        max_new_tokens: at most so many tokens, at least 1.
        cache: of a text that the prompt follows; it takes prompt and new tokens in, but for the last one. None: a new text.
        pad_token_id: where the base's generation config has none.
        generation: anything `transformers.GenerationMixin.generate` takes, but for beams, several return sequences, guidance, a
            call without cache, and results other than token ids.

    Returns:
        New tokens, up to the end token.

    Raises:
        InputError: an empty prompt, a bad number, one of those settings, or a cache of another model.
    """
    base: Any = lm.compressor.base
    if not prompt:
        raise InputError("the prompt is empty")
    check_ids(base, [prompt])
    settings, rest = settings_of(lm, max_new_tokens, pad_token_id, generation)
    cache = StreamingCache(lm) if cache is None else cache
    input_ids = torch.tensor([prompt], device=device_of(base))
    longer = int(cache.tokens > 0)  # than the prompt, by which `generate` knows that all of it is new; how much is nothing to it
    mask = torch.ones(1, len(prompt) + longer, dtype=torch.long, device=input_ids.device)
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask, cache_argument(base): cache}
    with torch.no_grad(), streaming(lm):
        made = generated(base, inputs, settings, rest)[0, len(prompt) :].tolist()
    new = until_end(made, settings.eos_token_id)
    cache.unread = new[-1:] if len(new) == len(made) else []
    return new


def settings_of(
    lm: Autoregressive, max_new_tokens: int, pad_token_id: int, generation: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """What `generate_ids` makes of its settings; see `generation_settings`.

    Raises:
        InputError: a stream can't do what is asked.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    for name, only in _ONLY.items():
        if generation.get(name) not in (None, only):
            raise InputError(f"{name} must be {only}, not {generation[name]!r}: a stream holds one text, and gives its tokens")
    for name in TRYING_OUT:
        if generation.get(name) is not None:
            raise InputError(f"{name} can't be given: it tries tokens out, and a stream can't take back what it has read")
    return generation_settings(lm.compressor, max_new_tokens, pad_token_id, generation | _ONLY)

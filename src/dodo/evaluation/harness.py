"""Dodo as a model of lm-evaluation-harness, all of whose tasks it then does from compressed contexts.

    python -m dodo.evaluation.harness --model dodo --model_args model=smollm2-135m,ratio=5 --tasks squad_completion --limit 50

A request's context is compressed but for its last `whole` tokens, which the decoder reads, with theta, before it scores a
continuation or writes one. Texts that are scored whole (`loglikelihood_rolling`) are read by the autoregressive LM. With ratio 1,
fresh adapters and no kept first token, all numbers are those of the harness's own `hf` model on the same base, of texts that fit
its window. What does not is an error, where `hf` cuts it.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.models.utils_hf import stop_sequences_criteria
    from lm_eval.utils import get_rolling_token_windows
except ImportError as error:
    raise ImportError(f"{error}; the harness is an extra: pip install 'dodo-lm[harness]'") from None

from dodo.adapters import THETA
from dodo.architecture import AT_ONCE, backbone, logits_of
from dodo.base import Quantization, held_in
from dodo.errors import InputError
from dodo.generation import pad_rows
from dodo.loading import Loading
from dodo.model import Dodo
from dodo.nuggets import Nuggets

__all__ = ["DodoLM"]


_DEFAULT = "smollm2-135m"


@register_model("dodo")
class DodoLM(TemplateLM):
    """See above.

    Args:
        model: as for `Dodo.from_pretrained`, or a loaded one; `pretrained` is the same.
        ratio: tokens per nugget; None: the configured one.
        whole: tokens at the end of a context that are not compressed, at least 1.
        window, segment: of the autoregressive LM; see `Dodo.autoregressive`.
        batch_size: contexts at a time, each compressed once for all its continuations; and continuations at a time.
        max_gen_toks: tokens written, where a task does not say.
        max_batch_size: what the harness passes on to all models; of no effect.
        base, device, dtype, quantization: see `Loading`. The harness asks for `cuda:0` unless told otherwise; where there is
            none, the default device is taken, as its own models do.

    Raises:
        InputError: an argument that is not among these, `whole` or `batch_size` is no number of at least 1, or see
            `Dodo.from_pretrained`.
    """

    def __init__(
        self,
        model: str | Dodo = _DEFAULT,
        *,
        ratio: float | None = None,
        whole: int = 32,
        window: int = 128,
        segment: int = 64,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        device: str | None = None,
        dtype: str = "auto",
        base: str | None = None,
        quantization: Quantization | None = None,
        pretrained: str | None = None,
        max_batch_size: int | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            names = [name for name in inspect.signature(DodoLM.__init__).parameters if name not in ("self", "unknown")]
            raise InputError(f"the model dodo takes no {', '.join(unknown)}; it takes {', '.join(names)}")
        if pretrained is not None and model != _DEFAULT:
            raise InputError(f"pretrained={pretrained} and model={model} are two names of one thing; leave one out")
        model = pretrained or model
        if not str(batch_size).isdigit() or int(batch_size) < 1 or whole < 1:
            raise InputError(f"batch_size and whole must be whole numbers of at least 1, not {batch_size!r} and {whole!r}")
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None
        self.dodo = model if isinstance(model, Dodo) else Loading(model, base, device, dtype, quantization).load()
        self.tokenizer = self.dodo.tokenizer
        self.ratio = self.dodo.config.ratio if ratio is None else float(ratio)
        self.whole, self.window, self.segment = whole, window, segment
        self.batch_size, self.max_gen_toks = int(batch_size), max_gen_toks

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its record's `config`: which weights and settings a result is of."""
        fingerprint = self.dodo.fingerprint
        return {
            "base_fingerprint": fingerprint.base,
            "adapter_fingerprint": fingerprint.adapter,
            "model_dtype": held_in(self.dodo.compressor.base),
            "ratio": self.ratio,
            "whole": self.whole,
            "window": self.window,
            "segment": self.segment,
        }

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return int(self.eot_token_id if bos is None else bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is False or not string:
            ids: list[int] = self.tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]
            return ids
        return self.dodo.document_ids(string, literal=False)

    # -- scores

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        continuations = [continuation for _, _, continuation in requests]
        documents, prompts = self._split([context for _, context, _ in requests])
        asked_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, document in enumerate(documents):
            asked_of[tuple(document)].append(i)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Scoring continuations")

        for i in asked_of.pop((), []):
            found[i] = _likelihood(self._read(prompts[i] + continuations[i][:-1]), continuations[i], self.dodo)
            bar.update()
        for some in _batches(sorted(asked_of, key=len, reverse=True), self.batch_size):
            nuggets = self.dodo.compress_ids([list(document) for document in some], ratio=self.ratio)
            asked = [(i, place) for place, document in enumerate(some) for i in asked_of[document]]
            for part in _batches(asked, self.batch_size):
                rows = [prompts[i] + continuations[i][:-1] for i, _ in part]
                ids, mask = pad_rows(rows, 0, left=False, device=self.dodo.device)
                held = Nuggets.stack([nuggets[place] for _, place in part])
                states = self.dodo.compressor.decode(held, ids, mask, states=True)
                for i, state, row in zip((i for i, _ in part), states, rows, strict=True):
                    found[i] = _likelihood(state[: len(row)], continuations[i], self.dodo)
                bar.update(len(part))
        bar.close()
        return found

    def _read(self, ids: list[int]) -> Tensor:
        """States [T, d] of tokens with nothing before them."""
        compressor = self.dodo.compressor
        with compressor.adapters.use(THETA):
            read = backbone(compressor.base)(input_ids=torch.tensor([ids], device=self.dodo.device), use_cache=False)
        states: Tensor = read.last_hidden_state[0]
        return states

    def _split(self, contexts: Iterable[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """What is compressed of each context, and what is not; of one token there is nothing to compress."""
        contexts = [context or [self.prefix_token_id] for context in contexts]  # blanks go to what is scored
        cuts = [(context, max(1, len(context) - self.whole) if len(context) > 1 else 0) for context in contexts]
        return [context[:cut] for context, cut in cuts], [context[cut:] for context, cut in cuts]

    @torch.no_grad()
    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        lm = self.dodo.autoregressive(ratio=self.ratio, window=self.window, segment=self.segment)
        found = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Scoring texts"):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            total = 0.0
            for read, wanted in get_rolling_token_windows(tokens, self.prefix_token_id, lm.longest, 1):
                states = lm.forward(torch.tensor([read], device=self.dodo.device), states=True)[0]
                total += _likelihood(states, wanted, self.dodo)[0]
            found.append(total)
        return found

    # -- texts

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        ordered = Collator(
            [request.args for request in requests],
            sort_fn=lambda args: (-len(self.tok_encode(args[0])), args[0]),
            group_by="gen_kwargs",
            group_fn=lambda args: args[1],
        )
        eos, made = self.tokenizer.decode([self.eot_token_id]), []
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Writing")
        for some in ordered.get_batched(n=self.batch_size, batch_fn=None):
            contexts = [self.tok_encode(context) for context, _ in some]
            if min(map(len, contexts)) < 2:
                raise InputError("a context of less than 2 tokens leaves nothing to compress and to read on from")
            settings = dict(normalize_gen_kwargs(dict(some[0][1]), self.max_gen_toks))
            until, new_tokens = handle_stop_sequences(settings.pop("until", None), eos=eos), settings.pop("max_gen_toks")
            if not settings.get("do_sample"):
                settings.pop("temperature", None)
            documents, prompts = self._split(contexts)
            new = self.dodo.generate_ids(
                self.dodo.compress_ids(documents, ratio=self.ratio),
                prompts,
                max_new_tokens=int(new_tokens),
                stopping_criteria=stop_sequences_criteria(self.tokenizer, until, max(map(len, prompts)), len(prompts)),
                **settings,
            )
            made += [postprocess_generated_text(self.tokenizer.decode(ids, skip_special_tokens=True), until, None) for ids in new]
            bar.update(len(some))
        bar.close()
        texts: list[str] = ordered.get_original(made)
        return texts


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _likelihood(states: Tensor, wanted: Sequence[int], dodo: Dodo) -> tuple[float, bool]:
    """Sum of log p, and whether each token is the likeliest, of the tokens behind the last states of [T, d]."""
    targets = torch.tensor(list(wanted), dtype=torch.long, device=states.device)
    total, greedy = 0.0, True
    for some, behind in zip(states[len(states) - len(targets) :].split(AT_ONCE), targets.split(AT_ONCE), strict=True):
        logits = logits_of(dodo.compressor.base, some)
        total -= float(torch.nn.functional.cross_entropy(logits, behind, reduction="sum"))
        greedy &= bool((logits.argmax(-1) == behind).all())
    return total, greedy


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

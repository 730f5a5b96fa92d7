"""The facade: texts in, nuggets and answers out. Everything it does is also there as plain functions on tokens and tensors.

    dodo = Dodo.from_pretrained("smollm2-135m")
    nuggets = dodo.compress(text, ratio=10)
    nuggets.save("text.nuggets")
    print(dodo.answer(nuggets, "Who wrote it?"))

Paper: Section 2.3 in use.
"""

import copy
import dataclasses
import json
import math
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from dodo import adapter_files, fingerprint, hub, streaming
from dodo.adapters import THETA, Lock
from dodo.architecture import FAMILIES, check_ids, device_of, key_shape
from dodo.attention import windows_by_position
from dodo.autoregressive import Autoregressive
from dodo.base import LoadedBase, load_base
from dodo.compressor import Compressor
from dodo.config import CONFIG_FILE, DodoConfig, TrainedAs, Use
from dodo.errors import DodoWarning, FingerprintMismatch, InputError, UnsupportedModelError
from dodo.generation import end_ids, generate_ids, generation_settings, pad_rows
from dodo.nuggets import Fingerprint, Nuggets
from dodo.pieces import Pieces
from dodo.prompts import MESSAGE, check_whole, ends_of_turn, question_prompt, turn_ids
from dodo.streaming import StreamingCache
from dodo.thresholds import Pace, Thresholds

__all__ = ["Dodo", "begins_with_bos"]

NAMES: dict[TrainedAs, str] = {
    "compressor": "a compressor",
    "autoregressive": "an autoregressive LM",
    "compressive": "the baseline Compressive",
    "icae": "the baseline ICAE",
    "full": "the baseline Full",
}


class Dodo:
    """A base model with its two adapters, scorer and tokenizer, ready to compress and answer.

    Attributes:
        compressor: the computation on tensors (`Compressor`).
        tokenizer: the base's.
        fingerprint: what nuggets made here are stamped with.
        thresholds: of the scorer, for the autoregressive LM; None if they have not been estimated.

    Args:
        base: a loaded base model (see `load_base`), wrapped in place.
        config: settings of the adapters, which are fresh until `load_adapters`, whatever others learned with these settings.
    """

    def __init__(self, base: LoadedBase, config: DodoConfig | None = None) -> None:
        if (layers := base.model.config.num_hidden_layers) < 2:
            raise UnsupportedModelError(f"{base.name} has {layers} layer; the scorer reads one below the last, so two are needed")
        config = config or DodoConfig(feature_layer=min(3, layers - 1))
        if config.base_fingerprint is not None:  # the configuration of another model, whose weights do not come with it
            config = dataclasses.replace(config, base=None, trained_ratios=None, trained_as=None)
        config = dataclasses.replace(config, base=config.base or base.name, base_fingerprint=base.fingerprint)
        self._base = base
        self.tokenizer: PreTrainedTokenizerBase = base.tokenizer
        self.compressor = Compressor(base.model, config).eval()
        if base.model.config.model_type not in FAMILIES:
            self.compressor.check_moves()
        self.thresholds: Thresholds | None = None
        self._tokenizing = Lock()
        self.stamp()

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: DodoConfig | None = None,
        *,
        allow_untested: bool = False,
    ) -> "Dodo":
        """Wrap a model that is already in memory, with fresh adapters.

        Raises:
            UnsupportedModelError: its architecture can't hold nuggets, or has not been tested and was not allowed.
            InputError: its attention backend leaves out a part of its arithmetic.
        """
        from dodo.architecture import check_supported
        from dodo.base import check_attention

        check_supported(model.config, allow_untested=allow_untested)
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        check_attention(model.config, model.config._attn_implementation, name)
        return cls(LoadedBase(model.eval(), tokenizer, fingerprint.of_model(model), name), config)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path = "smollm2-135m",
        *,
        base: str | Path | None = None,
        config: DodoConfig | None = None,
        fresh: bool = False,
        ignore_fingerprint: bool = False,
        revision: str | None = None,
        **loading: Any,
    ) -> "Dodo":
        """Load trained adapters and their base, or a base with fresh adapters.

        Args:
            name: a folder or hub id with a `dodo_config.json`, or a base: alias, folder, `.gguf` file or hub id.
            base: load this base instead of the one that the adapters name.
            config: settings of fresh adapters.
            fresh: leave out the trained adapters that ship for a base's alias.
            ignore_fingerprint: use adapters although the base's weights are not those they were trained on.
            revision: of a hub id.
            loading: dtype, device, quantization, attn_implementation, allow_untested, progress; see `load_base`.

        Raises:
            InputError: nothing of that name, or files that do not fit together.
            FingerprintMismatch: the base's weights are not those that the adapters were trained on.
            UnsupportedModelError, DownloadError: see `load_base`.
        """
        folder = None if fresh or config is not None else adapter_files.find(str(name), revision)
        if folder is None:
            if base is not None and not (fresh or config is not None):
                raise InputError(f"{str(name)!r} has no {CONFIG_FILE}, so there are no adapters to put on {str(base)!r}")
            return cls(load_base(base or name, revision=revision, **loading), config)
        config = DodoConfig.load(folder / CONFIG_FILE)
        if base is None and config.base is None:
            raise InputError(f"{folder / CONFIG_FILE} names no base model; pass base=...")
        try:
            loaded = load_base(base or str(config.base), **loading)
        except InputError as error:
            if base is not None:
                raise
            told = f"it is the base that the adapters in {name} name; pass another place as base=, or write it into {CONFIG_FILE}"
            raise InputError(f"{error}; {told}") from error
        if base is not None:
            config = dataclasses.replace(config, base=None)  # the place that holds from now on
        if config.base_fingerprint not in (None, loaded.fingerprint) and not ignore_fingerprint:
            raise FingerprintMismatch(
                f"the adapters in {name} were trained on base weights {config.base_fingerprint}, but {loaded.name} has "
                f"{loaded.fingerprint}; load the right base (base=, --base), or, if you know that they agree, load them in "
                "Python with ignore_fingerprint=True"
            )
        dodo = cls(loaded, config)
        dodo._load(folder)
        dodo.compressor.config = dataclasses.replace(
            dodo.config, base=config.base or loaded.name, trained_ratios=config.trained_ratios, trained_as=config.trained_as
        )
        return dodo

    @property
    def config(self) -> DodoConfig:
        """Settings of the adapters."""
        return self.compressor.config

    @property
    def is_trained(self) -> bool:
        """Whether the adapters have been trained (`trained_ratios` is set); fresh ones change nothing."""
        return self.config.trained_ratios is not None

    @property
    def device(self) -> torch.device:
        """Where the base's embeddings are."""
        return device_of(self.compressor.base)

    # -- compressing

    def compress(
        self,
        text: str | Sequence[str],
        *,
        ratio: float | None = None,
        nuggets: int | None = None,
        use: Use = "questions",
        segment: int | None = None,
    ) -> Nuggets:
        """Compress one text, or several as a batch. Paper: Section 2.3.

        Args:
            text: not empty. A text longer than the base's window is encoded in segments with compact positions, and so are all
                texts of its batch.
            ratio: tokens per nugget; or
            nuggets: number of nuggets; neither: the configured ratio.
            use: "questions", or whatever else is asked about the text, or "text", to rebuild it. Which tokens become nuggets
                depends on it where the adapters tell them apart (`DodoConfig.by_use`); either use is possible after.
            segment: tokens encoded at a time, of a text that is encoded in segments.

        Returns:
            Nuggets on the model's device; `nuggets[i]` takes one text out of a batch.

        Raises:
            InputError: an empty text, or a bad ratio or count.
        """
        if ratio is not None and nuggets is not None:
            raise InputError("give either a ratio or a number of nuggets, and not both")
        if not isinstance(text, Sequence):
            raise InputError(f"a text, or a list of them, is wanted, not {type(text).__name__}")
        if len(text) == 0 and not isinstance(text, str):
            raise InputError("there are no texts to compress")
        rows = [self.document_ids(t) for t in ([text] if isinstance(text, str) else text)]
        made = self.compress_ids(rows, ratio=ratio, nuggets=nuggets, use=use, segment=segment)
        if told := self.warning_of(made):
            warnings.warn(told, DodoWarning, stacklevel=2)
        return made

    def compress_ids(
        self,
        rows: list[list[int]],
        *,
        ratio: float | None = None,
        nuggets: int | None = None,
        use: Use = "questions",
        segment: int | None = None,
    ) -> Nuggets:
        """`compress` on token ids: rows without padding, taken as they are, and without a warning of the ratio.

        Raises:
            InputError: there are no rows, a row has no tokens or one that the base does not know; or a bad ratio or count.
        """
        if not rows or not all(rows):
            raise InputError("there are no texts, or a text has no tokens: there is nothing to compress")
        check_ids(self.compressor.base, rows)
        input_ids, attention_mask = pad_rows(rows, self._pad_id, left=False, device=self.device)
        with torch.no_grad():
            return self._roomy(input_ids.shape[1], len(rows)).encode(
                input_ids, attention_mask, ratio=ratio, nuggets=nuggets, use=use, segment=segment
            )

    def document_ids(self, text: str, *, literal: bool = True) -> list[int]:
        """Token ids of a document, the BOS token in front if the tokenizer or `keep_first` wants it.

        Args:
            text: not empty.
            literal: names of special tokens in the text are text; otherwise they are these tokens.

        Raises:
            InputError: the text is empty, or has half a character in it.
        """
        if not isinstance(text, str):
            raise InputError(f"a text must be a string, not {type(text).__name__}")
        check_whole(text, "the text")
        if not text:
            raise InputError("the text is empty: there is nothing to compress")
        return self.with_bos(self._ids(text, literal=literal))

    def with_bos(self, ids: list[int]) -> list[int]:
        """Token ids of a text's beginning, the BOS token in front if the tokenizer or `keep_first` wants it."""
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:1] != [bos]:
            with self._tokenizing:
                wanted = begins_with_bos(self.tokenizer, self.config)
            ids = [bos, *ids] if wanted else ids
        return ids

    def _roomy(self, tokens: int, texts: int) -> Compressor:
        """The compressor, set to compact positions if the text is longer than the window."""
        compressor = self.compressor
        told = self.beyond_window(tokens)
        if told is None or compressor.config.positions == "compact":
            return compressor
        warnings.warn(told + (", and so are the texts of its batch" if texts > 1 else ""), DodoWarning, stacklevel=4)
        roomy = copy.copy(compressor)
        roomy.config = dataclasses.replace(compressor.config, positions="compact")
        return roomy

    def beyond_window(self, tokens: int) -> str | None:
        """What to tell of a text of so many tokens if it is longer than the base's window; or None."""
        if tokens <= self.compressor.window:
            return None
        told = f"a text of {tokens:,} tokens is longer than the base's window of {self.compressor.window:,}"
        return f"{told}: it is encoded in segments, with compact positions"

    def warning_of(self, nuggets: Nuggets) -> str | None:
        """What to tell of nuggets if the adapters were not trained to compress, or not at the ratio of one text; or None."""
        if told := self.trained_otherwise("compressor"):
            return told
        ratios = [nuggets.ratio] if nuggets.ratio is not None else (nuggets.lengths / nuggets.k).tolist()
        return next(filter(None, map(self.far_from_training, ratios)), None)

    def far_from_training(self, ratio: float) -> str | None:
        """What to tell of a ratio that the adapters were not trained for; None if they were, or are fresh."""
        trained = self.config.trained_ratios
        if trained is None or trained[0] <= ratio <= trained[1]:
            return None
        return f"ratio {ratio:g} is outside the range that these adapters were trained for ({trained[0]:g} to {trained[1]:g})"

    def trained_otherwise(self, use: TrainedAs) -> str | None:
        """What to tell of adapters that learned to be something else than what they are used as; or None."""
        trained = self.config.trained_as
        if trained in (None, use):
            return None
        return f"these adapters were trained as {NAMES[trained]}, not as {NAMES[use]}: little of what they learned holds here"

    # -- generating

    def answer(self, nuggets: Nuggets, question: str | Sequence[str], *, max_new_tokens: int = 64, **generation: Any) -> Any:
        """Answer a question about the compressed text. Paper: Section 6.1, Appendix D.2 (greedy, up to 64 tokens).

        Args:
            nuggets: of one text, or of as many as there are questions.
            question: one, or one for each text.
            generation: see `generate`.

        Returns:
            str for one question, else list[str].

        Raises:
            InputError: an empty question.
        """
        questions = [question] if isinstance(question, str) else list(question)
        if not questions:
            raise InputError("the question is empty")
        rows = [self.question_ids(q) for q in questions]
        if self.answer_ends:
            generation.setdefault("eos_token_id", self.answer_ends)
        new = self.generate_ids(nuggets, rows, max_new_tokens=max_new_tokens, **generation)
        return self._texts(new, single=isinstance(question, str))

    @property
    def answer_ends(self) -> list[int]:
        """Tokens that end an answer: the base's own, and what its chat template ends a reply with."""
        base: Any = self.compressor.base
        with self.compressor.adapters.lock:  # a generation that runs has the base's config changed
            own: int | list[int] | None = base.generation_config.eos_token_id
        known = set(own if isinstance(own, list) else [] if own is None else [own])
        with self._tokenizing:
            return sorted(known | ends_of_turn(self.tokenizer))

    def question_ids(self, question: str) -> list[int]:
        """Token ids of what the decoder is asked about a compressed text; names of special tokens in the question are text.

        Raises:
            InputError: an empty question.
        """
        if not question.strip():
            raise InputError("the question is empty")
        with self._tokenizing:
            return turn_ids(self.tokenizer, question_prompt(self.tokenizer, MESSAGE), question.strip())

    def rebuilt_tokens(self, nuggets: Nuggets) -> list[int]:
        """How many tokens each text and its end token have, of which `reconstruct` makes no more."""
        kept = nuggets.sinks if self.tokenizer.bos_token_id is None else 0  # the first tokens of texts, or BOS, which is no text
        lengths: list[int] = (nuggets.lengths + kept + 1).tolist()
        return lengths

    def reconstruct(self, nuggets: Nuggets, *, max_new_tokens: int | None = None, **generation: Any) -> Any:
        """Rebuild the text from its nuggets, asked by the soft token. Paper: Section 4 (autoencoding).

        Args:
            nuggets: of one text or several.
            max_new_tokens: None: of each text as many tokens as it had, and an end token.
            generation: see `generate`.

        Returns:
            str for one text, else list[str].
        """
        lengths = self.rebuilt_tokens(nuggets)
        most = max(lengths) if max_new_tokens is None else max_new_tokens
        new = self.generate_ids(nuggets, None, max_new_tokens=most, **generation)
        if max_new_tokens is None:  # a short text that does not end must not run on to the longest one's length
            each = len(new) // len(lengths)
            new = [ids[: lengths[i // each]] for i, ids in enumerate(new)]
        return self._texts(new)

    def generate(
        self, nuggets: Nuggets, prompt: str | Sequence[str] | None, *, max_new_tokens: int = 128, **generation: Any
    ) -> Any:
        """Continue from nuggets and a prompt, with transformers' own generation. The nuggets are not changed.

        Args:
            nuggets: of one text, or of as many as there are prompts.
            prompt: one, or one per text; None asks for reconstruction with the soft token.
            max_new_tokens: at most so many tokens.
            generation: what `transformers.GenerationMixin.generate` takes: do_sample, temperature, num_beams,
                num_return_sequences, streamer, stopping_criteria, stop_strings, ... Greedy unless told otherwise, without
                penalties that the base's own generation config may have; what that says of sampling holds with do_sample.

        Returns:
            str, or list[str] for several prompts or several sequences per prompt.

        Raises:
            InputError: an empty prompt, not as many prompts as texts, or a setting that would not give text from these nuggets.
            WindowError: the positions do not fit the base's window.
            FingerprintMismatch: the nuggets were made by another model.
        """
        prompts = None if prompt is None else [prompt] if isinstance(prompt, str) else list(prompt)
        rows = None if prompts is None else [self._prompt_ids(p) for p in prompts]
        new = self.generate_ids(nuggets, rows, max_new_tokens=max_new_tokens, **generation)
        return self._texts(new, single=prompt is None or isinstance(prompt, str))

    def _texts(self, rows: list[list[int]], *, single: bool = True) -> Any:
        """What tokens say: a str for one row, where one was asked for by itself, else list[str]."""
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in rows]
        return texts[0] if len(texts) == 1 and single else texts

    def stream(
        self, nuggets: Nuggets, prompt: str | Sequence[int] | None, *, max_new_tokens: int = 128, **generation: Any
    ) -> Generator[str, None, None]:
        """Like `generate` for one text, piece by piece as the text comes. Generation ends when the iterator is closed.

        The prompt may also be token ids, those of `question_ids`.

        Raises:
            InputError: beams, or several sequences, which can't be told apart in one stream; or see `generate`.
        """
        for name in ("num_beams", "num_return_sequences"):
            if (generation.get(name) or 1) > 1:
                raise InputError(f"text streams one sequence at a time: leave {name} out, or call generate")
        rows = None if prompt is None else [self._prompt_ids(prompt) if isinstance(prompt, str) else list(prompt)]
        known, _ = generation_settings(self.compressor, max_new_tokens, self._pad_id, generation)

        def generate(hung_up: threading.Event, **settings: Any) -> None:
            self.generate_ids(nuggets, rows, max_new_tokens=max_new_tokens, **settings)

        yield from self._pieces(generate, generation, skip_prompt=prompt is not None, ends=end_ids(known.eos_token_id))

    def _pieces(
        self,
        generate: Callable[..., None],
        generation: dict[str, Any],
        *,
        skip_prompt: bool,
        behind: int | None = None,
        ends: Sequence[int] = (),
    ) -> Generator[str, None, None]:
        """Text as a generation in a thread of its own makes it.

        Args:
            generate: takes an event that is set when nobody reads any more, and settings for transformers' `generate`.
            generation: more of those.
            skip_prompt, behind, ends: see `Pieces`.

        Raises:
            InputError: the calling thread has the base changed for itself, for which the generation would wait forever; or a
                streamer, whose place the pieces take.
        """
        if generation.get("streamer") is not None:
            raise InputError("streamer can't be given: what comes back are the pieces; call generate or write with it")
        if self.compressor.adapters.lock.mine:
            raise InputError("text can't be streamed within `adapters.use` or `streaming`: leave that context first")
        streamer = Pieces(self.tokenizer, skip_prompt=skip_prompt, behind=behind, ends=ends)
        failure: list[BaseException] = []
        hung_up = _HungUp()
        criteria = [*(generation.get("stopping_criteria") or ()), hung_up]

        def run() -> None:
            try:
                generate(hung_up.event, **{**generation, "streamer": streamer, "stopping_criteria": criteria})
            except BaseException as error:  # handed to the reader below
                failure.append(error)
            finally:
                streamer.stop()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield from streamer
        finally:
            hung_up.event.set()
            while thread.is_alive():  # a second Ctrl-C must not leave it at work on what others read
                with suppress(KeyboardInterrupt):
                    thread.join()
        if failure:
            raise failure[0]

    @contextmanager
    def decoding(self) -> Iterator[PreTrainedModel]:
        """Within it the base decodes over nuggets, theta on: for a generation loop of one's own. Paper: Eq. 12, 13.

        Give it `nuggets.to_cache()` as its cache, `position_ids` [B, M] from `nuggets.next_positions` on, and, if texts differ
        in length, an `attention_mask` [B, K + M]. Sliding windows then count positions. Its own `generate` does not know that
        the cache has other positions than entries; `Dodo.generate` does.

            cache, positions = nuggets.to_cache(), nuggets.next_positions[:, None] + torch.arange(ids.shape[1])
            with dodo.decoding() as base, torch.no_grad():
                for _ in range(20):
                    logits = base(input_ids=ids, position_ids=positions, past_key_values=cache).logits  # or cache=, by the base
                    ids, positions = logits[:, -1:].argmax(-1), positions[:, -1:] + 1

        Yields:
            The base. Calls from other threads wait meanwhile.
        """
        base = self.compressor.base
        with self.compressor.adapters.use(THETA), windows_by_position(base):
            yield base

    def generate_ids(
        self, nuggets: Nuggets, prompts: list[list[int]] | None, *, max_new_tokens: int, **generation: Any
    ) -> list[list[int]]:
        """`generate` on token ids: prompts without padding in, new tokens out."""
        self.check(nuggets)
        settings = self._completed(generation)
        return generate_ids(self.compressor, nuggets, prompts, max_new_tokens=max_new_tokens, **settings)

    def _completed(self, generation: dict[str, Any]) -> dict[str, Any]:
        """Settings with an id to fill up rows with, and the tokenizer where strings to stop at are looked for in its tokens."""
        more: dict[str, Any] = {"tokenizer": self.tokenizer} if generation.get("stop_strings") else {}
        if generation.get("pad_token_id") is None:
            return more | generation | {"pad_token_id": self._pad_id}
        return more | generation

    def _prompt_ids(self, prompt: str) -> list[int]:
        check_whole(prompt, "the prompt")
        return self._ids(prompt, literal=False)

    def _ids(self, text: str, *, literal: bool) -> list[int]:
        """A tokenizer is changed by being asked to take special tokens literally, so one thread at a time may ask it."""
        with self._tokenizing:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=literal, verbose=False)[
                "input_ids"
            ]
        return ids

    # -- autoregressive LM

    def estimate_thresholds(self, texts: Iterable[str | Sequence[int]], *, feature_window: int = 512) -> Thresholds:
        """Run the scorer on sampled texts, and keep the thresholds of many ratios. Paper: Section 2.2.

        Args:
            texts: or their token ids: some ten thousand tokens of the kind that is to be read; to be estimated again when the
                scorer has changed.
            feature_window: tokens that each layer below the scorer looks back on; half the base's window at most.

        Returns:
            The table, which is also kept as `thresholds` and saved with the adapters.

        Raises:
            InputError: an empty text, too few tokens, or a string in place of several.
        """
        if isinstance(texts, str):
            raise InputError("texts are several: for a single one, give [text]")
        lm = Autoregressive(self.compressor, threshold=-math.inf, window=1, segment=1, feature_window=feature_window)
        scores = lm.sampled_scores(self.document_ids(text) if isinstance(text, str) else text for text in texts)
        self.thresholds = Thresholds.estimate(scores, feature_window=lm.feature_window)
        return self.thresholds

    def autoregressive(
        self,
        *,
        ratio: float | None = None,
        threshold: float | Pace | None = None,
        window: int = 128,
        segment: int = 64,
        max_states: int | None = None,
    ) -> Autoregressive:
        """This model as a language model whose memory of its own text is compressed and bounded. Paper: Section 2.2.

        Args:
            ratio: tokens per nugget; needs `thresholds`, but for 1. The threshold follows the text, see `Pace`; or
            threshold: Lambda, scores above which tokens are kept, for the whole text (Eq. 8); neither: the configured ratio.
            window: tau, tokens seen uncompressed before each segment.
            segment: tokens that share the index at which the text is split.
            max_states: tokens held at most; None: as many as the base's window holds.

        Raises:
            InputError: ratio and threshold both given, no thresholds estimated, or a setting out of range.
        """
        if ratio is not None and threshold is not None:
            raise InputError("give either a ratio or a threshold, and not both")
        if told := self.trained_otherwise("autoregressive"):
            warnings.warn(told, DodoWarning, stacklevel=2)
        known, ratio = self.thresholds, self.config.ratio if ratio is None else ratio
        if threshold is None and ratio == 1:
            threshold = -math.inf
        if threshold is None:
            if known is None:
                raise InputError("these adapters have no thresholds yet; call estimate_thresholds(texts), or give a threshold")
            if told := self.far_from_training(ratio):
                warnings.warn(told, DodoWarning, stacklevel=2)
            threshold = Pace(known, ratio)
        features = {} if known is None else {"feature_window": known.feature_window}
        return Autoregressive(
            self.compressor, threshold=threshold, window=window, segment=segment, max_states=max_states, **features
        )

    def write(self, text: str, lm: Autoregressive | None = None, *, max_new_tokens: int = 128, **generation: Any) -> str:
        """Go on with a text of any length, in bounded memory, with transformers' own generation.

        Args:
            text: not empty; the BOS token is put in front as for documents.
            lm: see `autoregressive`; None: with the configured ratio.
            max_new_tokens: at most so many tokens.
            generation: see `generate`; beams and several return sequences are refused. Penalties for what was said before look
                back on the text's last segment.

        Returns:
            The new text.

        Raises:
            InputError: see `autoregressive` and `streaming.generate_ids`.
        """
        cache, ids = StreamingCache(lm or self.autoregressive()), self.document_ids(text)
        settings = self._completed(generation)
        streaming.settings_of(cache.lm, max_new_tokens, self._pad_id, settings)
        *segments, last = streaming.segments(cache, ids)
        for segment in segments:
            streaming.feed(cache, torch.tensor([segment], device=self.device), logits_to_keep=1)
        new = streaming.generate_ids(
            cache.lm,
            last,
            cache=cache,
            max_new_tokens=max_new_tokens,
            **settings,
        )
        streamer = Pieces(self.tokenizer, skip_prompt=False, behind=ids[-1])
        streamer.put(torch.tensor(new, dtype=torch.long))
        streamer.end()
        return "".join(streamer)

    def stream_text(
        self,
        text: str | Sequence[int],
        lm: Autoregressive | None = None,
        *,
        cache: StreamingCache | None = None,
        behind: int | None = None,
        max_new_tokens: int = 128,
        progress: Callable[[int, int], None] | None = None,
        **generation: Any,
    ) -> Generator[str, None, None]:
        """Like `write`, piece by piece as the new text comes; the first piece, maybe empty, comes with the first new token.

        Closing the iterator ends reading at the next segment's end and generation at the next token; the cache stays whole.

        Args:
            text: or its token ids, not empty.
            lm: see `write`.
            cache: of a text that this one follows; it takes in this text and the new one, but for the last token made. A text
                that is no token ids follows that last token too.
            behind: where the text is token ids, the one that the new text goes on behind, for some tokenizers leave out a text's
                first space; None: the new text is one of its own, as a reply is.
            max_new_tokens: at most so many tokens.
            progress: told how many tokens of the text have been read, and how many there are.
            generation: see `write`.

        Raises:
            InputError: see `write`; or the cache is of another model.
        """
        if cache is None:
            cache = StreamingCache(lm or self.autoregressive())
        elif lm is not None:
            cache.check(lm)
        # what is refused is so before anything is read
        settings, _ = streaming.settings_of(cache.lm, max_new_tokens, self._pad_id, generation)
        ids = self._following(text, cache) if isinstance(text, str) else list(text)
        if not ids:
            raise InputError("the prompt is empty")
        check_ids(self.compressor.base, [ids])
        *segments, last = streaming.segments(cache, ids)
        total = sum(map(len, segments)) + len(last)

        def generate(hung_up: threading.Event, **settings: Any) -> None:
            read = 0
            for segment in segments:
                if hung_up.is_set():
                    return
                streaming.feed(cache, torch.tensor([segment], device=self.device), logits_to_keep=1)
                read += len(segment)
                if progress is not None:
                    progress(read, total)
            streaming.generate_ids(
                cache.lm,
                last,
                cache=cache,
                max_new_tokens=max_new_tokens,
                **self._completed(settings),
            )

        behind = ids[-1] if isinstance(text, str) else behind
        yield from self._pieces(generate, generation, skip_prompt=True, behind=behind, ends=end_ids(settings.eos_token_id))

    def _following(self, text: str, cache: StreamingCache) -> list[int]:
        """Token ids of a text that goes on with what a stream has read and made."""
        ids = self.document_ids(text)
        return cache.unread + self._ids(text, literal=True) if cache.tokens else ids

    # -- what nuggets belong to

    def stamp(self) -> None:
        """Compute this model's fingerprint; to be called when the adapters' weights have changed, in whatever way."""
        compressor = self.compressor
        compressor.adapters.forget_merged()
        tensors: dict[str, Tensor] = dict(compressor.adapters.named_parameters())
        tensors |= adapter_files.tensors_of(compressor)
        self.fingerprint = Fingerprint(
            base=fingerprint.of_base(self._base.fingerprint, compressor.base.config),
            tokenizer=fingerprint.of_tokenizer(self.tokenizer),
            adapter=fingerprint.of_tensors(tensors, settings=self.config.identity()),
        )
        compressor.fingerprint = self.fingerprint

    def check(self, nuggets: Nuggets) -> None:
        """Raise FingerprintMismatch unless this model made these nuggets."""
        found, own = nuggets.keys.shape[::2], key_shape(self.compressor.base.config)
        if found != own:
            raise FingerprintMismatch(
                f"the nuggets have {found[0]} layers of {found[1]} heads of width {found[2]}; this base has "
                f"{own[0]} layers of {own[1]} heads of width {own[2]}"
            )
        self.fingerprint.check(nuggets.fingerprint, what="the file or object with these nuggets")

    def adopt(self, nuggets: Nuggets) -> Nuggets:
        """The same nuggets with this model's fingerprint: the override for those who know that they agree."""
        return dataclasses.replace(nuggets, fingerprint=self.fingerprint)

    # -- saving and loading

    def load_adapters(self, folder: str | Path, *, ignore_config: bool = False) -> None:
        """Load what `save_pretrained` wrote into this model, and what it was trained for.

        Args:
            folder: of the set.
            ignore_config: take the weights although the set was made for another base, or with settings on which it depends what
                nuggets are; what it was trained for stays this model's. For training that goes on under other settings.

        Raises:
            InputError: a file is missing or does not fit, or a setting differs.
            FingerprintMismatch: the set belongs to another base.
        """
        folder = Path(folder)
        if not ignore_config:
            there = DodoConfig.load(folder / CONFIG_FILE)
            self._check_config(there, folder)
        self._load(folder)
        if not ignore_config:
            self.compressor.config = dataclasses.replace(
                self.config, trained_ratios=there.trained_ratios, trained_as=there.trained_as
            )

    def _check_config(self, there: DodoConfig, folder: Path) -> None:
        own, set_ = json.loads(self.config.identity()), json.loads(there.identity())
        if differing := [name for name in dict.fromkeys([*own, *set_]) if own.get(name) != set_.get(name)]:
            names = ", ".join(differing)
            raise InputError(f"{folder} was made with other settings than this model's: {names}; load it with from_pretrained")
        if there.base_fingerprint not in (None, self.config.base_fingerprint):
            raise FingerprintMismatch(
                f"the adapters in {folder} belong to base weights {there.base_fingerprint}, this model has "
                f"{self.config.base_fingerprint}"
            )

    def _load(self, folder: Path) -> None:
        try:
            self.thresholds = None
            adapter_files.load(self.compressor, folder)
            self.thresholds = adapter_files.load_thresholds(folder)
        finally:  # also half-loaded adapters are others than before
            self.stamp()

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None, card: str | None = None) -> None:
        """Write adapters, scorer, soft token, memory tokens, thresholds, the whole configuration and a model card; not the base.

        Args:
            folder: made if it is not there.
            dtype: of the stored weights; None keeps their own.
            card: text of the model card (README.md); None writes a short one.

        Raises:
            InputError: the folder can't be written, or what learns is not finite. A set that was there
                is unchanged, replaced whole, or, where replacing it broke off, refused from then on.
        """
        adapter_files.save(self.compressor, Path(folder), dtype=dtype, card=card, thresholds=self.thresholds)

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload what `save_pretrained` writes. Returns the commit's address."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return hub.upload(Path(folder), repo_id, private=private, token=token)

    # -- tokens

    @property
    def _pad_id(self) -> int:
        """An id to fill up rows with; it is always masked, so any will do, and the vocabulary stays as it is."""
        known = self.compressor.base.config.vocab_size
        for candidate in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if candidate is not None and candidate < known:  # a token may have been added to the tokenizer alone
                return int(candidate)
        return 0


class _HungUp(StoppingCriteria):
    """Ends a generation that nobody reads any more."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device)


def begins_with_bos(tokenizer: PreTrainedTokenizerBase, config: DodoConfig) -> bool:
    """Whether a document has the BOS token in front: the first token is kept, or the tokenizer puts one there."""
    return config.keep_first or bool(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])

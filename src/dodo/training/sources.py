"""What a run reads: shards, or sources that are tokenised into its folder; and the batches that it is validated by.

What was read is kept by its contents' hash in `data.json`: a run that goes on must find the same.
"""

import hashlib
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from dodo.data.batches import Batch, Objective, QuestionSource, TextSource
from dodo.data.reading import resolve
from dodo.data.shards import Shard, ShardKind, prepare, read_shard
from dodo.errors import DodoWarning, InputError
from dodo.files import write_whole
from dodo.fingerprint import of_tokenizer
from dodo.model import Dodo, begins_with_bos
from dodo.training.recipe import Mixture, Recipe
from dodo.training.validation import fixed_batches, question_batches

__all__ = ["HELD_BACK", "open_sources"]

HELD_BACK = 0.02
"""Share of the documents with questions that is for validation: whole articles, where the records have titles."""


def open_sources(
    recipe: Recipe, dodo: Dodo, folder: Path, *, resume: bool = False, progress: bool = False
) -> tuple[TextSource | None, QuestionSource | None, dict[str, Batch]]:
    """Texts, questions, and the batches of every validation.

    Raises:
        InputError: there is no data, it is not of its kind or too long for the base's window, or it has changed since the
            run began.
    """
    tokenizer, data, mixture, running = dodo.tokenizer, recipe.data, recipe.mixture, recipe.running
    bos = tokenizer.bos_token_id if begins_with_bos(tokenizer, recipe.config) else None
    eos = tokenizer.eos_token_id
    if eos is None:
        raise InputError(f"{recipe.base} has no EOS token, which ends a reconstruction")
    seen: dict[str, str] = {}

    def texts(sources: Sequence[str]) -> list[Shard]:
        shards = [source for source in sources if source.endswith(".safetensors") and not source.startswith("hf:")]
        each = [name for source in sources for name in (resolve([source]) if source in shards else [source])]
        return [opened(source, "text") for source in each]

    def opened(source: str, kind: ShardKind) -> Shard:
        seen[source] = digest = _digest(source)
        if source.endswith(".safetensors"):
            shard = read_shard(source, tokenizer)
            if shard.kind != kind:
                raise InputError(f"{source} is a shard of kind {shard.kind}, not {kind}: see dodo prepare-data --kind")
            return shard
        most = f" {data.tokens}" if data.tokens else ""
        telling = f"{source} {digest} {data.commercial_only}{most} {of_tokenizer(tokenizer)}"
        how = hashlib.sha256(telling.encode()).hexdigest()[:12]
        made = folder / "data" / f"{Path(source).name.replace('*', 'all')}.{how}.{kind}.safetensors"
        if made.is_file():
            return read_shard(made, tokenizer)
        new = prepare([source], made, tokenizer, kind=kind, commercial_only=data.commercial_only, tokens=data.tokens or None)
        for reason, count in new.left_out.items() if progress else ():
            tqdm.write(f"left out of {source}: {count:,} {reason}", file=sys.stderr)
        return new

    text = questions = None
    if any(getattr(mixture, name) for name in get_args(Objective) if name != "question"):
        text = TextSource(texts(data.text), bos=bos, eos=eos)
        _tell_of_cut(mixture, text)
    checks: dict[str, Batch] = {}
    if data.validation:
        held_out = TextSource(texts(data.validation), bos=bos, eos=eos)
        checks |= fixed_batches(held_out, mixture, running)
    if mixture.question:
        if data.questions is None:
            raise InputError("mixture.question is positive, but data.questions names no shard")
        shard = opened(data.questions, "question")
        back = shard.held_back(HELD_BACK)
        how: dict[str, Any] = {"bos": bos, "eos": eos, "longest": data.longest, "between": _between_paragraphs(tokenizer)}
        questions = QuestionSource(shard, documents=~back, **how)
        _check_questions(recipe, questions, dodo.compressor.window)
        if questions.left_out and progress:
            what = f"{questions.left_out:,} documents with questions have more than {data.longest:,} tokens and are left out"
            tqdm.write(f"{what} (data.longest)", file=sys.stderr)
        back &= shard.documents.lengths <= data.longest
        if back.any():
            held = QuestionSource(shard, documents=back, **how)
            checks |= question_batches(held, mixture, running)
    if running.patience and not checks:
        raise InputError(
            "running.patience needs something to be validated by: data.validation, or questions enough to hold some back"
        )
    _remember(folder / "data.json", seen, resume=resume)
    return text, questions, checks


def _tell_of_cut(mixture: Mixture, text: TextSource) -> None:
    """Texts drawn longer than many documents are get these documents' length (`BatchMaker`)."""
    drawn = {
        "length": mixture.length.high if mixture.autoencoding or mixture.recall else 0,
        "context and following": mixture.context.high + mixture.following if mixture.continuation or mixture.distillation else 0,
        "whole": mixture.whole.high if mixture.autoregressive else 0,
    }
    for name, most in drawn.items():
        if most > text.usual + (name == "whole"):
            warnings.warn(
                f"mixture.{name}: up to {most:,.0f} tokens are to be drawn, but only a tenth of all tokens stand in documents of "
                f"{text.usual:,} or more: longer draws are cut to that",
                DodoWarning,
                stacklevel=4,
            )


def _digest(source: str) -> str:
    """Of the files' contents; of a dataset on the hub its name."""
    if source.startswith("hf:"):
        return source
    found = hashlib.sha256()
    for path in resolve([source]):
        try:
            with open(path, "rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise InputError(f"{path} can't be read: {error.strerror or error}") from None
    return found.hexdigest()[:16]


def _between_paragraphs(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of an empty line between a sentence and the next; where the full stop would go into them, of an empty line alone."""
    whole, first, last = (tokenizer(text, add_special_tokens=False).input_ids for text in ("end.\n\nThe", "end.", "The"))
    ids: list[int] = whole[len(first) : len(whole) - len(last)]
    if tokenizer.decode(ids) == "\n\n":
        return ids
    alone: list[int] = tokenizer("\n\n", add_special_tokens=False).input_ids
    return alone


def _check_questions(recipe: Recipe, questions: QuestionSource, window: int) -> None:
    among = recipe.mixture.among
    need = questions.positions(round(among.high) if among else 0)
    lower = "data.longest and mixture.among" if among else "data.longest"
    if need > window:
        raise InputError(
            f"documents with questions need up to {need:,} positions, but {recipe.base} has a window of {window:,}; lower {lower}"
        )


def _remember(path: Path, seen: dict[str, str], *, resume: bool) -> None:
    before = json.loads(path.read_text(encoding="utf-8")) if resume and path.is_file() else {}
    if changed := [source for source, digest in seen.items() if before.get(source, digest) != digest]:
        raise InputError(f"{changed[0]} is not what it was when the run began, so it can't go on with the batches that come next")
    write_whole(path, json.dumps(seen, indent=1) + "\n")

"""What a set of adapters can do: rebuild held-out texts and answer questions, beside a fixed stride, fresh adapters and the base.

    python benchmarks/adapters.py smollm2-135m --text heldout.jsonl.xz --questions squad-dev.jsonl.xz

Greedy decoding. Reconstruction: corpus BLEU (sacrebleu, 13a) of windows of unseen texts. Questions: share of answers that contain
one of the right ones, lowercased and without punctuation; up to 64 new tokens. Writes results/adapters-NAME.json.
"""

import argparse
import json
import lzma
import math
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from measuring import ROOT, write_result

warnings.simplefilter("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapters", help="what Dodo.from_pretrained takes")
    parser.add_argument("--text", required=True, help="JSONL of texts that were not trained on")
    parser.add_argument("--questions", required=True, help="JSONL.xz of context, question, answers")
    parser.add_argument("--texts", type=int, default=24, help="windows per length")
    parser.add_argument("--asked", type=int, default=60, help="questions")
    parser.add_argument("--name", default="smollm2-135m")
    given = parser.parse_args()

    from dodo import Dodo
    from dodo.data.batches import TextSource
    from dodo.data.reading import read_records
    from dodo.data.shards import prepare, read_shard
    from dodo.training.validation import fixed_batches, rebuild, validate

    started = time.perf_counter()
    dodo, fresh = Dodo.from_pretrained(given.adapters), Dodo.from_pretrained(given.name, fresh=True)
    shard = ROOT / "runs" / "benchmark-text.safetensors"
    shard.parent.mkdir(exist_ok=True)
    prepare([given.text], shard, dodo.tokenizer, commercial_only=False)
    bos = dodo.tokenizer.bos_token_id if dodo.config.keep_first else None
    source = TextSource([read_shard(shard)], bos=bos, eos=dodo.tokenizer.eos_token_id)
    batches = fixed_batches(source, texts=given.texts, lengths=(64, 128, 256), ratios=(2.0, 5.0, 10.0, 20.0), seed=1)

    measured: dict[str, Any] = {"reconstruction, BLEU": {}, "loss, nats per token": {}, "questions, share right": {}}
    for name, batch in batches.items():
        for way in ("scorer", "stride"):
            found = validate(dodo, {name: batch}, (way,))
            measured["loss, nats per token"][f"{name} {way}"] = found[f"loss/{name}/{way}"]
            measured["reconstruction, BLEU"][f"{name} {way}"] = rebuild(dodo, batch, texts=given.texts, way=way).bleu
        measured["reconstruction, BLEU"][f"{name} fresh adapters"] = rebuild(fresh, batch, texts=given.texts).bleu
        print(name, {k: round(v, 2) for k, v in measured["reconstruction, BLEU"].items() if k.startswith(name)}, file=sys.stderr)

    with lzma.open(given.questions, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    picked = [rows[i] for i in np.random.default_rng(1).choice(len(rows), given.asked, replace=False)]
    shares = measured["questions, share right"]
    shares["base, reading everything"] = _share_right(fresh, picked, 1)
    for ratio in (5, 10):
        shares[f"dodo, r = {ratio}"] = _share_right(dodo, picked, ratio)
        shares[f"fresh adapters, r = {ratio}"] = _share_right(fresh, picked, ratio)
    shares["standard error at most"] = 0.5 / math.sqrt(given.asked)
    path = write_result(
        f"adapters-{given.name}",
        measured,
        settings={
            "base": given.name,
            "adapters": given.adapters,
            "adapter fingerprint": dodo.fingerprint.adapter,
            "texts per length": given.texts,
            "text": Path(given.text).name,
            "questions": given.asked,
            "question set": Path(given.questions).name,
            "records read": sum(1 for _ in read_records(given.text)),
            "seconds": round(time.perf_counter() - started),
        },
    )
    print(json.dumps(measured, indent=2))
    print(f"written to {path.relative_to(ROOT)}", file=sys.stderr)


def _share_right(dodo: Any, rows: list[dict[str, Any]], ratio: float, size: int = 10) -> float:
    right = 0
    for begin in range(0, len(rows), size):
        few = rows[begin : begin + size]
        nuggets = dodo.compress([row["context"] for row in few], ratio=ratio)
        answers = dodo.answer(nuggets, [row["question"] for row in few], max_new_tokens=64)
        for row, answer in zip(few, answers, strict=True):
            right += any(_plain(wanted) in _plain(answer) for wanted in row["answers"])
    return right / len(rows)


def _plain(text: str) -> str:
    return " ".join(re.sub(r"\W", " ", text.lower()).split())


if __name__ == "__main__":
    main()

"""Cost of a training step, beside the authors' way and beside ordinary LoRA fine-tuning. SmolLM2-135M, CPU.

    python benchmarks/training.py

One step is forward and backward, no optimiser, on the same adapters and the same 512 document tokens, in three ways
(`training_ways.py`):

    ours      what `dodo train` does: one base for features, encoder and decoder, `batch_loss` within `fused_lora`
    authors'  attention with its weights written out and the score term added in every layer, a deep copy of the first layers
              for the scorer, an ordinary cache from which nuggets are gathered afterwards, whole logits, plain PEFT
    LoRA      plain PEFT and transformers' own loss on the document alone, one adapter

and on a text of 1,024 tokens, the autoregressive LM's parallel pass beside LoRA.

Each way lives in a process of its own, and they take turns. The first two must come to the same nuggets, loss and gradients,
the third to the loss that our arithmetic has for the same text and adapter. Writes results/benchmark-training.json.
"""

import json
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, side_by_side, write_page, write_result
from torch import Tensor, nn
from training_ways import RANK, RATIO, SEGMENT, WINDOW

warnings.simplefilter("ignore")

BASE, TOKENS, WHOLE, ROUNDS = "smollm2-135m", 512, 1024, 5
TOLERANCES = {"float32": (1e-4, 1e-2), "bfloat16": (5e-3, 1e-1)}
"""Of losses and of gradient norms, relative."""


def main() -> None:
    dtypes = ["float32"] + ["bfloat16"] * torch.cpu._is_amx_tile_supported()
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write_adapters(folder)
        for dtype in dtypes:
            measured |= _measure(dtype, folder)
        for dtype in dtypes:
            measured |= _measure_autoregressive(dtype, folder)
    path = write_result(
        "benchmark-training",
        measured,
        settings={
            "base": BASE,
            "adapters": f"random weights, rank {RANK}, all linear layers",
            "objective": "autoencoding",
            "document tokens": TOKENS,
            "ratio": RATIO,
            "step": "forward and backward, no optimiser",
            "ours": "batch_loss within fused_lora, sdpa",
            "authors'": "attention weights written out, copied feature layers, whole cache and logits, plain PEFT",
            "LoRA": "plain PEFT and transformers' loss on the document, sdpa",
            "autoregressive": f"{WHOLE} tokens, window {WINDOW}, segment {SEGMENT}, batch_loss within fused_lora, sdpa",
            "peak memory": "VmHWM of a process that only loads and takes steps",
        },
    )
    page = write_page()
    print(page.read_text(encoding="utf-8"))
    print(f"written to {path.relative_to(ROOT)} and {page.relative_to(ROOT)}", file=sys.stderr)


def _measure(dtype: str, folder: Path) -> dict[str, Any]:
    alone = _Process("base", dtype, folder)
    base = alone.ask("memory")["VmRSS"]
    alone.end()
    processes = {name: _Process(name, dtype, folder) for name in ("ours", "authors'", "LoRA")}
    losses = _check(processes, dtype)
    seconds = side_by_side({name: partial(process.ask, "step") for name, process in processes.items()}, rounds=ROUNDS)
    peak = {name: process.ask("memory")["VmHWM"] for name, process in processes.items()}
    shares = processes["ours"].ask("where_time_goes")
    table: dict[str, Any] = {"memory with the base loaded, bytes": base}
    for name, process in processes.items():
        process.end()
        table |= {
            f"{name}: s per step": seconds[name],
            f"{name}: document tokens/s": TOKENS / seconds[name],
            f"{name}: peak memory of the process, bytes": peak[name],
            f"{name}: peak memory above the loaded base, bytes": peak[name] - base,
            f"{name}: loss, nats per token": losses[name],
        }
    table |= {
        "ours / authors': tokens/s": seconds["authors'"] / seconds["ours"],
        "ours / authors': peak memory of the process": peak["ours"] / peak["authors'"],
        "ours / authors': peak memory above the loaded base": (peak["ours"] - base) / (peak["authors'"] - base),
        "ours / LoRA: s per step": seconds["ours"] / seconds["LoRA"],
    }
    return {dtype: table, f"{dtype}: where our time goes, share": shares}


def _measure_autoregressive(dtype: str, folder: Path) -> dict[str, Any]:
    text = json.loads((folder / "text.json").read_text())
    (folder / "text.json").write_text(json.dumps({**text, "ids": (text["ids"] * 2)[:WHOLE]}))
    processes = {name: _Process(name, dtype, folder) for name in ("autoregressive", "LoRA")}
    for process in processes.values():
        process.ask("step")
    seconds = side_by_side({name: partial(process.ask, "step") for name, process in processes.items()}, rounds=ROUNDS)
    peak = {name: process.ask("memory")["VmHWM"] for name, process in processes.items()}
    for process in processes.values():
        process.end()
    table: dict[str, Any] = {}
    for name in processes:
        table |= {f"{name}: s per step": seconds[name], f"{name}: peak memory of the process, bytes": peak[name]}
    table |= {
        "autoregressive / LoRA: s per step": seconds["autoregressive"] / seconds["LoRA"],
        "autoregressive / LoRA: peak memory of the process": peak["autoregressive"] / peak["LoRA"],
    }
    return {f"{dtype}: autoregressive": table}


def _check(processes: dict[str, "_Process"], dtype: str) -> dict[str, float]:
    """Losses of the ways, after making sure that they do the same work."""
    ours, authors = processes["ours"], processes["authors'"]
    losses = {name: process.ask("step") for name, process in processes.items()}
    for_loss, for_gradient = TOLERANCES[dtype]
    if ours.ask("selected") != authors.ask("selected"):
        raise SystemExit("the ways do not select the same tokens")
    _assert_close("loss", losses["ours"], losses["authors'"], for_loss)
    _assert_close("loss of LoRA", ours.ask("loss_of_lora"), losses["LoRA"], for_loss)
    norms, theirs = ours.ask("norms"), authors.ask("norms")
    for name, norm in norms.items():
        _assert_close(f"gradient of {name}", norm, theirs[name], for_gradient)
    return losses


def _assert_close(what: str, found: float, expected: float, tolerance: float) -> None:
    if abs(found - expected) > tolerance * abs(expected):
        raise SystemExit(f"the ways do not do the same: {what} is {found:.6g} and {expected:.6g}")


# -- processes that take turns


class _Process:
    """A fresh process that holds one way and calls its methods when asked."""

    def __init__(self, way: str, dtype: str, folder: Path) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "training_ways.py"), way, dtype, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, method: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(method, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate()


# -- what they share


def _write_adapters(folder: Path) -> None:
    """Adapters with random weights and a text, for all ways and processes."""
    from dodo import Dodo, DodoConfig, LoraSettings

    lora = LoraSettings(rank=RANK, alpha=2 * RANK, targets="all-linear")
    dodo = Dodo.from_pretrained(BASE, config=DodoConfig(ratio=RATIO, keep_first=False, encoder=lora, decoder=lora))
    text = (ROOT / "examples" / "harbour-clock.txt").read_text(encoding="utf-8")
    ids = dodo.document_ids(text)[:TOKENS]
    assert len(ids) == TOKENS
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in dodo.compressor.adapters.parameters():
            parameter.normal_(std=0.01)
        dodo.compressor.scorer.load_state_dict(_decided_scorer(dodo.compressor, torch.tensor([ids])).state_dict())
    dodo.save_pretrained(folder)
    (folder / "text.json").write_text(json.dumps({"ids": ids, "eos": dodo.tokenizer.eos_token_id}))


def _decided_scorer(compressor: Any, ids: Tensor) -> nn.Module:
    """Of some random scorers the one that parts selected tokens from others most clearly, so that rounding does not choose."""
    from dodo.architecture import FeatureLayers
    from dodo.scorer import Scorer
    from dodo.selection import count_nuggets

    with compressor.adapters.use(None):
        features = FeatureLayers(compressor.base, compressor.config.feature_layer)(ids)[0, :-1]  # the last is always selected
    k = count_nuggets(TOKENS, ratio=RATIO) - 1

    def gap(scorer: nn.Module) -> float:
        scores = scorer(features).sort(descending=True).values
        return float((scores[k - 1] - scores[k]) / scores.std())

    return max((Scorer(features.shape[-1], seed=seed) for seed in range(100)), key=gap)


if __name__ == "__main__":
    main()

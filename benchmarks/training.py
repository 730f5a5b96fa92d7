"""Cost of a training step, beside the authors' way and beside ordinary LoRA fine-tuning. SmolLM2-135M, CPU.

    python benchmarks/training.py

One step is forward and backward, no optimiser, on the same adapters and the same 512 document tokens, in three ways:

    ours      what `dodo train` does: one base for features, encoder and decoder, `batch_loss` within `fused_lora`
    authors'  attention with its weights written out and the score term added in every layer, a deep copy of the first layers
              for the scorer, an ordinary cache from which nuggets are gathered afterwards, whole logits, plain PEFT
    LoRA      plain PEFT and transformers' own loss on the document alone, one adapter

The first two must come to the same nuggets, loss and gradients, and the third to the loss that our arithmetic has for the
same text and adapter. Memory is that of a fresh process for each way. Writes results/benchmark-training.json.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, process_memory, side_by_side, write_page, write_result
from torch import Tensor, nn

warnings.simplefilter("ignore")

BASE, TOKENS, RATIO, RANK, ROUNDS = "smollm2-135m", 512, 5.0, 16, 5
TOLERANCES = {"float32": (1e-4, 1e-2), "bfloat16": (5e-3, 1e-1)}
"""Of losses and of gradient norms, relative."""
SCORING = "features and scores"
PARTS = ("linear layers of the base", "LoRA", "attention", "head and loss", "elementwise and the rest", SCORING)


@dataclass(frozen=True)
class Way:
    """One way to train: its loss, its trained parameters by group, and which tokens it selects."""

    loss: Callable[[], Tensor]
    groups: dict[str, list[nn.Parameter]]
    select: Callable[[], Tensor] | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(self) -> float:
        """Forward and backward."""
        for parameters in self.groups.values():
            for parameter in parameters:
                parameter.grad = None
        with self.context():
            loss = self.loss()
            loss.backward()
        return float(loss.detach())

    def norms(self) -> dict[str, float]:
        """Of the last step's gradients, by group."""
        return {
            name: float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())
            for name, parameters in self.groups.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-of", nargs=3, metavar=("WAY", "DTYPE", "FOLDER"), help=argparse.SUPPRESS)
    if given := parser.parse_args().memory_of:
        way, dtype, folder = given
        print(_memory_here(way, dtype, Path(folder)))
        return
    dtypes = ["float32"] + ["bfloat16"] * torch.cpu._is_amx_tile_supported()
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write_adapters(folder)
        for dtype in dtypes:
            measured |= _measure(dtype, folder)
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
            "peak memory": "VmHWM of a fresh process that takes two steps",
        },
    )
    page = write_page()
    print(page.read_text(encoding="utf-8"))
    print(f"written to {path.relative_to(ROOT)} and {page.relative_to(ROOT)}", file=sys.stderr)


def _measure(dtype: str, folder: Path) -> dict[str, Any]:
    ways = {name: build(dtype, folder) for name, build in WAYS.items()}
    losses = _check(ways, dtype, folder)
    seconds = side_by_side({name: way.step for name, way in ways.items()}, rounds=ROUNDS)
    shares = _where_time_goes(ways["ours"])
    del ways
    base = _memory("base", dtype, folder)
    peak = {name: _memory(name, dtype, folder) for name in WAYS}
    table: dict[str, Any] = {"memory with the base loaded, bytes": base}
    for name in WAYS:
        table |= {
            f"{name}: s per step": seconds[name],
            f"{name}: document tokens/s": TOKENS / seconds[name],
            f"{name}: peak memory of the process, bytes": peak[name],
            f"{name}: peak memory above the loaded base, bytes": peak[name] - base,
            f"{name}: loss, nats per token": losses[name],
        }
    theirs = "authors'"
    table |= {
        "ours / authors': tokens/s": seconds[theirs] / seconds["ours"],
        "ours / authors': peak memory of the process": peak["ours"] / peak[theirs],
        "ours / authors': peak memory above the loaded base": (peak["ours"] - base) / (peak[theirs] - base),
        "ours / LoRA: s per step": seconds["ours"] / seconds["LoRA"],
    }
    return {dtype: table, f"{dtype}: where our time goes, share": shares}


# -- the three ways


def _ours(dtype: str, folder: Path) -> Way:
    from dodo.training.fused import fused_lora
    from dodo.training.objectives import batch_loss, encode

    compressor = _dodo(dtype, folder).compressor
    batch, score = _batch(folder), compressor.score

    def marked(ids: Tensor) -> Tensor:
        with torch.profiler.record_function(SCORING):
            return score(ids)

    compressor.score = marked
    groups = {
        "phi": compressor.adapters.parameters("phi"),
        "theta": compressor.adapters.parameters("theta"),
        "scorer": list(compressor.scorer.parameters()),
        "soft token": [compressor.soft_token],
    }
    return Way(
        loss=lambda: batch_loss(compressor, batch).total,
        groups=groups,
        select=lambda: encode(compressor, batch).indices,
        context=lambda: fused_lora(compressor.base),
    )


def _authors(dtype: str, folder: Path) -> Way:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import DynamicCache

    from dodo.attention import cache_argument
    from dodo.scorer import Scorer
    from dodo.selection import count_nuggets, select_top_k

    base = _base(dtype, attention=_register_matmul_attention())
    features = _copy_of_first_layers(base.model, 3)
    peft = PeftModel.from_pretrained(base, folder / "phi", adapter_name="phi", is_trainable=True)
    peft.load_adapter(str(folder / "theta"), adapter_name="theta", is_trainable=True)
    lora = {name: [p for key, p in peft.named_parameters() if f".{name}." in key] for name in ("phi", "theta")}
    tensors = load_file(folder / "scorer.safetensors")
    soft_token = nn.Parameter(tensors.pop("soft_token").view(1, 1, -1))
    scorer = Scorer(base.config.hidden_size)
    scorer.load_state_dict({key.removeprefix("scorer."): value for key, value in tensors.items()})
    batch, cache_name = _batch(folder), cache_argument(base)
    n = batch.documents.shape[1]
    k = torch.tensor([count_nuggets(n, ratio=RATIO)])

    def switch_to(name: str) -> None:
        peft.set_adapter(name)
        for parameter in [*lora["phi"], *lora["theta"]]:
            parameter.requires_grad_(True)  # PEFT freezes the other adapter

    def select() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            states = features(input_ids=batch.documents, use_cache=False).last_hidden_state
        scores = scorer(states)
        return scores, select_top_k(scores, k, batch.document_mask).indices

    def loss() -> Tensor:
        scores, indices = select()
        switch_to("phi")
        whole, nuggets = DynamicCache(), DynamicCache()
        base.model(input_ids=batch.documents, use_cache=True, **{cache_name: whole})
        for i, layer in enumerate(whole.layers):
            nuggets.update(layer.keys[:, :, indices[0]], layer.values[:, :, indices[0]], i)
        switch_to("theta")
        embeddings = torch.cat([soft_token.to(base.dtype), base.get_input_embeddings()(batch.decoder)], dim=1)
        logits = base(
            inputs_embeds=embeddings,
            position_ids=n + torch.arange(embeddings.shape[1])[None],
            use_cache=True,
            nugget_scores=scores.gather(1, indices),
            **{cache_name: nuggets},
        ).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())

    groups = {**lora, "scorer": list(scorer.parameters()), "soft token": [soft_token]}
    return Way(loss, groups, select=lambda: select()[1])


def _lora(dtype: str, folder: Path) -> Way:
    from peft import PeftModel

    peft = PeftModel.from_pretrained(_base(dtype), folder / "theta", is_trainable=True)
    ids = _batch(folder).documents
    groups = {"theta": [p for p in peft.parameters() if p.requires_grad]}
    return Way(lambda: peft(input_ids=ids, labels=ids, use_cache=False).loss, groups)


WAYS = {"ours": _ours, "authors'": _authors, "LoRA": _lora}


def _matmul_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    nugget_scores: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """softmax(Q K^T + mask + s - StopGrad(s)) V, s on the columns of nuggets, with the whole matrix of weights."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    weights = query @ key.transpose(2, 3) * scaling
    if nugget_scores is not None:
        term = (nugget_scores - nugget_scores.detach()).to(weights.dtype)
        weights = weights + nn.functional.pad(term, (0, weights.shape[-1] - term.shape[-1]))[:, None, None, :]
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _register_matmul_attention() -> str:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("matmul", _matmul_attention)
    AttentionMaskInterface.register("matmul", eager_mask)
    return "matmul"


def _copy_of_first_layers(inner: Any, layers: int) -> nn.Module:
    """A transformer of the first layers, copied but for the embeddings, without the final norm."""
    view = copy.copy(inner)
    view._modules = {**inner._modules, "layers": copy.deepcopy(inner.layers[:layers]), "norm": nn.Identity()}
    return view


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


def _batch(folder: Path) -> Any:
    from dodo.data.batches import Batch

    text = json.loads((folder / "text.json").read_text())
    ids = torch.tensor([text["ids"]])
    real = torch.ones_like(ids, dtype=torch.bool)
    targets = torch.cat([ids, torch.tensor([[text["eos"]]])], dim=1)
    return Batch("autoencoding", RATIO, documents=ids, document_mask=real, decoder=ids, decoder_mask=real, targets=targets)


def _base(dtype: str, *, attention: str = "sdpa") -> Any:
    from transformers import AutoModelForCausalLM

    from dodo.pull import pull

    return AutoModelForCausalLM.from_pretrained(pull(BASE), dtype=getattr(torch, dtype), attn_implementation=attention)


def _dodo(dtype: str, folder: Path) -> Any:
    """The base in a dtype, with fp32 adapters."""
    from dodo import Dodo

    dodo = Dodo.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    for parameter in dodo.compressor.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return dodo


def _check(ways: dict[str, Way], dtype: str, folder: Path) -> dict[str, float]:
    """Losses of the ways, after making sure that they do the same work."""
    with torch.no_grad(), ways["ours"].context():
        chosen = [way.select() for way in ways.values() if way.select is not None]
    if not torch.equal(*chosen):
        raise SystemExit("the ways do not select the same tokens")
    losses = {name: way.step() for name, way in ways.items()}
    for_loss, for_gradient = TOLERANCES[dtype]
    _assert_close("loss", losses["ours"], losses["authors'"], for_loss)
    _assert_close("loss of LoRA", _lora_loss_by_our_arithmetic(dtype, folder), losses["LoRA"], for_loss)
    theirs = ways["authors'"].norms()
    for name, norm in ways["ours"].norms().items():
        _assert_close(f"gradient of {name}", norm, theirs[name], for_gradient)
    return losses


def _assert_close(what: str, found: float, expected: float, tolerance: float) -> None:
    if abs(found - expected) > tolerance * abs(expected):
        raise SystemExit(f"the ways do not do the same: {what} is {found:.6g} and {expected:.6g}")


def _lora_loss_by_our_arithmetic(dtype: str, folder: Path) -> float:
    from dodo.adapters import THETA
    from dodo.architecture import backbone
    from dodo.training.fused import fused_lora, linear_cross_entropy

    compressor, ids = _dodo(dtype, folder).compressor, _batch(folder).documents
    with torch.no_grad(), fused_lora(compressor.base), compressor.adapters.use(THETA):
        states = backbone(compressor.base)(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        weights = torch.full((len(states),), 1 / len(states))
        head = compressor.base.get_output_embeddings().weight
        return float(linear_cross_entropy(states, head, ids[0, 1:], weights)[0])


# -- where time goes


def _where_time_goes(way: Way) -> dict[str, float]:
    """Shares of one step's processor time, by what each operation and those that called it are named, and by sizes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        way.step()
    spent = dict.fromkeys(PARTS, 0.0)
    for event in profiler.events():
        spent[_part(event)] += event.self_cpu_time_total
    return {part: time / sum(spent.values()) for part, time in spent.items()}


def _part(event: Any) -> str:
    names, caller = event.name, event.cpu_parent
    while caller is not None:
        names, caller = f"{names} {caller.name}", caller.cpu_parent
    products = event.name in ("aten::mm", "aten::addmm", "aten::addmm_")
    thin = any(RANK in shape for shape in event.input_shapes or ())
    linear, lora, attention, head, rest, scoring = PARTS
    if SCORING in names:
        return scoring
    if "CrossEntropy" in names:
        return head
    if "_Attention" in names or "attention" in names:
        return attention
    if products and not thin:
        return linear
    return lora if products or "_LoraProduct" in names else rest


# -- memory


def _memory(name: str, dtype: str, folder: Path) -> int:
    """Bytes resident at most in a fresh process that takes two steps, or holds the base and all that is imported for a step."""
    command = [sys.executable, __file__, "--memory-of", name, dtype, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout.splitlines()[-1])


def _memory_here(name: str, dtype: str, folder: Path) -> int:
    import peft  # noqa: F401

    import dodo.training.objectives  # noqa: F401

    if name != "base":
        way = WAYS[name](dtype, folder)
        way.step()
        way.step()
        return process_memory()["VmHWM"]
    base = _base(dtype)
    for parameter in base.parameters():
        parameter.sum()  # so that mapped files count
    return process_memory()["VmRSS"]


if __name__ == "__main__":
    main()

"""Ways to take the training step that `training.py` measures, each for a process of its own.

    python benchmarks/training_ways.py WAY DTYPE FOLDER

Reads names of methods of a `Way` from stdin, a line each, and answers each with a line of JSON.
"""

import copy
import dataclasses
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measuring import process_memory
from torch import Tensor, nn

RATIO, RANK = 5.0, 16
WINDOW, SEGMENT = 128, 64
SCORING = "features and scores"
PARTS = ("linear layers of the base", "LoRA", "attention", "head and loss", "elementwise and the rest", SCORING)


def main() -> None:
    warnings.simplefilter("ignore")
    name, dtype, folder = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr
    way = WAYS[name](dtype, Path(folder))
    with way.context:
        for method in sys.stdin:
            print(json.dumps(getattr(way, method.strip())()), file=answers, flush=True)


@dataclass(frozen=True)
class Way:
    """One way to train.

    loss: of the batch, with gradient. groups: trained parameters. select: places of the nuggets. lora: the loss of the document
    with one adapter, by our arithmetic. context: of all steps.
    """

    loss: Callable[[], Tensor]
    groups: dict[str, list[nn.Parameter]]
    select: Callable[[], Tensor] | None = None
    lora: Callable[[], Tensor] | None = None
    context: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def step(self) -> float:
        """Forward and backward; the loss."""
        for parameters in self.groups.values():
            for parameter in parameters:
                parameter.grad = None
        loss = self.loss()
        loss.backward()
        return float(loss.detach())

    def norms(self) -> dict[str, float]:
        """Of the last step's gradients, by group."""
        return {
            name: float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())
            for name, parameters in self.groups.items()
        }

    def selected(self) -> list[list[int]]:
        """Places of the nuggets."""
        assert self.select is not None
        with torch.no_grad():
            return self.select().tolist()

    def loss_of_lora(self) -> float:
        """Of the document with one adapter, by our arithmetic."""
        assert self.lora is not None
        with torch.no_grad():
            return float(self.lora())

    def memory(self) -> dict[str, int]:
        """Of this process, in bytes."""
        return process_memory()

    def where_time_goes(self) -> dict[str, float]:
        """Shares of one step's processor time, by the names of each operation and of those that called it, and by sizes."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            self.step()
        spent = dict.fromkeys(PARTS, 0.0)
        for event in profiler.events():
            spent[_part(event)] += event.self_cpu_time_total
        return {part: time / sum(spent.values()) for part, time in spent.items()}


def _part(event: Any) -> str:
    names, caller = event.name, event.cpu_parent
    while caller is not None:
        names, caller = f"{names} {caller.name}", caller.cpu_parent
    product = event.name in ("aten::mm", "aten::addmm", "aten::addmm_")
    thin = any(RANK in shape for shape in event.input_shapes or ())
    linear, lora, attention, head, rest, scoring = PARTS
    if SCORING in names:
        return scoring
    if "CrossEntropy" in names:
        return head
    if "_Attention" in names or "attention" in names:
        return attention
    if product and not thin:
        return linear
    return lora if product or "_LoraProduct" in names else rest


# -- the ways


def _ours(dtype: str, folder: Path) -> Way:
    from dodo.adapters import THETA
    from dodo.architecture import backbone
    from dodo.training.fused import fused_lora, linear_cross_entropy
    from dodo.training.objectives import batch_loss, encode

    compressor = _dodo(dtype, folder).compressor
    batch, score = _batch(folder), compressor.score

    def marked(*args: Any) -> Tensor:
        with torch.profiler.record_function(SCORING):
            return score(*args)

    def lora() -> Tensor:
        ids = batch.documents
        with compressor.adapters.use(THETA):
            states = backbone(compressor.base)(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        weights = torch.full((len(states),), 1 / len(states))
        return linear_cross_entropy(states, compressor.base.get_output_embeddings().weight, ids[0, 1:], weights)[0]

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
        lora=lora,
        context=fused_lora(compressor.base),
    )


def _autoregressive(dtype: str, folder: Path) -> Way:
    from dodo.training.fused import fused_lora
    from dodo.training.objectives import batch_loss

    compressor, read = _dodo(dtype, folder).compressor, _batch(folder)
    ids = read.documents
    batch = dataclasses.replace(
        read,
        objective="autoregressive",
        ratio=10.0,
        documents=ids[:, :-1],
        document_mask=read.document_mask[:, :-1],
        targets=ids[:, 1:],
        window=WINDOW,
        segment=SEGMENT,
    )
    groups = {"adapters": compressor.adapters.parameters(), "scorer": list(compressor.scorer.parameters())}
    return Way(loss=lambda: batch_loss(compressor, batch).total, groups=groups, context=fused_lora(compressor.base))


def _authors(dtype: str, folder: Path) -> Way:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import DynamicCache

    from dodo.attention import cache_argument
    from dodo.scorer import Scorer
    from dodo.selection import count_nuggets, select_top_k

    base = _base(dtype, folder, attention=_register_matmul_attention())
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

    peft = PeftModel.from_pretrained(_base(dtype, folder), folder / "theta", is_trainable=True)
    ids = _batch(folder).documents
    groups = {"theta": [p for p in peft.parameters() if p.requires_grad]}
    return Way(lambda: peft(input_ids=ids, labels=ids, use_cache=False).loss, groups)


def _only_the_base(dtype: str, folder: Path) -> Way:
    """No way to train, but all that the others import, and the base."""
    import peft  # noqa: F401

    import dodo.training.objectives  # noqa: F401

    base = _base(dtype, folder)
    for parameter in base.parameters():
        parameter.sum()  # so that mapped files count
    return Way(loss=lambda: base.lm_head.weight.sum(), groups={})


WAYS = {"ours": _ours, "authors'": _authors, "autoregressive": _autoregressive, "LoRA": _lora, "base": _only_the_base}


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


def _batch(folder: Path) -> Any:
    from dodo.data.batches import Batch

    text = json.loads((folder / "text.json").read_text())
    ids = torch.tensor([text["ids"]])
    real = torch.ones_like(ids, dtype=torch.bool)
    targets = torch.cat([ids, torch.tensor([[text["eos"]]])], dim=1)
    return Batch("autoencoding", RATIO, documents=ids, document_mask=real, decoder=ids, decoder_mask=real, targets=targets)


def _base(dtype: str, folder: Path, *, attention: str = "sdpa") -> Any:
    """The base that the folder's adapters belong to."""
    from dodo.base import load_base

    name = json.loads((folder / "dodo_config.json").read_text())["base"]
    return load_base(name, dtype=getattr(torch, dtype), device="cpu", attn_implementation=attention).model


def _dodo(dtype: str, folder: Path) -> Any:
    """The base in a dtype, with fp32 adapters."""
    from dodo import Dodo

    dodo = Dodo.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    for parameter in dodo.compressor.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return dodo


if __name__ == "__main__":
    main()

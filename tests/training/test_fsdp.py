"""Laws of a base whose layers are split over processes (`training.fsdp`), in one process; two are in `test_training`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dodo.compressor import Compressor
from dodo.config import DodoConfig, LoraSettings
from dodo.data.batches import Batch, TextSource
from dodo.data.shards import Ragged, Shard
from dodo.training.fsdp import split_base
from dodo.training.fused import fused_lora
from dodo.training.objectives import batch_loss
from tests.standins.models import LAYERS, tiny_llama


class _Step(nn.Module):
    """What a run's module does in its forward pass."""

    def __init__(self, *, split: bool, checkpointed: bool = False) -> None:
        super().__init__()
        lora = LoraSettings(rank=2, targets="all-linear")
        base = tiny_llama(attn_implementation="sdpa").to(torch.bfloat16)
        self.compressor = Compressor(base, DodoConfig(feature_layer=2, encoder=lora, decoder=lora))
        torch.manual_seed(0)
        for name, parameter in self.compressor.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
                if "lora_B" in name:  # zero in fresh adapters, whose A matrices then get no gradient
                    nn.init.normal_(parameter, std=0.05)
        if checkpointed:
            self.compressor.adapters.checkpoint_gradients()
        if split:
            split_base(self, base, torch.device("cpu"))

    def forward(self, batch: Batch) -> Tensor:
        return batch_loss(self.compressor, batch).total


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _batch(objective: str) -> Batch:
    ids = np.random.default_rng(1).integers(5, 60, 200)
    text = TextSource([Shard("text", Ragged(ids.astype(np.uint16), np.array([0, 200])))], bos=0, eos=1)
    rng = np.random.default_rng(0)
    if objective == "autoencoding":
        return text.autoencoding(2, 16, 3.0, rng)
    if objective == "autoregressive":
        return text.autoregressive(2, 31, 3.0, rng, window=4, segment=5)
    return text.continuation(2, 16, 8, 3.0, rng, distil=objective == "distillation")


def _gradients(step: _Step, batch: Batch) -> dict[str, Tensor]:
    step.zero_grad()
    step(batch).backward()
    return {name: p.grad for name, p in step.named_parameters() if p.grad is not None}


def test_what_learns_stays_whole_and_all_layers_but_the_last_are_split(alone: None) -> None:
    step = _Step(split=True)
    split = {name for name, parameter in step.named_parameters() if isinstance(parameter, DTensor)}
    layers = {name.split(".layers.")[1].split(".")[0] for name in split}
    assert layers == {str(i) for i in range(LAYERS - 1)}
    for name, parameter in step.named_parameters():
        frozen_in_layer = any(f".layers.{i}." in name for i in layers) and not parameter.requires_grad
        assert (name in split) == frozen_in_layer, name
        assert parameter.requires_grad == (parameter.dtype == torch.float32), name


@pytest.mark.parametrize("objective", ["autoencoding", "continuation", "distillation", "autoregressive"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_through_a_split_base_are_those_of_a_whole_one(
    alone: None, objective: str, checkpointed: bool, fused: bool
) -> None:
    batch = _batch(objective)
    found = []
    for split in (False, True):
        step = _Step(split=split, checkpointed=checkpointed)
        if fused:
            with fused_lora(step.compressor.base):
                found.append(_twice(step, batch))
        else:
            found.append(_twice(step, batch))
    whole, parts = found
    assert whole.keys() == parts.keys() and any("lora_A.phi" in name for name in whole)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], atol=0, rtol=0, msg=name)


def _twice(step: _Step, batch: Batch) -> dict[str, Tensor]:
    """Gradients of a second step, behind a validation."""
    _gradients(step, batch)
    with torch.no_grad():
        batch_loss(step.compressor, batch)
    return _gradients(step, batch)

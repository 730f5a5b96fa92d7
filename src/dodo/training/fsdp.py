"""FSDP: the frozen base's layers split over the processes of a run, so that none has to hold them all.

PyTorch's `fully_shard` (FSDP2) leaves each process a part of every layer's weights and gathers a layer just before it runs, in
the forward and in the backward pass, however often a step runs it. Nothing of the base learns, so no gradients are split. What
learns, about a hundredth of a base, is whole in every process and averaged by DDP: optimiser, clipping and checkpoints are
DDP's. FSDP1 would not do: its flat parameters hold one dtype, and it gathers a layer once in a backward pass.

Whole in every process are also the embeddings, the final norm and the output matrix, which are read outside of the base's own
forward pass, and the last layer, where encoding ends in the middle (`AllKept`), so that FSDP would not see its end.

Gathering a layer is work of all processes: they must run the same layers in the same order. In a step they do, for their
batches have one objective; outside of steps all run the same batches (`TrainingModule.takes_part`).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from dodo.architecture import layers_of

__all__ = ["split_base"]


def split_base(module: nn.Module, base: PreTrainedModel, device: torch.device) -> None:
    """Split a base's layers, all but the last, over the processes of the default group.

    Args:
        module: what DDP is going to wrap, with the base in it. Its forward pass is the whole step's.
        base: frozen but for its adapters; each layer goes to the device as it is split.
        device: of this process.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    learning = {parameter for parameter in module.parameters() if parameter.requires_grad}
    for layer in layers_of(base)[:-1]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=learning)
    parameters = dict(module.named_parameters())
    split = [name for name, parameter in parameters.items() if isinstance(parameter, DTensor)]
    whole = {parameter for parameter in parameters.values() if not isinstance(parameter, DTensor)}
    fully_shard(module, mesh=mesh, ignored_params=whole)  # owns nothing; under one root the next layer is gathered ahead
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, split)  # or it sends them all to everyone

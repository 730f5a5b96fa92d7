"""`python deepspeed_on_cpu.py train ...`: the command line, with Lightning's DeepSpeed strategy let onto a CPU.

Lightning allows it on CUDA alone; DeepSpeed itself runs over gloo. So its path through the trainer can be tested without a GPU.
"""

import sys

import deepspeed
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.strategies import deepspeed as lightning_deepspeed

from dodo.cli import main

assert deepspeed.accelerator.get_accelerator().device_name() == "cpu"
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda *_: None  # type: ignore[attr-defined]  # else a compiler is needed
lightning_deepspeed._validate_device_index_selection = lambda *_: None
DeepSpeedStrategy.setup_environment = DDPStrategy.setup_environment  # type: ignore[method-assign]
DeepSpeedStrategy.root_device = property(lambda self: torch.device("cpu", 0))  # type: ignore[assignment]

if __name__ == "__main__":
    main()

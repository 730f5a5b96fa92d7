"""LoRA phi (encoder) and theta (decoder) on one frozen base: with training.fused the only file that imports PEFT.

Paper: Section 2.3 ("we assign separate parameters to the encoder and decoder"), Section 3 (two LoRA adapters, disabled for the
scorer's features).

Switching is done on PEFT's own layers without touching `requires_grad`, so that one backward pass reaches both adapters.
Under gradient checkpointing the recomputation runs with the adapter that was on in the forward pass.

In the autoregressive LM (Section 2.2) each token has its own adapter. PEFT adds up the updates of all active adapters, so both
are made active, and what their A matrices give is set to zero where the other one is wanted.

All of this changes the base while it lasts, so one thread at a time may do it: another waits.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dodo.architecture import layers_of, lora_targets
from dodo.config import CONFIG_FILE, LoraSettings
from dodo.errors import InputError

__all__ = ["PHI", "THETA", "AdapterName", "Adapters", "Lock", "is_plain"]

AdapterName = Literal["phi", "theta"]
PHI: AdapterName = "phi"
THETA: AdapterName = "theta"

_WHOLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types of weights that an adapter's can be added to."""


class Lock:
    """A re-entrant lock; a copy or a pickle of its owner gets one of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owners: list[int] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owners.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._owners.pop()
        self._lock.release()

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owners[:1] == [threading.get_ident()]

    def __reduce__(self) -> tuple[type["Lock"], tuple[()]]:
        return Lock, ()


class Adapters:
    """Both adapters of one base, which they freeze and wrap in place.

    Args:
        base: the language model; its parameters stop requiring gradients.
        encoder: settings of phi.
        decoder: settings of theta.
        seed: of the fresh weights. Fresh adapters change nothing: their B matrices are zero.

    Raises:
        InputError: the base has adapters already, or no layer of a name that they are to be on.

    Attributes:
        lock: held by the thread that has the base changed for itself, by `use`, `mixed`, `merged` or otherwise.
    """

    def __init__(self, base: PreTrainedModel, *, encoder: LoraSettings, decoder: LoraSettings, seed: int = 0) -> None:
        if any(isinstance(module, BaseTunerLayer) for module in base.modules()):
            raise InputError("the base has adapters on it already: load it anew, or merge them into it first (merge_and_unload)")
        self.base = base
        self.lock = Lock()
        with torch.random.fork_rng(devices=[]), _without_chatter():
            torch.default_generator.manual_seed(seed)  # of the CPU alone: the user's generators of GPUs stay as they are
            self.peft: PeftModel = get_peft_model(base, _lora_config(base, encoder), adapter_name=PHI)
            self.peft.add_adapter(THETA, _lora_config(base, decoder))
        self._layers: list[Any] = [module for module in base.modules() if isinstance(module, LoraLayer)]
        self._linears: list[Any] = [layer.get_base_layer() for layer in self._layers]
        self._matrices: dict[AdapterName, list[Any]] = {PHI: self._matrices_of(PHI), THETA: self._matrices_of(THETA)}
        self._merged: dict[str, tuple[list[Any], list[Tensor]]] = {}
        self._inside: AdapterName | None = None  # whose weights the base has now
        self.current: AdapterName | None = None
        self._kept: Tensor | None = None
        self._switch(None)
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def parameters(self, name: AdapterName | None = None) -> list[torch.nn.Parameter]:
        """LoRA matrices of one adapter, or of both."""
        return [p for _, p in self.named_parameters(name)]

    def named_parameters(self, name: AdapterName | None = None) -> list[tuple[str, torch.nn.Parameter]]:
        """The same with their names in the base."""
        wanted = (name,) if name else (PHI, THETA)
        return [
            (key, parameter)
            for key, parameter in self.base.named_parameters()
            if ".lora_" in key and any(f".{adapter}." in key for adapter in wanted)
        ]

    def _matrices_of(self, name: AdapterName) -> list[Any]:
        return [
            matrix
            for layer in self._layers
            for both in (layer.lora_A, layer.lora_B)
            for key, matrix in both.items()
            if key == name
        ]

    def base_weights(self) -> dict[str, Tensor]:
        """The base's own weights, without adapters, by the names that they have without adapters."""
        return {key.replace(".base_layer.", "."): value for key, value in self.base.state_dict().items() if ".lora_" not in key}

    # -- switching

    @contextmanager
    def use(self, name: AdapterName | None) -> Iterator[None]:
        """Run the base with one adapter on, or with none; what was on before is on again afterwards."""
        with self.lock:
            self._may_learn(name)
            plain = [layer for layer in self._layers if name and is_plain(layer) and "forward" not in vars(layer)]
            for layer in plain:
                layer.forward = _adding_in_place(layer)
            try:
                with self._switched(name):
                    yield
            finally:
                for layer in plain:
                    del layer.forward

    @contextmanager
    def mixed(self, kept: Tensor) -> Iterator[None]:
        """Run the base with phi on the kept tokens and theta on all others, in one pass. Paper: Section 2.2.

        Args:
            kept: bool [B, T], for the tokens of the forward passes within.
        """
        with self.lock:
            self._may_learn(PHI, THETA)
            with self._switched(None, kept):
                yield

    def _may_learn(self, *names: AdapterName | None) -> None:
        """Forget merged copies of adapters that run with gradients: fused optimizers change weights without a word of it."""
        if torch.is_grad_enabled():
            for name in filter(None, names):
                self._merged.pop(name, None)

    @contextmanager
    def _switched(self, name: AdapterName | None, kept: Tensor | None = None) -> Iterator[None]:
        """Without the lock: a backward pass runs layers again in a thread of its own, while the one that holds it waits."""
        before = self.current, self._kept
        if name == before[0] and kept is before[1]:  # streams come here for each token, and there are hundreds of layers
            yield
            return
        self._switch(name, kept)
        try:
            yield
        finally:
            self._switch(*before)

    def _switch(self, name: AdapterName | None, kept: Tensor | None = None) -> None:
        active = [PHI, THETA] if kept is not None else [] if name is None else [name]
        for layer in self._layers:
            layer._disable_adapters = not active
            if active:
                layer._active_adapter = active
        if kept is not self._kept:
            self._share_out(kept)
        self.current, self._kept = name, kept

    def _share_out(self, kept: Tensor | None) -> None:
        shares = {} if kept is None else {PHI: kept[..., None], THETA: ~kept[..., None]}
        for layer in self._layers:
            for name, matrix in layer.lora_A.items():
                if not hasattr(matrix, "share"):
                    matrix.register_forward_hook(_own_share)
                matrix.share = shares.get(name)

    @contextmanager
    def merged(self, name: AdapterName) -> Iterator[None]:
        """Like `use`, for inference: the adapter's weights are added into copies of the base's, which are kept for next time.

        Costs one more copy of the adapted weights and gives the speed of the plain base. The base's own weights are put back
        bit by bit. A base that can't be merged (quantised, split) or does not fit twice runs with the adapter beside it.

        Raises:
            InputError: within another adapter's.
        """
        with self.lock:
            if self._inside is not None:
                if self._inside != name:
                    raise InputError(f"{name} can't be merged within {self._inside}: leave that context first")
                yield
                return
            weights = None if torch.is_grad_enabled() else self._merged_weights(name)
            if weights is None:
                with self.use(name):
                    yield
                return
            originals = [linear.weight.data for linear in self._linears]
            with self.use(None):
                try:
                    for linear, weight in zip(self._linears, weights, strict=True):
                        linear.weight.data = weight
                    self._inside = name
                    yield
                finally:
                    self._inside = None
                    for linear, weight in zip(self._linears, originals, strict=True):
                        linear.weight.data = weight

    def forget_merged(self) -> None:
        """Free the copies that `merged` keeps."""
        self._merged.clear()

    def _merged_weights(self, name: AdapterName) -> list[Tensor] | None:
        """Those kept from before, or new ones where what they were made of has changed; None if there can be none."""
        if not all(type(linear) is torch.nn.Linear for linear in self._linears):
            return None  # its weights may have scales of their own
        weights = [linear.weight for linear in self._linears]
        if any(weight.dtype not in _WHOLE or weight.is_meta or hasattr(weight, "device_mesh") for weight in weights):
            return None  # the last are split over the processes of a run
        made_from = weights + [matrix.weight for matrix in self._matrices[name]]
        state = [(_version(weight), weight.data_ptr(), weight.dtype, weight.device) for weight in made_from]
        if name in self._merged and self._merged[name][0] == state:
            return self._merged[name][1]
        size = sum(weight.numel() * weight.element_size() for weight in weights)
        if self._merged.pop(name, None) is None and _free_bytes(weights[0].device) <= 1.5 * size:
            return None
        pairs = zip(self._layers, weights, strict=True)
        self._merged[name] = state, [self._with_update(layer, weight.data, name) for layer, weight in pairs]
        return self._merged[name][1]

    def _with_update(self, layer: Any, weight: Tensor, name: AdapterName) -> Tensor:
        return (weight.float() + layer.get_delta_weight(name).float()).to(weight.dtype) if name in layer.lora_A else weight

    # -- training

    def checkpoint_gradients(self) -> None:
        """Keep no activations inside the base's layers but the last: the backward pass runs each again, with the adapter it had.

        The last is where encoding ends in the middle (`AllKept`), which can't be run again.

        transformers' own switch takes the cache away from checkpointed layers, and with it the nuggets.
        """
        for layer in layers_of(self.base)[:-1]:
            layer.forward = functools.partial(self._checkpointed, layer.forward)  # unlike a closure, it is copied with its layer

    def _checkpointed(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), self._switched(self.current, self._kept)

        result: Tensor = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        return result

    # -- files

    def save(self, folder: Path) -> None:
        """Write PEFT's own folders, `folder/phi` and `folder/theta`. They name no base, for PEFT would name a folder of this
        machine."""
        for name in (PHI, THETA):
            self.peft.peft_config[name].base_model_name_or_path = ""
        self.peft.save_pretrained(str(folder), selected_adapters=[PHI, THETA], save_embedding_layers=False)
        for name in (PHI, THETA):  # PEFT's template card says nothing; the set's own card stands beside the folders
            (folder / name / "README.md").unlink(missing_ok=True)
        (folder / "README.md").unlink(missing_ok=True)

    def load(self, folder: Path, *, both_from: AdapterName | None = None) -> None:
        """Read them back.

        Args:
            folder: see `save`.
            both_from: the one of them that both are read from; None: each its own.

        Raises:
            InputError: a folder is missing, or its rank or targets are not the configured ones.
        """
        for name in (PHI, THETA):
            place = folder / (both_from or name)
            for file in ("adapter_model.safetensors", "adapter_config.json"):
                if not (place / file).is_file():
                    raise InputError(f"{folder} has no adapter {place.name}: there is no {place.name}/{file}")
            try:
                with _without_chatter():
                    self._check_settings(name, LoraConfig.from_pretrained(str(place)))
                    result = self.peft.load_adapter(str(place), adapter_name=name, is_trainable=True)
            except (RuntimeError, ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
                first = (str(error).strip() or repr(error)).splitlines()[-1].strip()
                raise InputError(f"{place} is damaged, or does not fit this base and configuration: {first}") from error
            missing = [key for key in getattr(result, "missing_keys", []) if f".{name}." in key]
            if missing:
                raise InputError(f"{place} lacks {len(missing)} weights, the first of them {missing[0]}")
        self._matrices = {PHI: self._matrices_of(PHI), THETA: self._matrices_of(THETA)}
        self._switch(self.current)
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def _check_settings(self, name: AdapterName, stored: LoraConfig) -> None:
        own = self.peft.peft_config[name]
        for setting in ("r", "lora_alpha", "target_modules"):
            if getattr(stored, setting) != getattr(own, setting):
                raise ValueError(f"{setting} is {getattr(stored, setting)} there and {getattr(own, setting)} in {CONFIG_FILE}")


def _version(weight: Tensor) -> int:
    """How often a weight has been changed in place; one made in inference mode does not count."""
    return 0 if weight.is_inference() else weight._version


def is_plain(layer: Any) -> bool:
    """Whether a LoRA layer is a floating linear one without dropout or DoRA."""
    base: Any = layer.get_base_layer()
    plain = type(base) is torch.nn.Linear and base.weight.is_floating_point() and not any(layer.use_dora.values())
    return plain and all(isinstance(dropout, torch.nn.Identity) for dropout in layer.lora_dropout.values())


def _adding_in_place(layer: Any) -> Callable[..., Tensor]:
    """A plain layer's forward that, without gradients, adds one adapter's update to the base's output where that lies.

    PEFT's own makes two more passes over every output; compressing long texts shows it.
    """
    ordinary, base = layer.forward, layer.get_base_layer()

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or len(names) != 1:
            return ordinary(x, *args, **kwargs)
        a, b = layer.lora_A[names[0]].weight.to(x.dtype), layer.lora_B[names[0]].weight.to(x.dtype)
        y: Tensor = base(x)
        y.view(-1, y.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]) @ a.T, b.T, alpha=layer.scaling[names[0]])
        return y

    return forward


def _own_share(matrix: torch.nn.Module, _: Any, output: Tensor) -> Tensor | None:
    """A forward hook: of what an A matrix gives, the tokens that its adapter is for."""
    share = matrix.share
    assert share is None or isinstance(share, Tensor)
    return None if share is None else output * share.to(output.device)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """PEFT warns of what is meant here: several adapters, loading over one that is there, a call that is going to be renamed."""
    with warnings.catch_warnings():
        expected = "multiple adapters|already exists|missing adapter keys|is_gradient_checkpointing"
        warnings.filterwarnings("ignore", message=f".*({expected}).*")
        yield


def _lora_config(base: PreTrainedModel, settings: LoraSettings) -> LoraConfig:
    if isinstance(settings.targets, tuple):  # of several names PEFT leaves out without a word those that nothing has
        linears = {name.removesuffix(".base_layer") for name, layer in base.named_modules() if isinstance(layer, torch.nn.Linear)}
        for target in settings.targets:
            if not any(f".{name}".endswith(f".{target}") for name in linears):
                there = ", ".join(sorted({name.rpartition(".")[2] for name in linears if "lora_" not in name}))
                raise InputError(f"LoRA targets: the base has no linear layer {target!r}; it has {there}")
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT takes fractions
        target_modules=lora_targets(base.config, settings.targets),
        bias="none",
        task_type="CAUSAL_LM",
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":  # what PyTorch holds and does not use is free too
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    import psutil

    return int(psutil.virtual_memory().available)

"""How far the encoding of a text has come, seen from outside: tokens that have gone through layers, of all that will."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dodo.architecture import layers_of
from dodo.compressor import Compressor

__all__ = ["reporting"]


@contextmanager
def reporting(compressor: Compressor, tokens: int, report: Callable[[float], None]) -> Iterator[None]:
    """While inside, tell `report` which share is done, from 0 to 1, as each layer ends. Nothing else may run the model.

    The share is of the scorer's layers and those of the encoder but its last, which ends early. Texts that are longer than the
    window are scored in stretches that overlap, so there it runs ahead.
    """
    layers = layers_of(compressor.base)
    total, done = tokens * (compressor.config.feature_layer + len(layers) - 1), 0

    def count(layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal done
        done = min(total, done + int(inputs[0].shape[1]))
        report(done / total)

    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

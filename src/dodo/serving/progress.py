"""Seeing into a text's way through the model, from outside: how far it has come, and pauses on the way."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from dodo.architecture import layers_of
from dodo.compressor import Compressor

__all__ = ["pausing", "reporting"]

_in_pause = ContextVar("in_pause", default=False)
"""What goes through the model in a pause is no part of what is paused."""


@contextmanager
def reporting(compressor: Compressor, tokens: int, report: Callable[[float], None]) -> Iterator[None]:
    """While inside, tell `report` which share is done, from 0 to 1, as each layer ends.

    The share is of the scorer's layers and those of the encoder but its last, which ends early. Texts that are longer than the
    window are scored in stretches that overlap, so there it runs ahead.
    """
    layers = layers_of(compressor.base)
    total, done = tokens * (compressor.config.feature_layer + len(layers) - 1), 0

    def count(layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal done
        if not _in_pause.get():
            done = min(total, done + int(inputs[0].shape[1]))
            report(done / total)

    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def pausing(compressor: Compressor, pause: Callable[[], None]) -> Iterator[None]:
    """While inside, call `pause` behind each part of each layer: its norms, its attention, its MLP.

    There the model may be used for something else. What `pause` raises ends the pass. Passes of other threads have no pauses.
    """
    thread = threading.get_ident()

    def rest(part: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if _in_pause.get() or threading.get_ident() != thread:
            return
        before = _in_pause.set(True)
        try:
            pause()
        finally:
            _in_pause.reset(before)

    hooks = [part.register_forward_hook(rest) for layer in layers_of(compressor.base) for part in layer.children()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

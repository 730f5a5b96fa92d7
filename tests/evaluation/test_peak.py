"""Peak memory."""

from pathlib import Path

import pytest
import torch

from dodo.evaluation.peak import forget_peak, peak

CPU = torch.device("cpu")


def test_the_peak_has_what_was_held_since_it_was_forgotten() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not tell a process's peak, or does not forget it")
    size = 256 * 1024**2
    forget_peak(CPU)
    before = peak(CPU)
    held = torch.ones(size, dtype=torch.uint8)
    during = peak(CPU)
    del held
    forget_peak(CPU)
    after = peak(CPU)
    assert before is not None
    assert during is not None
    assert after is not None
    assert during - before > 0.9 * size
    assert during - after > 0.9 * size

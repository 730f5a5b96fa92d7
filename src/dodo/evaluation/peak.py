"""Peak memory: of this process (Linux), or of the GPU where the model is on one."""

from pathlib import Path

import torch

__all__ = ["forget_peak", "peak"]

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak(device: torch.device) -> None:
    """Count the peak from now on, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _FORGET.write_text("5")  # see proc(5)
    except OSError:
        return


def peak(device: torch.device) -> int | None:
    """Highest bytes: allocated on the GPU, or resident in the process; None where that is not known.

    >>> peak(torch.device("cpu")) is None or peak(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)

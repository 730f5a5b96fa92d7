"""One JSON file per measurement: what was measured, on what, with what, and everything needed to do it again."""

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dodo.files import write_whole

__all__ = ["about_machine", "commit", "short_commit", "today", "write_json"]

PACKAGES = (
    *("dodo-lm", "torch", "transformers", "tokenizers", "peft", "safetensors", "numpy"),
    *("sacrebleu", "rouge-score", "text2num"),
)
_CODE = (":(top)", ":(top,exclude)results", ":(top,exclude)docs")


def about_machine(peer: dict[str, str] | None = None) -> dict[str, Any]:
    """Processor, accelerator and versions; those of a peer that runs in an environment of its own beside them."""
    import torch

    return {
        "hardware": {
            "cpu": _cpu(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {"python": platform.python_version(), **{p: v for p in PACKAGES if (v := _version(p))}},
        **({"versions of the peer": peer} if peer else {}),
    }


def commit() -> str | None:
    """Of the repository that this package is run from, with a mark if its code has changes; None outside of one."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=here, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    if not head or git("ls-files", "--error-unmatch", __file__) is None:
        return None
    return head + ("+changes" if git("status", "--porcelain", "-uno", "--", *_CODE) else "")


def short_commit(commit: str | None, digits: int = 7) -> str:
    """A commit as pages show it: its first digits, and + if there were changes that were not committed; "" for None."""
    return commit[:digits] + "+" * commit.endswith("+changes") if commit else ""


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def today() -> str:
    """The date, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    flags = next((line for line in lines if line.startswith("flags")), "")
    return name + "".join(f", {flag}" for flag in ("avx512_bf16", "amx_bf16") if flag in flags)

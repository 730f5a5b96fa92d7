"""Average sets of adapters whose runs went on from one another or from one start.

    python recipes/average.py runs/first/last=1 runs/second/last=2 --out runs/average/last

The matrices of phi and theta are averaged, A and B each by itself, in fp32, by the weights behind `=` (shares of their sum; 1
without). Configuration, scorer, soft token and thresholds are those of the set named last, for what a scorer learned may not be
what an earlier one did. The result is a set like any other. `average.json` in it says what it was made of, where an average
counts as the sets that went into it. Sets without a common start are refused: their matrices stand for other things, and the
average for nothing.
"""

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dodo import Dodo
from dodo.config import CONFIG_FILE

MATRICES = [f"{name}/adapter_model.safetensors" for name in ("phi", "theta")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="FOLDER[=WEIGHT]")
    parser.add_argument("--out", type=Path, required=True, help="folder of the average; must not exist")
    given = parser.parse_args()

    shares = _shares(given.sets)
    if given.out.exists():
        raise SystemExit(f"{given.out} is there already")
    folders = [Path(folder) for folder in shares]
    if none := [folder for folder in folders if not (folder / CONFIG_FILE).is_file()]:
        raise SystemExit(f"{none[0]} is no folder of adapters: it has no {CONFIG_FILE}")
    sets = [Dodo.from_pretrained(folder) for folder in shares]  # each is whole, and of the base that it names
    for name in ("base_fingerprint", "encoder", "decoder", "feature_layer", "keep_first", "positions"):
        if len({getattr(one.config, name) for one in sets}) > 1:
            raise SystemExit(f"the sets differ in {name}")
    for file in MATRICES:
        first, *others = (load_file(folder / file) for folder in folders)
        for folder, other in zip(folders[1:], others, strict=True):
            if _norm({name: other[name].float() - first[name].float() for name in first}) > 0.7 * _norm(first):
                raise SystemExit(f"{folder} and {folders[0]} have no common start: {file} is another in each")
    shutil.copytree(folders[-1], given.out, ignore=shutil.ignore_patterns("README.md", "recipe*", "training.csv", "average.json"))
    for file in MATRICES:
        mean = _average([load_file(folder / file) for folder in folders], list(shares.values()))
        save_file(mean, given.out / file, {"format": "pt"})
    made: dict[str, dict[str, Any]] = {}
    for (folder, share), one in zip(shares.items(), sets, strict=True):
        for part in _parts(folder, share, one.fingerprint.adapter):
            before = made.pop(part["adapter"], {"share": 0.0})  # so that what is named last stands last
            made[part["adapter"]] = part | {"share": part["share"] + before["share"]}
    (given.out / "average.json").write_text(json.dumps(list(made.values()), indent=2) + "\n", encoding="utf-8")
    print(f"{given.out}: adapter {Dodo.from_pretrained(str(given.out)).fingerprint.adapter}")


def _shares(sets: list[str]) -> dict[str, float]:
    """Of each folder, adding up to 1."""
    weights: dict[str, float] = {}
    for one in sets:
        folder, _, weight = one.partition("=")
        try:
            weights[folder] = float(weight or 1)
        except ValueError:
            raise SystemExit(f"{one}: {weight!r} is not a number") from None
    total = sum(weights.values())
    if len(weights) < len(sets) or not all(math.isfinite(weight) and weight > 0 for weight in weights.values()):
        raise SystemExit("weights must be positive numbers, and each set named once")
    return {folder: weight / total for folder, weight in weights.items()}


def _parts(folder: str, share: float, adapter: str) -> list[dict[str, Any]]:
    """What a set adds to `average.json`: itself, or the sets that it is an average of."""
    there = Path(folder) / "average.json"
    if not there.exists():
        return [{"set": folder, "share": share, "adapter": adapter}]
    return [part | {"share": share * part["share"]} for part in json.loads(there.read_text(encoding="utf-8"))]


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.float().square().sum()) for tensor in tensors.values()))


def _average(sets: list[dict[str, torch.Tensor]], shares: list[float]) -> dict[str, torch.Tensor]:
    first = sets[0]
    return {
        name: sum(share * one[name].float() for one, share in zip(sets, shares, strict=True)).to(matrix.dtype).contiguous()
        for name, matrix in first.items()
    }


if __name__ == "__main__":
    main()

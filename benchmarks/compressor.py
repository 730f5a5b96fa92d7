"""Cost of compressing, asking and keeping, against the same base doing it the ordinary way. SmolLM2-135M, CPU.

    python benchmarks/compressor.py

Every ratio is measured side by side in one run and says what it includes. Adapters have random weights, so that nothing is
saved by their being zero. Writes results/benchmark-compressor.json.
"""

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, peak_memory, seconds_of_command, side_by_side, write_page, write_result

warnings.simplefilter("ignore")

TOKENS, RATIO, QUESTION_TOKENS, NEW_TOKENS = 2048, 10, 24, 48
ADAPTERS = {"qkv rank 32": ("qkv", 32), "all-linear rank 16": ("all-linear", 16)}

_LOAD = """
import torch, warnings
warnings.simplefilter("ignore")
from transformers import AutoModelForCausalLM
from dodo.pull import pull
ids = torch.arange(2048)[None] * 17 % 49000
"""
_PREFILL = (
    _LOAD
    + """
base = AutoModelForCausalLM.from_pretrained(pull("smollm2-135m"))
with torch.no_grad():
    kept = base(ids, use_cache=True, logits_to_keep=1)
"""
)
_COMPRESS = (
    _LOAD
    + """
from dodo import Dodo, DodoConfig, LoraSettings
lora = LoraSettings(targets="{targets}", rank={rank})
dodo = Dodo.from_pretrained("smollm2-135m", config=DodoConfig(encoder=lora, decoder=lora))
with torch.no_grad():
    kept = dodo.compressor.encode(ids, ratio=10)
"""
)


def main() -> None:
    from transformers import AutoModelForCausalLM

    from dodo import Dodo, DodoConfig, LoraSettings
    from dodo.attention import cache_argument
    from dodo.pull import pull

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(pull("smollm2-135m")).eval()
    measured: dict[str, Any] = {}
    base_peak = peak_memory(_PREFILL)
    for name, (targets, rank) in ADAPTERS.items():
        lora = LoraSettings(targets=targets, rank=rank)  # type: ignore[arg-type]
        dodo = Dodo.from_pretrained("smollm2-135m", config=DodoConfig(encoder=lora, decoder=lora))
        with torch.no_grad():
            for parameter in dodo.compressor.adapters.parameters():
                parameter.normal_(std=0.01)
        dodo.stamp()
        text = (ROOT / "examples" / "harbour-clock.txt").read_text(encoding="utf-8")
        ids = torch.tensor([(dodo.document_ids(text) * 8)[:TOKENS]])
        question = torch.tensor([dodo.document_ids("Who wound the clock, and how long did it take her to do it by hand?" * 2)])
        question = question[:, :QUESTION_TOKENS]
        measured[name] = (
            _compressing(base, dodo, ids, base_peak, peak_memory(_COMPRESS.format(targets=targets, rank=rank)))
            | _asking(base, dodo, ids, question)
            | _decoding(base, dodo, ids, cache_argument(base))
        )
    measured["file"] = _sizes(dodo, ids)
    measured["storage"] = _storage_loss(dodo, text)
    measured["command"] = {
        "dodo --help, s": seconds_of_command("dodo", "--help"),
        "import dodo, s": seconds_of_command("python", "-c", "import dodo"),
        "loading the base with fresh adapters, imports left out, s": side_by_side(
            {"load": lambda: Dodo.from_pretrained("smollm2-135m", fresh=True)}, rounds=3
        )["load"],
    }
    path = write_result(
        "benchmark-compressor",
        measured,
        settings={
            "base": "smollm2-135m",
            "adapters": "random weights",
            "dtype": "float32",
            "text": "examples/harbour-clock.txt, repeated",
            "tokens": TOKENS,
            "ratio": RATIO,
            "question tokens": QUESTION_TOKENS,
            "new tokens": NEW_TOKENS,
        },
    )
    page = write_page()
    print(page.read_text(encoding="utf-8"))
    print(f"written to {path.relative_to(ROOT)} and {page.relative_to(ROOT)}", file=sys.stderr)


def _compressing(base: Any, dodo: Any, ids: torch.Tensor, base_peak: int, dodo_peak: int) -> dict[str, Any]:
    """Tokens in, nuggets out (features, scores, selection, encoding) / tokens in, full cache and last logits out."""
    with torch.no_grad():
        seconds = side_by_side(
            {
                "base": lambda: base(ids, use_cache=True, logits_to_keep=1),
                "dodo": lambda: dodo.compressor.encode(ids, ratio=RATIO),
            }
        )
    return {
        "compress, s": seconds["dodo"],
        "base prefill, s": seconds["base"],
        "compress / base prefill": seconds["dodo"] / seconds["base"],
        "peak memory compressing, bytes": dodo_peak,
        "peak memory of base prefill, bytes": base_peak,
        "peak memory compressing / base prefill": dodo_peak / base_peak,
    }


def _asking(base: Any, dodo: Any, ids: torch.Tensor, question: torch.Tensor) -> dict[str, Any]:
    """One new token through generate(): over nuggets in memory / over text and question."""
    nuggets = _encode(dodo, ids)
    whole = torch.cat([ids, question], dim=1)
    greedy = {"attention_mask": torch.ones_like(whole), "max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    seconds = side_by_side(
        {
            "base": lambda: base.generate(whole, **greedy),
            "dodo": lambda: dodo.generate_ids(nuggets, question.tolist(), max_new_tokens=1),
        }
    )
    return {
        "first token over nuggets, s": seconds["dodo"],
        "first token over the text, s": seconds["base"],
        "first token sooner by": seconds["base"] / seconds["dodo"],
    }


def _decoding(base: Any, dodo: Any, ids: torch.Tensor, cache_name: str) -> dict[str, Any]:
    """Tokens after the first, through generate(): over k nuggets / over an ordinary cache of as many tokens."""
    from transformers import DynamicCache

    nuggets = _encode(dodo, ids)
    states = int(nuggets.states)

    def ordinary(new: int) -> None:
        cache = DynamicCache()
        for i in range(nuggets.keys.shape[0]):
            cache.update(nuggets.keys[i], nuggets.values[i], i)
        mask = torch.ones(1, states + 1, dtype=torch.long)
        base.generate(
            input_ids=torch.tensor([[5]]),
            attention_mask=mask,
            position_ids=torch.tensor([[states]]),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            **{cache_name: cache},
        )

    seconds = side_by_side(
        {
            "base 1": lambda: ordinary(1),
            "dodo 1": lambda: dodo.generate_ids(nuggets, [[5]], max_new_tokens=1, min_new_tokens=1),
            "base": lambda: ordinary(NEW_TOKENS + 1),
            "dodo": lambda: dodo.generate_ids(nuggets, [[5]], max_new_tokens=NEW_TOKENS + 1, min_new_tokens=NEW_TOKENS + 1),
        }
    )
    ours = (seconds["dodo"] - seconds["dodo 1"]) / NEW_TOKENS
    theirs = (seconds["base"] - seconds["base 1"]) / NEW_TOKENS
    return {"per token over nuggets, s": ours, "per token over as many tokens, s": theirs, "per token, ratio": ours / theirs}


def _sizes(dodo: Any, ids: torch.Tensor) -> dict[str, Any]:
    nuggets = _encode(dodo, ids)
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for storage in ("float32", "float16", "int8"):
            nuggets.save(Path(folder) / storage, storage=storage)
            sizes[storage] = (Path(folder) / storage).stat().st_size
    n = int(nuggets.lengths + nuggets.sinks)
    half = nuggets.full_cache_nbytes // 2
    return {
        "n / states": n / int(nuggets.states),
        "full cache in fp16 / file in fp16": half / sizes["float16"],
        "full cache in fp16 / file in int8": half / sizes["int8"],
        "header and rest of the fp16 file": 1 - nuggets.nbytes / 2 / sizes["float16"],
    } | {f"{storage} file, bytes": size for storage, size in sizes.items()}


def _storage_loss(dodo: Any, text: str) -> dict[str, Any]:
    """What rounding keys and values does to the next-token distributions: first half compressed, second half read over it."""
    ids = torch.tensor([dodo.document_ids(text)])
    half = ids.shape[1] // 2
    lost: dict[str, Any] = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        nuggets = dodo.compressor.encode(ids[:, :half], ratio=2)
        exact = dodo.compressor.decode(nuggets, ids[:, half:]).log_softmax(-1)
        for storage in ("bfloat16", "float16", "int8"):
            nuggets.save(Path(folder) / storage, storage=storage)
            rounded = dodo.compressor.decode(type(nuggets).load(Path(folder) / storage), ids[:, half:]).log_softmax(-1)
            divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
            lost[f"{storage}: mean divergence from fp32, nats"] = float(divergence)
            lost[f"{storage}: same most likely token, share"] = float((exact.argmax(-1) == rounded.argmax(-1)).float().mean())
    return lost


def _encode(dodo: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return dodo.compressor.encode(ids, ratio=RATIO)


if __name__ == "__main__":
    main()

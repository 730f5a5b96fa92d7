"""Loading a base model from wherever it is: an alias, a folder, a GGUF file, or a hub id.

Nothing here is about Dodo: what comes out is a transformers model, its tokenizer, and the fingerprints of both.
"""

import functools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dodo import fingerprint
from dodo.architecture import check_supported
from dodo.errors import DodoError, InputError
from dodo.pull import BASES, Progress, gives_back, pull

__all__ = ["LoadedBase", "Quantization", "check_attention", "computes_in", "held_in", "load_base", "load_tokenizer"]

Quantization = Literal["4bit", "8bit"]
SLOWER = 1.3
"""Times as long as in float32: a type that takes longer on a CPU is left for float32. Seen: 0.5, or 1.8 and more."""
LONGEST = 300
"""Characters of an error of transformers that are shown."""


@dataclass(frozen=True)
class LoadedBase:
    """A base model ready to be wrapped."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    """Of the weights as they are stored."""
    name: str
    """What it was loaded from; of a folder or a file the whole path, for adapters may be loaded from elsewhere."""


def load_base(
    name: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device | None = None,
    quantization: Quantization | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    allow_untested: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> LoadedBase:
    """Load a base model and its tokenizer.

    Args:
        name: an alias ('smollm2-135m', fetched on first use), a folder, a `.gguf` file, or a hub id.
        dtype: of the weights in memory; 'auto' takes the stored one, or float32 on a CPU that is slower in it
            (`computes_in`) and whose memory could hold the weights twice.
        device: where to put it; None: a GPU if there is one.
        quantization: '4bit' or '8bit' through bitsandbytes (an extra).
        attn_implementation: transformers' attention backend; None: its own choice, 'sdpa' where the family has it.
        revision: of a hub id.
        allow_untested: see `check_supported`.
        progress: told about a download.

    Raises:
        InputError: there is no such model, or it can't be read.
        UnsupportedModelError: its architecture can't hold nuggets.
        DownloadError: an alias could not be fetched.
        DodoError: bitsandbytes is wanted and not installed.
    """
    source, where = _locate(str(name), revision, progress)
    where |= {"trust_remote_code": False}
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    if "gguf_file" not in where:
        options["use_safetensors"] = True  # never a pickle
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        config = AutoConfig.from_pretrained(source, **where)
        check_supported(config, allow_untested=allow_untested)
        if getattr(config, "attn_logit_softcapping", None) is not None:
            options["attn_implementation"] = attn_implementation or "eager"
            check_attention(config, options["attn_implementation"], name)
        if quantization is not None:
            if dtype == "auto":
                stored = config.dtype or torch.float32
                options["dtype"] = stored if computes_in(stored, device) else torch.float32
            made = _bitsandbytes(quantization, options["dtype"])
            options |= {"quantization_config": made, "device_map": {"": str(device)}}
        auto: Any = AutoModelForCausalLM
        model, report = auto.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **where, **options)
        if missing := sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]):
            told = f"lacks {len(missing)} of its weights, or has them in other shapes, the first of them {missing[0]}"
            raise InputError(f"{str(name)!r} {told}")
        if quantization is None:
            model = model.to(device)
            if dtype == "auto" and not computes_in(model.dtype, model.device) and _fits_twice(4 * model.num_parameters()):
                model = model.float()
        else:
            _keep_differentiable(model)
        tokenizer = _tokenizer(name, source, where)
    except DodoError:
        raise
    except Exception as error:  # transformers raises whatever a broken file makes it stumble over
        if "scaled_dot_product_attention" in str(error):
            raise _without_attention(name, attn_implementation) from None
        raise _unreadable(name, "base model", error) from error
    local = Path(source).is_dir() and str(name) not in BASES
    known_as = str(Path(name).expanduser().absolute()) if local else str(name)
    return LoadedBase(model.eval(), tokenizer, _fingerprint(source, where, model), known_as)


def load_tokenizer(
    name: str | Path, *, revision: str | None = None, progress: Progress = lambda what, done, total: None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a base alone; of a hub id or a folder its weights are neither fetched nor read.

    Args:
        name, revision, progress: as for `load_base`.

    Raises:
        InputError: there is no such tokenizer, or it can't be read.
        DownloadError: an alias could not be fetched.
    """
    source, where = _locate(str(name), revision, progress)
    try:
        return _tokenizer(name, source, where | {"trust_remote_code": False})
    except DodoError:
        raise
    except Exception as error:
        raise _unreadable(name, "tokenizer", error) from error


def _tokenizer(name: str | Path, source: str, where: dict[str, Any]) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **where)
    if "gguf_file" in where and not gives_back(tokenizer):
        raise InputError(f"{str(name)!r}: transformers reads its tokenizer wrongly; take a later one, or the model as a folder")
    return tokenizer


def check_attention(config: PreTrainedConfig, attention: str | None, name: str | Path) -> None:
    """Raise InputError if a base caps the logits of its attention and this backend leaves that out, as `sdpa` does."""
    if attention == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        raise _without_attention(name, attention)


def _without_attention(name: str | Path, attention: str | None) -> InputError:
    wanted = "attn_implementation='eager'; in a recipe, running.attention: eager"
    return InputError(f"the base {str(name)!r} has no attention backend {attention!r}; take {wanted}")


def _unreadable(name: str | Path, what: str, error: Exception) -> InputError:
    first = " ".join((str(error).strip() or repr(error)).split())
    first = first if len(first) <= LONGEST else f"{first[:LONGEST]} ..."
    hint = "" if "/" in str(name) else f" (known aliases: {', '.join(BASES)})"
    return InputError(f"could not load a {what} from {str(name)!r}{hint}: {first}")


def computes_in(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether products of matrices take about as long in this type as in float32, or less.

    A CPU without instructions for it (most before AVX-512, and all that PyTorch has no oneDNN for) takes several times as long
    for a text in bfloat16 or float16 as in float32, which each number is turned into on the way. Some that have instructions are
    slower with them too (AVX-512 BF16 without AMX, on some), others gain by the same ones: where there are any, a product is
    timed, once in a process.
    """
    if torch.device(device).type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    of_type: Any = torch.ops.mkldnn
    has_them = of_type._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else of_type._is_mkldnn_fp16_supported()
    return bool(has_them) and _times_of_float32(dtype) < SLOWER


def held_in(model: PreTrainedModel) -> str:
    """The type of a base's weights in memory, as records say it: `bfloat16`; of a quantised one `4bit, bfloat16`, the second of
    its products."""
    bits = [bits for bits in get_args(Quantization) if getattr(model, f"is_loaded_in_{bits}", False)]
    return ", ".join([*bits, str(model.dtype).removeprefix("torch.")])


@functools.cache
@torch.no_grad()
def _times_of_float32(dtype: torch.dtype) -> float:
    """What a product of matrices of a small base's sizes takes on the CPU in this type, with its time in float32 as one."""
    kinds = (torch.float32, dtype)
    pairs = {kind: (torch.ones(256, 768, dtype=kind), torch.ones(768, 768, dtype=kind)) for kind in kinds}
    ratios = []
    for _ in range(25):  # in turns, and the median: another process may take the processor for a while
        taken = {}
        for kind, (left, right) in pairs.items():
            began = time.perf_counter()
            torch.mm(left, right)
            taken[kind] = time.perf_counter() - began
        ratios.append(taken[dtype] / taken[torch.float32])
    return statistics.median(ratios)


def _fits_twice(size: int) -> bool:
    return 2 * size <= psutil.virtual_memory().total


def _locate(name: str, revision: str | None, progress: Progress) -> tuple[str, dict[str, Any]]:
    if name in BASES:
        return str(pull(name, progress=progress)), {}
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"there is no GGUF file {name}")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{name!r} is a folder without a config.json: not a transformers model")
        return str(path), {}
    if path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"{name!r} is neither a model folder, nor a .gguf file, nor a hub id, nor one of {', '.join(BASES)}")
    return name, {} if revision is None else {"revision": revision}


def _bitsandbytes(quantization: str, dtype: torch.dtype) -> Any:
    """Settings of transformers: 4 bits as by QLoRA, products in `dtype`."""
    if quantization not in ("4bit", "8bit"):
        raise InputError(f"quantization must be '4bit' or '8bit', not {quantization!r}")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise DodoError("a quantised base needs bitsandbytes: pip install 'dodo-lm[quantized]'") from None
    from transformers import BitsAndBytesConfig

    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def _keep_differentiable(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from packing 4-bit weights in place at the first inference on a CPU.

    Packed weights have no gradient to their input, also in training that comes later: phi and theta would learn nonsense.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (not in torch's types)


def _fingerprint(source: str, where: dict[str, Any], model: PreTrainedModel) -> str:
    if "gguf_file" in where:
        return fingerprint.of_files([Path(source) / where["gguf_file"]])
    if not Path(source).is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(source, "config.json", revision=where.get("revision"))
        if not isinstance(found, str):
            return fingerprint.of_model(model)
        source = str(Path(found).parent)
    if files := _weight_files(Path(source)):
        return fingerprint.of_files(files)
    return fingerprint.of_model(model)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads from a folder; there may be others beside them."""
    index = folder / "model.safetensors.index.json"
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]

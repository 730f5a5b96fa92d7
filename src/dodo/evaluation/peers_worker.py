"""Runs in the peers' environment (`make peers`), where dodo can't be imported: presses of kvpress, or LLMLingua, on a given base.

Requests are lines of JSON on standard input, and each is answered with a line on standard output; ids are lists of integers:

    {"do": "start", "method": name, "base": folder, "device": "cpu", "threads": 2}    {"versions": {package: version}}

    a press:
    {"do": "read", "before": ids, "documents": [ids, ...], "states": [k, ...]}        {"states": [number, ...],
                                                                                       "bytes": [number, ...], "held": number}
    {"do": "reply", "held": number, "prompts": [ids, ...], "max_new_tokens": 64,
     "ends": ids, "exactly": false}                                                   {"texts": [text, ...]}

    LLMLingua:
    {"do": "read", "documents": [text, ...], "states": [k, ...]}                      {"texts": [text, ...]}

    both:
    {"do": "peak"}                                                                    {"bytes": number, or null}
    {"do": "forget_peak"}                                                             {}

What goes wrong is answered with {"error": a line}.
"""

import json
import math
import os
import platform
import sys
from importlib.metadata import version
from typing import Any

__all__ = ["PRESSES", "Lingua", "Press", "main", "start"]

PRESSES = ("expected-attention", "knorm", "kvzip", "snapkv", "streaming-llm", "tova")


def _bytes_behind(layer: Any, first: int) -> int:
    """Of a layer's keys and values, but for the first states, which stand before the document."""
    size, states = layer.keys.nbytes + layer.values.nbytes, layer.keys.shape[2]
    return int(size * (states - first) // states)


class Press:
    """A base that reads documents through one of kvpress's presses.

    States that stand before a document are kept and not counted. kvpress drops pairs of keys and values of single heads: `states`
    is the mean over layers and heads.
    """

    def __init__(self, method: str, base: str, device: str) -> None:
        import kvpress  # noqa: F401 - it changes the attention of models loaded after it
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if method not in PRESSES:
            raise ValueError(f"there is no press {method!r}; presses are {', '.join(PRESSES)}")
        self.method = method
        self.model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", attn_implementation="sdpa").to(device).eval()
        # a slice of states would have the head's matrix copied for each text
        self.model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.attentions = [layer.self_attn for layer in self.model.model.layers]
        self.number = 0
        self.caches: list[tuple[Any, list[Any], int]] = []

    def read(self, *, before: list[int], documents: list[list[int]], states: list[int]) -> dict[str, Any]:
        """Compress documents; those of the read before are forgotten."""
        self.caches, self.number = [], self.number + 1
        held = [self._compress(before, ids, k) for ids, k in zip(documents, states, strict=True)]
        sizes = [sum(_bytes_behind(layer, len(before)) for layer in cache.layers) for cache, *_ in self.caches]
        return {"states": held, "bytes": sizes, "held": self.number}

    def reply(
        self, *, held: int, prompts: list[list[int]], max_new_tokens: int, ends: list[int], exactly: bool = False
    ) -> dict[str, Any]:
        """Go on after each document, greedily, all at once, to one of the `ends`, or `exactly` so far, for measuring."""
        import torch

        if held != self.number:
            raise ValueError("other documents have been read since; a worker holds those that it read last")
        with torch.no_grad():
            written = self._write(prompts, max_new_tokens, set() if exactly else set(ends))
        return {"texts": [str(self.tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in written]}

    def _write(self, prompts: list[list[int]], most: int, stops: set[int]) -> list[list[int]]:
        import torch

        device = self.model.device
        caches, masked, lengths = zip(*self.caches, strict=True)
        fill = [max(cache.get_seq_length() for cache in caches) - cache.get_seq_length() for cache in caches]
        cache = _stacked(caches, fill)  # a copy: what is held stays as it is
        self._mask([_shifted(places, fill) for places in zip(*masked, strict=True)])
        seen = torch.ones(len(caches), cache.get_seq_length(), dtype=torch.long, device=device)
        for row, width in zip(seen, fill, strict=True):
            row[:width] = 0

        def read(ids: Any, real: Any, places: Any) -> list[int]:
            nonlocal seen
            seen = torch.cat([seen, real], dim=1)
            inputs = {"input_ids": ids, "attention_mask": seen, "position_ids": places, "past_key_values": cache}
            following: list[int] = self.model(**inputs, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
            return following

        longest = max(map(len, prompts))  # filled up on the left, so that all end together
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        places = torch.tensor(lengths, device=device)[:, None] + (real.cumsum(-1) - 1).clamp_min(0)
        # KVzip masks by a key that no query matches, and many queries leave none
        width = 1 if self.method == "kvzip" else longest
        for begin in range(0, longest, width):
            following = read(*(x[:, begin : begin + width] for x in (ids, real, places)))
        written = [[token] for token in following]
        one, place = real[:, -1:], places[:, -1:]
        while len(written[0]) < most and not all(stops & set(made) for made in written):
            place = place + 1
            for made, token in zip(written, read(torch.tensor(written, device=device)[:, -1:], one, place), strict=True):
                made.append(token)
        lasts = [next((i for i, token in enumerate(made) if token in stops), most) for made in written]
        return [made[:last] for made, last in zip(written, lasts, strict=True)]

    def _compress(self, before: list[int], document: list[int], k: int) -> float:
        import torch
        from transformers import DynamicCache

        cache = DynamicCache()
        ids = torch.tensor([before + document], device=self.model.device)
        self._mask([None] * len(self.attentions))
        with torch.no_grad(), self._press(len(before), len(document), k)(self.model):
            self.model.model(input_ids=ids, past_key_values=cache)
        masked = [attention.masked_key_indices for attention in self.attentions]
        self.caches.append((cache, masked, ids.shape[1]))
        heads = sum(layer.keys.shape[1] for layer in cache.layers)
        pairs = sum(layer.keys.shape[1] * layer.keys.shape[2] for layer in cache.layers)
        dropped = sum(len(places[0]) for places in masked if places is not None)
        states = (pairs - dropped) / heads - len(before)
        return int(states) if states == int(states) else states

    def _mask(self, masked: list[Any]) -> None:
        """What KVzip drops stays in the cache, and the attention modules know what it is: of one document at a time."""
        for attention, places in zip(self.attentions, masked, strict=True):
            attention.masked_key_indices = places

    def _press(self, first: int, tokens: int, k: int) -> Any:
        import kvpress

        share = 1 - (first + k + 0.5) / (first + tokens)  # presses keep int((first + tokens) * (1 - share))
        ratio = {"compression_ratio": max(share, 0.0)}
        if self.method == "kvzip":  # counts single heads, and drops int(pairs * share)
            return kvpress.KVzipPress(compression_ratio=(tokens - k) / (first + tokens) + 1e-9 * (k < tokens), n_sink=first)
        if self.method == "snapkv":  # its window of 64 is kept whole, which may be more than there is room for
            press: Any = kvpress.SnapKVPress(window_size=max(1, min(64, k // 2)), **ratio)
        elif self.method == "streaming-llm":
            press = kvpress.StreamingLLMPress(n_sink=first, **ratio)
        elif self.method == "expected-attention":
            press = kvpress.ExpectedAttentionPress(n_sink=first, **ratio)
        else:
            press = {"knorm": kvpress.KnormPress, "tova": kvpress.TOVAPress}[self.method](**ratio)
        score = press.score

        def keeping_first(*arguments: Any, **more: Any) -> Any:
            scores = score(*arguments, **more).clone()
            scores[..., :first] = float("inf")
            return scores

        press.score = keeping_first
        return press


def _stacked(caches: tuple[Any, ...], fill: list[int]) -> Any:
    """One cache of several, each with so many states before its own."""
    import torch
    from transformers import DynamicCache

    def joined(tensors: Any) -> Any:
        return torch.cat([torch.nn.functional.pad(x, (0, 0, width, 0)) for x, width in zip(tensors, fill, strict=True)])

    made = DynamicCache()
    for i, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        made.update(joined([layer.keys for layer in layers]), joined([layer.values for layer in layers]), i)
    return made


def _shifted(masked: tuple[Any, ...], fill: list[int]) -> Any:
    """Masked places (texts, heads, states) of one layer of several caches, in the stacked one."""
    import torch

    there = [(row, places) for row, places in enumerate(masked) if places is not None]
    if not there:
        return None
    texts = torch.cat([torch.full_like(places[0], row) for row, places in there])
    states = torch.cat([places[2] + fill[row] for row, places in there])
    return texts, torch.cat([places[1] for _, places in there]), states


class Lingua:
    """LLMLingua with the base as its small model."""

    def __init__(self, method: str, base: str, device: str) -> None:
        import tiktoken
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(base)
        tiktoken.encoding_for_model = lambda name: self.tokenizer  # GPT's, with which it counts for its bill, would be fetched
        from llmlingua import PromptCompressor

        self.compressor = PromptCompressor(model_name=base, device_map=device, model_config={"trust_remote_code": False})
        self.compressor.model = _with_tuples(self.compressor.model)

    def read(self, *, documents: list[str], states: list[int]) -> dict[str, Any]:
        """Shorten documents to about so many tokens."""
        return {"texts": [self._shorten(text, k) for text, k in zip(documents, states, strict=True)]}

    def _shorten(self, text: str, k: int) -> str:
        tokens = len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        # whole steps of at most 200: what is left over for a shorter one would stay as it is (microsoft/LLMLingua, issue 196)
        size = tokens // math.ceil(tokens / 200)
        return str(self.compressor.compress_prompt([text], target_token=k, iterative_size=size)["compressed_prompt"])


def _with_tuples(model: Any) -> Any:
    """A model whose caches are lists of keys and values, as LLMLingua cuts them; transformers has other ones by now."""
    from transformers import DynamicCache

    def forward(input_ids: Any, *, past_key_values: Any = None, **more: Any) -> Any:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(past_key_values or ()):
            cache.update(keys, values, layer)
        response = model(input_ids, past_key_values=cache, **more)
        response.past_key_values = [(layer.keys, layer.values) for layer in cache.layers]
        return response

    return forward


def peak() -> dict[str, Any]:
    """Highest resident bytes of this process (Linux), or of the GPU."""
    import torch

    if torch.cuda.is_available():
        return {"bytes": torch.cuda.max_memory_allocated()}
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            return {"bytes": next((1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM")), None)}
    except OSError:
        return {"bytes": None}


def forget_peak() -> dict[str, Any]:
    """Count the peak from now on, where the system can."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return {}
    try:
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as clear:
            clear.write("5")
    except OSError:
        pass
    return {}


def start(*, method: str, base: str, device: str, threads: int) -> tuple[Any, dict[str, Any]]:
    """Load what a method needs."""
    import torch

    torch.set_num_threads(threads)
    package, _, press = method.partition("-")
    peer: Any = Press(press, base, device) if package == "kvpress" else Lingua(method, base, device)
    packages = ("torch", "transformers", package)
    return peer, {"versions": {"python": platform.python_version(), **{name: version(name) for name in packages}}}


def main() -> None:
    """Answer requests until there are no more."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what libraries print is no answer
        peer: Any = None
        for line in sys.stdin:
            request = json.loads(line)
            do = request.pop("do")
            try:
                if do == "start":
                    peer, answer = start(**request)
                elif do in ("peak", "forget_peak"):
                    answer = {"peak": peak, "forget_peak": forget_peak}[do]()
                else:
                    answer = getattr(peer, do)(**request)
            except Exception as error:  # libraries raise whatever they stumble over
                answer = {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"}
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()

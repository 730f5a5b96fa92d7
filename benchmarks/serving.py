"""Many clients at once against one, and a question on a stored context against the text in the prompt. SmolLM2-135M, CPU.

    python benchmarks/serving.py [BASE]

Clients ask the engine questions over eight contexts, each its next when the last is answered; no answer ends early. The first
token over a stored context includes reading the file; the text in the prompt is read by the same engine, and by transformers
alone. Adapters have random weights. Writes results/benchmark-serving.json.
"""

import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, side_by_side, write_page, write_result

warnings.simplefilter("ignore")

CLIENTS, CONTEXTS, CONTEXT_TOKENS, RATIO, QUESTION_TOKENS, NEW_TOKENS, QUESTIONS = (1, 8, 32), 8, 500, 10, 24, 32, 2
LONG, ROUNDS = 4000, 3


def main() -> None:
    from dodo import Dodo, DodoConfig, LoraSettings
    from dodo.serving.engine import Engine

    base = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    torch.manual_seed(0)
    lora = LoraSettings(targets="all-linear", rank=16)
    dodo = Dodo.from_pretrained(base, config=DodoConfig(encoder=lora, decoder=lora))
    dodo.compressor.base.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in dodo.compressor.adapters.parameters():
            parameter.normal_(std=0.01)
    dodo.stamp()
    text = dodo.document_ids((ROOT / "examples" / "harbour-clock.txt").read_text(encoding="utf-8"))
    ids = text * (LONG // len(text) + 2)
    engine = Engine(dodo)
    try:
        measured = {"clients": _clients(engine, dodo, ids), f"first token, {LONG:,} tokens": _first_token(engine, dodo, ids)}
    finally:
        engine.close()
    path = write_result(
        "benchmark-serving",
        measured,
        settings={
            "base": base,
            "adapters": "random weights, rank 16, all linear layers",
            "dtype": "float32",
            "text": "examples/harbour-clock.txt, repeated",
            "contexts": CONTEXTS,
            "tokens of each": CONTEXT_TOKENS,
            "ratio": RATIO,
            "question tokens": QUESTION_TOKENS,
            "new tokens": NEW_TOKENS,
            "questions of each client": QUESTIONS,
        },
    )
    page = write_page()
    print(page.read_text(encoding="utf-8"))
    print(f"written to {path.relative_to(ROOT)} and {page.relative_to(ROOT)}", file=sys.stderr)


def _clients(engine: Any, dodo: Any, ids: list[int]) -> dict[str, Any]:
    """Tokens of all clients per second, questions' prefill included."""
    from dodo.serving.engine import Request

    documents = [ids[9 * i : 9 * i + CONTEXT_TOKENS] for i in range(CONTEXTS)]
    contexts = [engine.run(partial(dodo.compress_ids, [document], ratio=RATIO)).result() for document in documents]

    def client(number: int) -> None:
        for turn in range(QUESTIONS):
            start = 31 * number + 17 * turn
            request = Request(contexts[number % CONTEXTS], ids[start : start + QUESTION_TOKENS], NEW_TOKENS)
            assert sum(piece.token_id is not None for piece in engine.submit(request)) == NEW_TOKENS

    def together(clients: int) -> None:
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(client, range(clients)))

    seconds = side_by_side({str(n): partial(together, n) for n in CLIENTS}, rounds=ROUNDS)
    rates = {n: n * QUESTIONS * NEW_TOKENS / seconds[str(n)] for n in CLIENTS}
    return {f"{n} at once: tokens/s": rate for n, rate in rates.items()} | {
        f"{n} at once / {CLIENTS[0]}: tokens/s": rates[n] / rates[CLIENTS[0]] for n in CLIENTS[1:]
    }


def _first_token(engine: Any, dodo: Any, ids: list[int]) -> dict[str, Any]:
    from dodo import Nuggets
    from dodo.serving.engine import Request

    document, question = ids[:LONG], ids[:QUESTION_TOKENS]
    whole = torch.tensor([document + question])

    def plainly() -> None:
        with dodo.compressor.adapters.use(None):
            dodo.compressor.base.generate(
                whole, attention_mask=torch.ones_like(whole), max_new_tokens=1, do_sample=False, pad_token_id=0
            )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "context.nuggets"
        engine.run(partial(dodo.compress_ids, [document], ratio=RATIO)).result().save(path, storage="float16")
        seconds = side_by_side(
            {
                "stored": lambda: list(engine.submit(Request(Nuggets.load(path), question, 1))),
                "prompt": lambda: list(engine.submit(Request(None, document + question, 1))),
                "transformers": lambda: engine.run(plainly).result(),
            },
            rounds=ROUNDS,
        )
    return {
        "stored context, s": seconds["stored"],
        "text in the prompt, s": seconds["prompt"],
        "text in the prompt, transformers' generate, s": seconds["transformers"],
        "stored sooner by": seconds["prompt"] / seconds["stored"],
        "stored sooner than transformers by": seconds["transformers"] / seconds["stored"],
    }


if __name__ == "__main__":
    main()

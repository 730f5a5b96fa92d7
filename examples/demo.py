"""The main job on a real text: compress it, rebuild it, question it, beside the same base reading everything.

python examples/demo.py
"""

import sys
import time
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

from rich.console import Console  # noqa: E402 (warnings first: libraries chatter at import)
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402

from dodo import Dodo  # noqa: E402
from dodo.cli.terminal import silence_libraries  # noqa: E402

TEXT = Path(__file__).parent / "harbour-clock.txt"
QUESTIONS = {
    "Who built the clock?": "Lindqvist",
    "In what year was the clock built?": "1887",
    "What is the brass hand moved by?": "float",
    "Who taught physics at the girls' school?": "Aumann",
    "How many steps are there?": "128",
    "On which day is the clock wound?": "Thursday",
}


def main() -> None:
    silence_libraries()
    out = Console(width=min(Console().width, 130))
    progress = Console(stderr=True)
    with progress.status("loading SmolLM2-135M (the first time it is fetched, 93 MB, and converted)"):
        dodo = Dodo.from_pretrained("smollm2-135m")
    text = TEXT.read_text(encoding="utf-8")
    ratios = (5, 10) if dodo.is_trained else (1, 2, 4)
    if not dodo.is_trained:
        out.print("[bold]The adapters are fresh: r = 1 is the base itself; higher ratios show what training is for.[/bold]\n")

    sizes = Table(title=f"{TEXT.name} ({len(text.split())} words) in nuggets, fp32")
    for column in ("ratio", "tokens n", "nuggets k", "states", "bytes held", "of a full cache", "seconds to compress"):
        sizes.add_column(column, justify="right")
    base = Dodo.from_pretrained("smollm2-135m", fresh=True)
    columns = {"base reading everything": base.compress(text, ratio=1)}
    for ratio in ratios:
        start = time.perf_counter()
        nuggets = dodo.compress(text, ratio=ratio)
        seconds = time.perf_counter() - start
        share = nuggets.nbytes / nuggets.full_cache_nbytes
        n, k, states = (int(x) for x in (nuggets.lengths, nuggets.k, nuggets.states))
        sizes.add_row(f"{ratio}", f"{n}", f"{k}", f"{states}", f"{nuggets.nbytes:,}", f"{share:.1%}", f"{seconds:.2f}")
        columns[f"r = {ratio}"] = nuggets
    out.print(sizes)

    out.print("\n[bold]Answers[/bold], greedy, at most 24 tokens; ✓ where the expected word is in it")
    right = dict.fromkeys(columns, 0)
    for question, expected in QUESTIONS.items():
        out.print(f"\n{question} [dim]({expected})[/dim]")
        for name, nuggets in columns.items():
            with progress.status("asking"):
                answer = (base if name.startswith("base") else dodo).answer(nuggets, question, max_new_tokens=24).strip()
            hit = expected.lower() in answer.lower()
            right[name] += hit
            out.print(f"  {name:24}{'✓' if hit else ' '} {escape(' '.join(answer.split()))}", highlight=False)
    out.print("\nRight: " + ", ".join(f"{name} {count} of {len(QUESTIONS)}" for name, count in right.items()))

    first = text.split("\n\n")[1]
    out.print("\n[bold]The text's second paragraph[/bold]\n" + first)
    for ratio in ratios:
        with progress.status(f"rebuilding at r = {ratio}"):
            rebuilt = dodo.reconstruct(dodo.compress(first, ratio=ratio, use="text"))
        out.print(f"\n[bold]Rebuilt from nuggets at r = {ratio}[/bold]\n" + escape(rebuilt))


if __name__ == "__main__":
    sys.exit(main())

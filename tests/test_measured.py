"""The tables that README.md and docs/measured.md show are those of the records in results/, to the digits shown."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README, MEASURED = ROOT / "README.md", ROOT / "docs" / "measured.md"
CARD = ROOT / "src" / "dodo" / "weights" / "smollm2-135m" / "README.md"
VALUES = {
    "BLEU": ("bleu", 1),
    "tokens right, %": ("token accuracy", 100),
    "perplexity": ("perplexity", 1),
    "numbers back, %": ("numbers rebuilt", 100),
    "names back, %": ("names rebuilt", 100),
}
METHODS = {
    "Dodo, what ships": "dodo",
    "its adapters, every r-th token": "stride",
    "its adapters, random tokens": "random",
    "KVzip, untrained": "kvpress-kvzip",
    "LMSumm: a summary by the base itself": "lmsumm",
    "expected attention": "kvpress-expected-attention",
    "StreamingLLM": "kvpress-streaming-llm",
    "the text's last part": "truncate",
    "SnapKV": "kvpress-snapkv",
    "key norms": "kvpress-knorm",
    "TOVA": "kvpress-tova",
    "KVzip": "kvpress-kvzip",
    "LLMLingua": "llmlingua",
    "ICAE, trained here on 78 thousand tokens": "icae",
    "the base with the whole text": "full",
    "the base without it": "nodoc",
    "Dodo": "dodo",
}
LANGUAGE_MODELS = {
    "Dodo, half of the states whole tokens (the paper's split)": "dodo",
    "Dodo, 15/16 whole": "dodo-whole",
    "Dodo, 31/32 whole": "dodo-whole-0.96875",
    "Compressive, trained alike, half": "compressive",
    "Compressive, trained alike, 15/16": "compressive-whole",
    "Compressive, trained alike, 31/32": "compressive-whole-0.96875",
    "Full, the base as it is": "full",
    "Full, trained alike": "theta",
}


def table(page: Path, corner: str, column: str) -> list[tuple[str, str, str]]:
    """Cells of the table whose heading begins with `corner` and has `column`: row, column, content. Empty ones are left out, and
    the mark of earlier adapters."""
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip().removesuffix(" †") for cell in line.strip("|").split("|")] if line.startswith("|") else [] for line in lines
    ]
    (start,) = (i for i, row in enumerate(rows) if row and row[0] == corner and column in row)
    end = rows.index([], start)
    return [
        (row[0], name, cell) for row in rows[start + 2 : end] for name, cell in zip(rows[start][1:], row[1:], strict=True) if cell
    ]


def record(name: str) -> dict[str, Any]:
    """A record of what was measured, by its name without the base's."""
    task, _, rest = name.partition("/")
    found: dict[str, Any] = json.loads((ROOT / "results" / f"{task}-smollm2-135m-{rest}.json").read_text(encoding="utf-8"))
    return found


def equal(shown: str, value: float) -> bool:
    """Whether a number is what is shown, rounded to its digits."""
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.5 * 10**-digits + 1e-9


def test_what_ships_rebuilds_and_answers_as_the_readme_says() -> None:
    cells = table(README, "rebuilt, BLEU", "r = 20")
    assert len(cells) == 14
    for row, column, shown in cells:
        ratio = column.replace("r = ", "r")
        if row.startswith("SQuAD"):
            found = record(f"squad/dodo-{ratio}")
            value = 100 * found["measured"]["all"]["accuracy"]
        else:
            found = record(f"autoencoding/dodo-{ratio}")
            value = found["measured"][row]["bleu"]
        assert equal(shown, value), (row, column, shown, value)
        assert found["settings"]["adapter fingerprint"] in CARD.read_text(encoding="utf-8"), (row, column)


def test_the_scorer_and_the_control_are_as_their_records() -> None:
    cells = table(MEASURED, "", "r = 20")
    assert len(cells) > 70
    for row, column, shown in cells:
        ratio, (what, _, texts) = column.replace("r = ", "r"), row.partition(", ")
        for method, one in zip(("dodo", "average-control-stride"), shown.split(" / "), strict=True):
            if what == "SQuAD":
                value = 100 * record(f"squad/{method}-{ratio}")["measured"]["all"]["accuracy"]
            else:
                name, scale = VALUES[row.rpartition(", ")[0]]
                group = " ".join(texts.removeprefix("%, ").split()[:2])
                found = record(f"autoencoding{'-cnn' if 'CNN' in row else ''}/{method}-{ratio}")
                value = scale * found["measured"][group][name]
            assert equal(one, value), (row, column, one, value)


def test_answers_of_peers_and_baselines_are_as_their_records() -> None:
    cells = table(MEASURED, "", "n")
    assert len(cells) > 30
    for (row, column, shown), (_, _, n) in zip(cells[::2], cells[1::2], strict=True):
        method = METHODS[row]
        found = record(f"squad/{method}" + ("" if method in ("full", "nodoc") else f"-{column.replace('r = ', 'r')}"))
        assert equal(shown, 100 * found["measured"]["all"]["accuracy"]), (row, column, shown)
        assert int(n) == found["measured"]["all"]["n"], (row, column)


def test_costs_are_as_their_records() -> None:
    cells = table(MEASURED, "tokens", "8,000")
    assert len(cells) > 20
    for row, column, shown in cells:
        found = record(f"efficiency-float32/{METHODS[row]}-r10")["measured"][f"{column} tokens"]
        assert equal(shown, found["encode, s"] / found["whole: read, s"]), (row, column, shown)


def test_perplexities_are_as_their_records() -> None:
    cells = table(MEASURED, "", "WikiText 64")
    assert len(cells) == 48
    for i, (row, column, shown) in enumerate(cells):
        data = "wikitext" if i % 6 < 3 else "heldout"
        found = record(f"perplexity-{data}/{LANGUAGE_MODELS[row]}")["measured"][f"{column.split()[-1]} states"]
        assert equal(shown, found["subword perplexity"]), (row, column, shown)


@pytest.mark.parametrize("other", [0.1, -0.1])
def test_a_number_that_is_not_the_records_is_seen(other: float) -> None:
    assert equal("34.3", 34.33)
    assert not equal("34.3", 34.33 + other)

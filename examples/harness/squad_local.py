"""The metric of squad_local.yaml."""

from dodo.evaluation.scoring import contains_answer


def contains(doc: dict, results: list[str]) -> dict[str, float]:
    """1 if the text written has one of the answers in it, after the paper's normalisation (Appendix E)."""
    return {"contains": float(contains_answer(results[0], doc["answers"]))}

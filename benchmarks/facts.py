"""Texts of any length and questions about them, the same for the same seed: what a server's contexts are made of."""

import random
from dataclasses import dataclass

__all__ = ["Document", "documents", "long_text"]

_FIRST = [
    "Marta",
    "Pieter",
    "Ida",
    "Helene",
    "Jonas",
    "Anna",
    "Willem",
    "Greta",
    "Tobias",
    "Clara",
    "Henrik",
    "Lotte",
    "Aaron",
    "Maud",
    "Simon",
    "Vera",
]
_LAST = [
    "Lindqvist",
    "Aumann",
    "Brandt",
    "Voss",
    "Okafor",
    "Harrow",
    "Tanaka",
    "Moreau",
    "Castell",
    "Dunne",
    "Ferrer",
    "Novak",
    "Reyes",
    "Sorley",
    "Thorne",
    "Weil",
]
_TRADES = [
    "cooper",
    "glazier",
    "miller",
    "printer",
    "baker",
    "surveyor",
    "teacher",
    "sailmaker",
    "weaver",
    "smith",
    "doctor",
    "carpenter",
]
_PLACES = [
    "Veldhaven",
    "Ostrand",
    "Grootmeer",
    "Marrow",
    "Kessel",
    "Linfirth",
    "Tarn",
    "Averby",
    "Dunmore",
    "Salthouse",
    "Holm",
    "Brackwater",
]
_THINGS = [
    "a mill",
    "an orchard",
    "a ferry",
    "a library",
    "a lighthouse",
    "a school",
    "a bakery",
    "a brass foundry",
    "an observatory",
    "a well",
]


@dataclass(frozen=True)
class Document:
    """A text, and questions that it answers."""

    text: str
    questions: tuple[str, ...]


def documents(count: int, *, facts: int = 12) -> list[Document]:
    """So many different texts, of so many sentences each."""
    return [_document(random.Random(seed), facts) for seed in range(count)]


def long_text(facts: int) -> str:
    """A text of so many sentences."""
    return _document(random.Random(-1), facts).text


def _document(chance: random.Random, facts: int) -> Document:
    sentences, questions = [], []
    for _ in range(facts):
        name = f"{chance.choice(_FIRST)} {chance.choice(_LAST)}"
        thing, place = chance.choice(_THINGS), chance.choice(_PLACES)
        year, crowns = chance.randrange(1700, 1990), chance.randrange(20, 9000)
        trade, other = chance.choice(_TRADES), chance.choice(_PLACES)
        sentences.append(
            f"In {year} {name}, a {trade} from {other}, built {thing} in {place} that cost {crowns} crowns "
            f"and stood for {chance.randrange(3, 90)} years."
        )
        questions.append(f"What did {name} build?")
    return Document(" ".join(sentences), tuple(questions))

"""Laws of the scores."""

import math

import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer
from text_to_num import alpha2digit

from dodo.errors import InputError
from dodo.evaluation.scoring import (
    check_installed,
    contains_answer,
    corpus_bleu,
    normalized,
    perplexity,
    rouge,
    sentence_bleu,
    share_error,
    share_rebuilt,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two", "2"),
        ("  Twenty-one dodos, at most!  ", "21 dodos at most"),
        ("in one hundred and five boxes", "in 105 boxes"),
        ("The U.S.A. -- 1,000", "the u s a 1 000"),
        ("snake_case", "snake case"),
        ("", ""),
    ],
)
def test_normalisation_is_that_of_appendix_e(text: str, expected: str) -> None:
    assert normalized(text) == expected


def test_an_answer_counts_if_one_of_the_right_ones_is_contained() -> None:
    assert contains_answer("It was built in the year Two Thousand, by hand.", ["1999", "2000"])
    assert contains_answer("the Dutch sailors", ["Dutch"])
    assert not contains_answer("the Dutch", ["Dutch sailors"])
    assert not contains_answer("anything", ["..."])  # nothing is left of it


def test_bleu_is_100_for_the_same_texts_and_its_error_shrinks_with_n() -> None:
    texts = [f"the {i} dodo of Mauritius was a bird that could not fly at all" for i in range(40)]
    assert corpus_bleu(texts, texts)[0] == pytest.approx(100)
    assert corpus_bleu(texts, texts)[1] == pytest.approx(0, abs=1e-6)
    half = [t if i % 2 else "something else entirely was said here" for i, t in enumerate(texts)]
    few, many = corpus_bleu(half[:6], texts[:6]), corpus_bleu(half, texts)
    assert 0 < many[0] < 100
    assert corpus_bleu(half[:1], texts[:1])[1] is None
    assert few[1] > 0


SAMPLE = [
    ("the cat sat on mat", "the cat sat on the mat"),
    ("On 3 May the crew met John Brown, in Port Louis.", "On 3 May 1867 the crew met John Smith in Port Louis."),
    ("A bird that could not fly.", "The dodo was a bird that could not fly at all."),
    ("", "nothing came back of this"),
]
"""Made and wanted."""


def test_bleu_of_a_text_is_that_of_a_count_by_hand() -> None:
    """5 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 fours; 5 words where 6 are wanted."""
    assert sentence_bleu(*SAMPLE[0]) == pytest.approx(100 * math.exp(1 - 6 / 5) * (1 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert corpus_bleu([SAMPLE[0][0]], [SAMPLE[0][1]])[0] == pytest.approx(57.8930, abs=1e-3)


def test_scores_equal_the_libraries_own_on_a_fixed_sample() -> None:
    made, wanted = zip(*SAMPLE, strict=True)
    assert corpus_bleu(made, wanted)[0] == sacrebleu.BLEU(tokenize="13a").corpus_score(made, [wanted]).score
    by_sentence, by_rouge = (
        sacrebleu.BLEU(tokenize="13a", effective_order=True),
        RougeScorer(["rouge1", "rouge2", "rougeL"], True),
    )
    for one, two in SAMPLE:
        assert sentence_bleu(one, two) == by_sentence.sentence_score(one, [two]).score
        assert rouge(one, two) == {name: 100 * found.fmeasure for name, found in by_rouge.score(two, one).items()}
    for text in ("twenty one dodos", "two thousand and five", "Chapter Three", "no numbers"):
        assert normalized(text) == alpha2digit(text.lower(), "en", 0)


def test_exact_things_are_counted_as_often_as_they_occur() -> None:
    wanted = ["On 3 May 1867 the crew met John Smith in Port Louis, with 12 men and 12 dogs; it was 3.5 miles."]
    made = ["On 3 May 1867 the crew met John Brown in Port Louis, with 12 men and a dog; it was 4 miles."]
    found = share_rebuilt(made, wanted)
    assert found["numbers"] == (pytest.approx(3 / 5), 5)  # 3, 1867, 12, 12, 3.5
    assert found["names"] == (pytest.approx(2 / 3), 3)  # May, John Smith, Port Louis
    assert found["dates"] == (pytest.approx(1), 1)
    assert share_rebuilt(["a"], ["b"])["numbers"] == (None, 0)


@pytest.mark.parametrize(
    ("text", "names"),
    [("ein Haus in München", 2), ("el nombre de José García aquí", 1), ("что в Москве стоит", 1), ("nell'anno, a Roma", 1)],
)
def test_names_have_letters_of_any_alphabet(text: str, names: int) -> None:
    assert share_rebuilt([text], [text])["names"] == (1.0, names)


def test_the_error_of_a_share() -> None:
    assert share_error(0.5, 100) == pytest.approx(0.05)
    assert share_error(0.5, 0) is None


def test_rouge_is_that_of_a_count_by_hand():
    """Stemmed: the, dodo, ran, away against the, dodo, run, fast; three words of the wanted five, in order."""
    found = rouge("The dodos ran away", "the dodo ran very fast")
    assert found["rouge1"] == pytest.approx(100 * 2 * 3 / (4 + 5))
    assert found["rouge2"] == pytest.approx(100 * 2 * 2 / (3 + 4))
    assert found["rougeL"] == pytest.approx(100 * 2 * 3 / (4 + 5))


def test_the_perplexitys_standard_error_is_the_jackknife_of_texts_left_out_in_turn() -> None:
    nats, counts = [3.0, 8.0, 1.0, 0.0], [2, 5, 3, 0]
    value, error = perplexity(nats, counts)
    assert value == pytest.approx(math.exp(1.2))
    without = [math.exp(9 / 8), math.exp(4 / 5), math.exp(11 / 7)]
    mean = sum(without) / 3
    assert error == pytest.approx((2 / 3 * sum((x - mean) ** 2 for x in without)) ** 0.5)


def test_a_missing_package_is_named_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "rouge_score" else object())
    with pytest.raises(InputError, match=r"evaluating needs rouge_score: pip install 'dodo-lm\[evaluate\]'"):
        check_installed()

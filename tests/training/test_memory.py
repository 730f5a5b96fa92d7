"""Training of the baseline with memory tokens, by the trainer of all others."""

from pathlib import Path

import pytest
import torch

from dodo import Dodo
from dodo.data.batches import Batch
from dodo.errors import InputError
from dodo.icae import Icae
from dodo.memory import MemoryTokens
from dodo.training.lessons import embedding_loss, learn_embeddings
from dodo.training.objectives import batch_loss
from dodo.training.recipe import load_recipe
from dodo.training.run import load_for_training, train
from tests.conftest import stir, tokens
from tests.training.test_training import recipe_file  # noqa: F401 (a fixture)

ICAE = ["model=icae", "memory={tokens: 8, fixed: false}"]


def test_the_loss_of_questions_is_that_of_their_answers_behind_their_documents_memory(pair) -> None:
    compressor = stir(pair().compressor)
    compressor.memory = MemoryTokens.fresh(compressor.base, 5, fixed=False)
    documents, decoder = tokens(2, 9), tokens(3, 6, seed=5)
    real, rows = torch.ones(2, 9).bool(), torch.tensor([0, 0, 1])
    real[0, 6:] = False
    targets = torch.full((3, 6), -100)
    targets[:, 2:] = tokens(3, 4, seed=6)
    batch = Batch("question", 2.0, documents, real, decoder, torch.ones_like(decoder).bool(), targets, rows=rows)
    found = batch_loss(compressor, batch, "memory")
    model, nats = Icae(compressor), 0.0
    for question, (row, n, slots) in enumerate([(0, 6, 3), (0, 6, 3), (1, 9, 5)]):
        states = model.decode(model.encode(documents[row : row + 1, :n], slots=slots), decoder[question : question + 1])
        logits = compressor.base.get_output_embeddings()(states[0, 2:])
        nats += float(torch.nn.functional.cross_entropy(logits, targets[question, 2:], reduction="sum").detach())
    assert (found.tokens, found.sum) == (12, pytest.approx(nats, rel=1e-4))
    assert float(found.total.detach()) == pytest.approx(nats / 12, rel=1e-4)


def test_a_recipe_trains_it_and_its_adapters_load(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    first = train(
        load_recipe(recipe_file, [*ICAE, "running.steps=1", "running.validate_every=1"]), tmp_path / "first", progress=False
    )
    settings = ["running.steps=40", "running.validate_every=40", "running.reconstruct=2"]
    last = train(load_recipe(recipe_file, [*ICAE, *settings]), tmp_path / "run", progress=False)
    assert first.loss is not None
    assert last.loss is not None
    assert last.loss < 0.9 * first.loss
    names = {line.split(",")[1] for line in (tmp_path / "run" / "validation.csv").read_text().splitlines()}
    assert {"loss/n12/r3/memory", "bleu/n12/r3/memory"} <= names
    dodo = Dodo.from_pretrained(tmp_path / "run" / "last")
    assert dodo.compressor.memory is not None
    assert (len(dodo.compressor.memory), dodo.compressor.memory.fixed) == (8, False)
    assert dodo.thresholds is None
    state = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["state_dict"]
    trained = state["compressor.memory.embeddings"]
    torch.testing.assert_close(dodo.compressor.memory.embeddings.detach(), trained.half().float(), atol=0, rtol=0)
    assert not any(value.any() for name, value in state.items() if "lora_B.theta" in name)


@pytest.mark.parametrize("mixture", [{"recall": 1.0}, {"continuation": 1.0}])
def test_a_stopped_run_goes_on_to_the_same_weights(recipe_file: Path, tmp_path: Path, mixture: dict[str, float]) -> None:  # noqa: F811
    context = ["mixture.context={low: 8, mode: 12, high: 16}", "mixture.following=6"]
    settings = [*ICAE, *context, *(f"mixture.{name}={weight}" for name, weight in mixture.items())]
    train(load_recipe(recipe_file, settings), tmp_path / "whole", progress=False)
    train(load_recipe(recipe_file, [*settings, "running.steps=4"]), tmp_path / "parts", progress=False)
    record = tmp_path / "parts" / "recipe.yaml"
    record.write_text((tmp_path / "whole" / "recipe.yaml").read_text())  # as if it had been stopped on its way to 8
    train(load_recipe(recipe_file, settings), tmp_path / "parts", resume=True, progress=False)
    states = [torch.load(tmp_path / name / "last.ckpt", weights_only=True)["state_dict"] for name in ("whole", "parts")]
    assert "compressor.memory.embeddings" in states[0]
    assert states[0].keys() == states[1].keys()
    for name, weights in states[0].items():
        torch.testing.assert_close(weights, states[1][name], atol=0, rtol=0, msg=name)


def test_memory_tokens_are_those_of_the_start_if_it_has_any(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    fresh = load_for_training(load_recipe(recipe_file, ICAE)).compressor.memory
    assert fresh is not None
    train(load_recipe(recipe_file, [*ICAE, "running.steps=2"]), tmp_path / "icae", progress=False)
    train(load_recipe(recipe_file, ["running.steps=1"]), tmp_path / "dodo", progress=False)

    def started(run: str, *settings: str) -> MemoryTokens | None:
        return load_for_training(load_recipe(recipe_file, [f"start={tmp_path / run / 'last'}", *settings])).compressor.memory

    before, after = Dodo.from_pretrained(tmp_path / "icae" / "last").compressor.memory, started("icae", *ICAE)
    assert before is not None
    assert after is not None
    assert torch.equal(after.embeddings, before.embeddings)
    for from_dodo in (started("dodo", *ICAE), started("icae", *ICAE, "start_with=scorer")):
        assert from_dodo is not None
        assert torch.equal(from_dodo.embeddings, fresh.embeddings)
    assert started("icae") is None
    with pytest.raises(InputError, match=r"has 8 memory tokens, fixed: False, aligned: False; the recipe wants 9"):
        started("icae", *ICAE, "memory.tokens=9")


def test_a_lesson_teaches_phi_and_memory_tokens_to_give_embeddings_back(pair) -> None:
    compressor = stir(pair().compressor)
    compressor.memory = MemoryTokens.fresh(compressor.base, 8, fixed=False, aligned=True)
    before = {name: parameter.detach().clone() for name, parameter in compressor.named_parameters()}
    documents, real = tokens(2, 9), torch.ones(2, 9).bool()
    real[0, 6:] = False
    batch = Batch("autoencoding", 1.0, documents, real, documents, real, documents)
    with torch.no_grad():
        states = Icae(compressor).encode(documents[:, :8], real[:, :8], slots=torch.tensor([6, 8])).states
        wanted = compressor.base.get_input_embeddings()(documents)
        cosines = [
            torch.cosine_similarity(states[row, i], wanted[row, i], dim=0) for row, n in enumerate((6, 8)) for i in range(n)
        ]
    loss = float(embedding_loss(compressor, batch).detach())
    assert loss == pytest.approx(1 - float(torch.stack(cosines).mean()), rel=1e-4)
    learn_embeddings(compressor, [batch] * 20, lr=1e-2)
    assert float(embedding_loss(compressor, batch).detach()) < 0.8 * loss
    changed = {name for name, parameter in compressor.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if ".phi." in name} | {"memory.embeddings"}


def test_a_recipe_may_have_the_lesson(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    aligned = ["model=icae", "running.steps=1", "memory={tokens: 8, fixed: false, aligned: true, lesson: 3}"]
    train(load_recipe(recipe_file, aligned), tmp_path / "taught", progress=False)
    train(load_recipe(recipe_file, [*aligned, "memory.lesson=0"]), tmp_path / "untaught", progress=False)
    taught, untaught = (Dodo.from_pretrained(tmp_path / name / "last").compressor.memory for name in ("taught", "untaught"))
    assert taught is not None
    assert untaught is not None
    assert taught.aligned
    assert not torch.allclose(taught.embeddings, untaught.embeddings)
    with pytest.raises(InputError, match=r"lesson needs memory.aligned"):
        load_recipe(recipe_file, [*aligned, "memory.aligned=false"])
    with pytest.raises(InputError, match=r"lesson is for model: icae"):
        load_recipe(recipe_file, [*aligned, "model=dodo"])


@pytest.mark.parametrize(
    "setting", ["mixture.distillation=1.0", "mixture.autoregressive=1.0", "selection.warm_start=3", "selection.cost_start=3"]
)
def test_what_it_can_not_be_is_refused(recipe_file: Path, setting: str) -> None:  # noqa: F811
    with pytest.raises(InputError, match="no language model and has no scorer"):
        load_recipe(recipe_file, [*ICAE, setting])
    with pytest.raises(InputError, match="at least 1"):
        load_recipe(recipe_file, ["memory.tokens=0"])

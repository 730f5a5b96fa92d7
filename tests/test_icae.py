"""Laws of the baseline with memory tokens (Section 4.1)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dodo import Dodo
from dodo.adapters import PHI
from dodo.architecture import backbone, layer_windows
from dodo.compressor import Compressor
from dodo.errors import InputError, WindowError
from dodo.icae import Icae, last_of_part
from dodo.memory import MemoryTokens
from tests.conftest import FAMILIES, Pair, small_config, stir, tokens
from tests.standins.models import save_base

Maker = Callable[..., Pair]
SLOTS = 6


def close(a: Tensor, b: Tensor) -> None:
    """fp32 through a few layers of large random weights: sums in another order differ by some 1e-5."""
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def icae(compressor: Compressor, *, fixed: bool = False, aligned: bool = False) -> Icae:
    stir(compressor)
    compressor.memory = MemoryTokens.fresh(compressor.base, SLOTS, fixed=fixed, aligned=aligned)
    return Icae(compressor)


def embedded(model: Icae, ids: Tensor) -> Tensor:
    return model.compressor.base.get_input_embeddings()(ids)


def literal_memory(model: Icae, ids: Tensor, slots: int) -> Tensor:
    """One text: its embeddings, the memory tokens' behind them, the base with phi, what the last layer gives for those."""
    inputs = torch.cat([embedded(model, ids), model.tokens.embeddings[:slots]])[None]
    with model.compressor.adapters.use(PHI):
        whole = model.compressor.base(inputs_embeds=inputs, output_hidden_states=True)
    return whole.hidden_states[-1][0, len(ids) :]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_memory_is_what_the_last_layer_gives_for_tokens_behind_the_text(pair: Maker, family: str) -> None:
    model = icae(pair(family).compressor)
    ids = tokens(2, 9)
    memory = model.encode(ids, slots=4)
    for row in range(2):
        close(memory.states[row], literal_memory(model, ids[row], 4))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_aligned_tokens_stand_along_the_text_see_all_of_it_and_come_out_as_long_as_its_embeddings(
    pair: Maker, family: str
) -> None:
    model = icae(pair(family).compressor, aligned=True)
    ids = tokens(1, 9)
    inputs = torch.cat([embedded(model, ids[0]), model.tokens.embeddings[:4]])[None]
    config, distance = model.compressor.base.config, torch.arange(13)[:, None] - torch.arange(13)
    windows, kinds = layer_windows(config), getattr(config, "layer_types", None)

    def behind(window: int | None) -> Tensor:
        seen = (distance >= 0) & (distance < (window or 13))
        return torch.zeros(1, 1, 13, 13).masked_fill(~seen, torch.finfo(torch.float32).min)

    with model.compressor.adapters.use(PHI):
        hidden = backbone(
            model.compressor.base
        )(
            inputs_embeds=inputs,
            position_ids=torch.tensor([[*range(9), 2, 4, 6, 8]]),  # parts of 3, 2, 2 and 2 tokens
            attention_mask={kind: behind(windows[kinds.index(kind)]) for kind in kinds} if kinds else behind(windows[0]),
        ).last_hidden_state[0, 9:]
    rms = [each.square().mean(-1).mean().sqrt() for each in (embedded(model, ids[0]), hidden)]
    assert rms[0] != pytest.approx(rms[1])
    found = model.encode(ids, slots=4).states[0]
    close(found, hidden / hidden.square().mean(-1, keepdim=True).sqrt() * rms[0])


def test_parts_end_at_the_texts_last_token_and_are_of_like_length() -> None:
    for n, k in [(9, 4), (9, 9), (9, 1), (2, 6), (64, 13)]:
        ends = last_of_part(torch.arange(k), torch.tensor(n), torch.tensor(k))
        sizes = ends.diff(prepend=torch.tensor([-1]))
        assert ends[-1] == n - 1
        assert int(sizes[1:].max() - sizes[1:].min()) <= 1 if k > 1 else True
        assert (ends >= 0).all()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_decoder_is_the_plain_base_that_reads_memory_as_embeddings(pair: Maker, family: str) -> None:
    made = pair(family)
    model = icae(made.compressor)
    memory, ids = model.encode(tokens(2, 9), slots=4), tokens(2, 5, seed=8)
    soft = model.compressor.soft_token.expand(2, 1, -1)
    inputs = torch.cat([memory.states, soft, embedded(model, ids)], dim=1)
    states = backbone(made.base)(inputs_embeds=inputs).last_hidden_state
    close(model.decode(memory, ids, soft_token=True), states[:, 4:])
    states = backbone(made.base)(inputs_embeds=torch.cat([memory.states, embedded(model, ids)], dim=1)).last_hidden_state
    close(model.decode(memory, ids), states[:, 4:])


def rows_of(ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    mask = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, 0), mask


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_texts_of_unequal_lengths_and_slots_are_read_and_decoded_as_alone(pair: Maker, family: str, aligned: bool) -> None:
    model = icae(pair(family).compressor, aligned=aligned)
    lengths, slots, behind = [12, 5, 9], [2, 6, 3], [1, 7, 4]
    ids, mask = rows_of(tokens(3, 12), lengths)
    after, after_mask = rows_of(tokens(3, 7, seed=8), behind)
    memory = model.encode(ids, mask, slots=torch.tensor(slots))
    states = model.decode(memory, after, after_mask, soft_token=True)
    prompts = [row[real].tolist() for row, real in zip(after, after_mask, strict=True)]
    new = model.generate_ids(memory, prompts, max_new_tokens=6)
    rebuilt = model.generate_ids(memory, None, max_new_tokens=6)
    for i, (n, k, m) in enumerate(zip(lengths, slots, behind, strict=True)):
        alone = model.encode(ids[i : i + 1, :n], slots=k)
        close(memory.states[i, :k], alone.states[0])
        assert not memory.states[i, k:].any()
        close(states[i, : m + 1], model.decode(alone, after[i : i + 1, :m], soft_token=True)[0])
        assert new[i] == model.generate_ids(alone, prompts[i : i + 1], max_new_tokens=6)[0]
        assert rebuilt[i] == model.generate_ids(alone, None, max_new_tokens=6)[0]


@torch.no_grad()
def test_generation_steps_are_those_of_full_forward_passes(pair: Maker) -> None:
    model = icae(pair().compressor)
    model.compressor.base.generation_config.eos_token_id = None
    memory, prompt = model.encode(tokens(1, 9), slots=4), [5, 8, 13]
    ids = list(prompt)
    for _ in range(5):
        state = model.decode(memory, torch.tensor([ids]))[:, -1]
        ids.append(int(model.compressor.base.get_output_embeddings()(state).argmax()))
    assert model.generate_ids(memory, [prompt], max_new_tokens=5) == [ids[3:]]


def test_a_step_changes_memory_tokens_soft_token_and_phi_alone(pair: Maker) -> None:
    model = icae(pair().compressor)
    compressor = model.compressor
    before = {name: parameter.detach().clone() for name, parameter in compressor.named_parameters()}
    optimizer = torch.optim.SGD([p for p in compressor.parameters() if p.requires_grad], lr=0.1)
    memory = model.encode(tokens(2, 9), slots=SLOTS)
    model.decode(memory, tokens(2, 5, seed=8), soft_token=True).sum().backward()
    optimizer.step()
    changed = {name for name, parameter in compressor.named_parameters() if not torch.equal(parameter, before[name])}
    phi = {name for name in before if ".phi." in name}
    assert changed == phi | {"memory.embeddings", "soft_token"}


@pytest.mark.parametrize(
    ("fixed", "keep_first", "wanted"), [(False, False, [4, 1, 6]), (False, True, [3, 1, 6]), (True, True, [6, 6, 6])]
)
def test_slots_are_as_many_as_nuggets_or_all(pair: Maker, fixed: bool, keep_first: bool, wanted: list[int]) -> None:
    model = icae(pair(keep_first=keep_first).compressor, fixed=fixed)
    _, mask = rows_of(tokens(3, 40), [10, 1, 40])
    assert model.slots(mask, ratio=3).tolist() == wanted


def test_fresh_memory_tokens_depend_on_the_seed_alone(pair: Maker) -> None:
    base = pair().base
    first, again, other = (MemoryTokens.fresh(base, 3, fixed=True, seed=seed).embeddings for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def saved(folder: Path, **kind: bool) -> Dodo:
    save_base(folder / "base")
    dodo = Dodo.from_pretrained(folder / "base", config=small_config(trained_ratios=(2.0, 9.0)))
    icae(dodo.compressor, **kind)
    dodo.stamp()
    dodo.save_pretrained(folder / "saved")
    return dodo


@pytest.mark.parametrize(("fixed", "aligned"), [(False, False), (True, False), (False, True)])
def test_memory_tokens_survive_saving(tmp_path: Path, fixed: bool, aligned: bool) -> None:
    dodo = saved(tmp_path, fixed=fixed, aligned=aligned)
    loaded = Dodo.from_pretrained(tmp_path / "saved")
    assert loaded.compressor.memory is not None
    assert (loaded.compressor.memory.fixed, loaded.compressor.memory.aligned) == (fixed, aligned)
    assert loaded.fingerprint == dodo.fingerprint
    ids = tokens(2, 9)
    with torch.no_grad():
        memories = [Icae(each.compressor).encode(ids, slots=4) for each in (dodo, loaded)]
    torch.testing.assert_close(memories[0].states, memories[1].states, atol=0, rtol=0)


def test_adapters_without_memory_tokens_are_as_they_were(tmp_path: Path) -> None:
    dodo = saved(tmp_path)
    with_memory = dodo.fingerprint
    dodo.compressor.memory = None
    dodo.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "memory.safetensors").exists()
    loaded = Dodo.from_pretrained(tmp_path / "saved")
    assert loaded.fingerprint != with_memory
    with pytest.raises(InputError, match=r"no memory tokens \(memory.safetensors\).*recipes/smollm2-135m-icae.yaml trains"):
        Icae(loaded.compressor)


def test_damaged_memory_tokens_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "saved" / "memory.safetensors"
    whole = load_file(path)["memory"]
    for tensor, metadata in ((whole[:, 1:], {"fixed": "true"}), (whole, {"fixed": "perhaps"}), (whole, None)):
        save_file({"memory": tensor.contiguous()}, path, metadata)
        with pytest.raises(InputError, match="memory.safetensors does not fit"):
            Dodo.from_pretrained(tmp_path / "saved")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="memory.safetensors is damaged"):
        Dodo.from_pretrained(tmp_path / "saved")


def test_what_can_not_be_is_refused(pair: Maker) -> None:
    model = icae(pair().compressor)
    with pytest.raises(InputError, match="1 to 6"):
        model.encode(tokens(1, 9), slots=SLOTS + 1)
    with pytest.raises(InputError, match="no tokens"):
        model.encode(tokens(2, 9), torch.zeros(2, 9), slots=2)
    with pytest.raises(WindowError, match="257 positions"):
        model.encode(tokens(1, 255), slots=2)
    memory = model.encode(tokens(2, 9), slots=2)
    with pytest.raises(WindowError, match="257 positions"):
        model.generate_ids(memory, [[4], [5]], max_new_tokens=254)
    with pytest.raises(InputError, match="1 rows of tokens, but memory of 2 texts"):
        model.generate_ids(memory, [[4]], max_new_tokens=2)
    with pytest.raises(InputError, match="prompt is empty"):
        model.generate_ids(memory, [[4], []], max_new_tokens=2)
    with pytest.raises(InputError, match="at least 1"):
        MemoryTokens.fresh(model.compressor.base, 0, fixed=True)

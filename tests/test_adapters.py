"""Laws of the two adapters."""

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dodo.adapters import PHI, THETA, Adapters
from dodo.compressor import Compressor
from dodo.config import LoraSettings
from dodo.errors import InputError
from dodo.training.fused import fused_lora
from tests.conftest import FAMILIES, Pair, small_config, stir, tiny_model, tokens

Maker = Callable[..., Pair]


def _loss(compressor: Compressor, ids: Tensor) -> Tensor:
    made = compressor.encode(ids[:, :20], ratio=3)
    logits = compressor.decode(made, ids[:, 20:], soft_token=True).float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 20:].flatten())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["qkv", "all-linear"])
def test_one_step_changes_both_adapters_the_scorer_and_the_soft_token_but_not_the_base(
    pair: Maker, family: str, targets: str
) -> None:
    lora = LoraSettings(rank=2, targets=targets)  # type: ignore[arg-type]
    compressor = stir(pair(family, encoder=lora, decoder=lora).compressor)
    before = {name: p.detach().clone() for name, p in compressor.named_parameters()}
    _loss(compressor, tokens(2, 30)).backward()
    with torch.no_grad():
        for parameter in compressor.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    changed = {name for name, p in compressor.named_parameters() if not torch.equal(before[name], p)}
    trainable = {name for name, p in compressor.named_parameters() if p.requires_grad}
    assert changed <= trainable
    for part in (".phi.", ".theta.", "scorer.hidden", "scorer.output", "soft_token"):
        assert any(part in name for name in changed), part
    last = f"layers.{compressor.base.config.num_hidden_layers - 1}."
    for name in trainable - changed:  # what the nuggets of the last layer do not depend on
        assert ".phi." in name and last in name, name


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_gradient_checkpointing_gives_the_same_gradients(pair: Maker, family: str) -> None:
    plain = stir(pair(family).compressor)
    checkpointed = stir(pair(family).compressor)
    checkpointed.adapters.checkpoint_gradients()
    ids = tokens(2, 30)
    for compressor in (plain, checkpointed):
        _loss(compressor, ids).backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_checkpointing_recomputes_layers(pair: Maker) -> None:
    compressor = stir(pair("llama").compressor)
    compressor.adapters.checkpoint_gradients()
    calls = []
    compressor.base.base_model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    loss = _loss(compressor, tokens(1, 30))
    forward = len(calls)
    loss.backward()
    assert len(calls) > forward


def test_the_adapter_that_is_on_decides_and_the_one_before_comes_back(pair: Maker) -> None:
    made = pair("llama")
    compressor, ids = stir(made.compressor), tokens(1, 10)
    adapters = compressor.adapters
    with torch.no_grad():
        with adapters.use(PHI):
            phi = compressor.base(ids).logits
            with adapters.use(THETA):
                theta = compressor.base(ids).logits
            again = compressor.base(ids).logits
        off = compressor.base(ids).logits
    assert torch.equal(phi, again)
    assert not torch.allclose(phi, theta)
    assert torch.equal(off, made.base(ids).logits)


def test_each_token_can_have_its_own_adapter(pair: Maker) -> None:
    """Of a token alone in its row nothing else is seen: with phi or with theta, as it was asked for."""
    compressor, ids = stir(pair("phi3").compressor), tokens(6, 1)
    adapters, kept = compressor.adapters, torch.tensor([[True], [False], [True], [False], [False], [True]])
    with torch.no_grad():
        with adapters.use(PHI):
            phi = compressor.base(ids).logits
        with adapters.use(THETA):
            theta = compressor.base(ids).logits
        with adapters.mixed(kept):
            mixed = compressor.base(ids).logits
            with adapters.use(THETA):
                inside = compressor.base(ids).logits
            again = copy.deepcopy(compressor).base(ids).logits
        with adapters.use(PHI):
            after = compressor.base(ids).logits
    torch.testing.assert_close(mixed, torch.where(kept[..., None], phi, theta), atol=1e-5, rtol=1e-5)
    assert torch.equal(inside, theta)
    assert torch.equal(again, mixed)
    assert torch.equal(after, phi)


def test_an_error_inside_switches_back(pair: Maker) -> None:
    adapters = pair("llama").compressor.adapters
    for switch in (adapters.use(THETA), adapters.merged(THETA), adapters.mixed(torch.ones(1, 1, dtype=torch.bool))):
        with pytest.raises(RuntimeError, match="inside"), torch.no_grad(), switch:
            raise RuntimeError("inside")
        assert adapters.current is None
        assert all(layer.disable_adapters for layer in adapters._layers)


def test_another_thread_waits_until_the_base_is_as_it_was(pair: Maker) -> None:
    compressor = stir(pair("llama").compressor)
    adapters, seen = compressor.adapters, []

    def look() -> None:
        with adapters.use(PHI):
            seen.append(adapters.current)

    for switch in (adapters.use(THETA), adapters.merged(THETA), adapters.mixed(torch.ones(1, 1, dtype=torch.bool))):
        with torch.no_grad(), switch, adapters.use(None):
            thread = threading.Thread(target=look)
            thread.start()
            thread.join(0.05)
            assert thread.is_alive()
        thread.join(60)
    assert seen == [PHI] * 3


def test_a_copy_or_a_pickle_has_a_lock_of_its_own(pair: Maker) -> None:
    compressor = pair("llama").compressor
    with compressor.adapters.use(PHI):
        again = copy.deepcopy(compressor).adapters.lock
        pickled = pickle.loads(pickle.dumps(compressor.adapters.lock))
        assert (compressor.adapters.lock.mine, again.mine, pickled.mine) == (True, False, False)


@pytest.mark.parametrize("family", ["llama", "llama, tied", "phi3"])
def test_merged_weights_compute_the_same_and_leave_the_base_bit_by_bit(pair: Maker, family: str) -> None:
    compressor, ids = stir(pair(family).compressor), tokens(2, 10)
    before = {name: p.detach().clone() for name, p in compressor.named_parameters()}
    with torch.no_grad():
        with compressor.adapters.use(THETA):
            beside = compressor.base(ids).logits
        with compressor.adapters.merged(THETA):
            merged = compressor.base(ids).logits
    torch.testing.assert_close(merged, beside, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(before[name], p) for name, p in compressor.named_parameters())


def test_merged_weights_follow_the_adapters(pair: Maker) -> None:
    compressor, ids = stir(pair("llama").compressor), tokens(1, 10)
    with torch.no_grad():
        with compressor.adapters.merged(THETA):
            first = compressor.base(ids).logits
        stir(compressor, seed=99)
        with compressor.adapters.merged(THETA):
            second = compressor.base(ids).logits
        with compressor.adapters.use(THETA):
            expected = compressor.base(ids).logits
    assert not torch.allclose(first, second)
    torch.testing.assert_close(second, expected, atol=1e-4, rtol=1e-4)


def test_merged_weights_follow_the_base(pair: Maker) -> None:
    compressor, ids = stir(pair("llama").compressor), tokens(1, 10)
    adapters, base = compressor.adapters, compressor.base
    weight = adapters._layers[0].get_base_layer().weight
    changes: list[Callable[[], object]] = [
        lambda: weight.mul_(1.5),
        lambda: setattr(weight, "data", weight.data * 1.5),
        lambda: base.to(torch.float64),
    ]
    with torch.no_grad():
        for change in changes:
            with adapters.merged(THETA):
                copies = adapters._merged[THETA][1]
                base(ids)
            change()
            with adapters.merged(THETA):
                merged = base(ids).logits
            assert adapters._merged[THETA][1] is not copies
            with adapters.use(THETA):
                torch.testing.assert_close(merged, base(ids).logits, atol=1e-3, rtol=1e-3)
            with adapters.merged(THETA), adapters.use(None):
                copies = adapters._merged[THETA][1]
            with adapters.merged(THETA):
                assert adapters._merged[THETA][1] is copies, "what has not changed is merged once"


def test_merging_is_left_out_where_gradients_are_wanted(pair: Maker) -> None:
    compressor = stir(pair("llama").compressor)
    with compressor.adapters.merged(THETA):
        assert compressor.adapters.current == THETA


def test_fresh_adapters_of_one_seed_agree_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = Compressor(tiny_model("llama"), small_config(seed=1))
    torch.manual_seed(5)
    Compressor(copy.deepcopy(tiny_model("llama")), small_config(seed=1))
    torch.manual_seed(5)
    lora = LoraSettings(rank=2)
    model = tiny_model("llama")
    torch.manual_seed(5)
    second = Adapters(model, encoder=lora, decoder=lora, seed=1)
    assert torch.equal(torch.rand(3), expected)
    for a, b in zip(first.adapters.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["qkv", "all-linear"])
def test_without_gradients_the_same_numbers_come_with_fewer_passes(pair: Maker, family: str, targets: str) -> None:
    lora = LoraSettings(rank=2, targets=targets)  # type: ignore[arg-type]
    compressor = stir(pair(family, encoder=lora, decoder=lora).compressor)
    ids, base = tokens(2, 12), compressor.base
    for name in (PHI, THETA):
        with compressor.adapters.use(name):
            plain = base(ids).logits.detach()
            with torch.no_grad():
                torch.testing.assert_close(base(ids).logits, plain, atol=1e-5, rtol=1e-5)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    assert base(ids).logits.isfinite().all()
    assert not any("forward" in vars(layer) for layer in base.modules())


def test_fused_arithmetic_and_switching_may_enclose_each_other(pair: Maker) -> None:
    compressor, ids = stir(pair("llama").compressor), tokens(1, 10)
    with torch.no_grad(), compressor.adapters.use(PHI):
        expected = compressor.base(ids).logits
    with torch.no_grad(), fused_lora(compressor.base), compressor.adapters.use(PHI):
        torch.testing.assert_close(compressor.base(ids).logits, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad(), compressor.adapters.use(PHI):
        torch.testing.assert_close(compressor.base(ids).logits, expected, atol=1e-5, rtol=1e-5)
        with compressor.adapters.use(THETA):
            compressor.base(ids)
        torch.testing.assert_close(compressor.base(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_merging_within_merging_is_the_same_or_refused(pair: Callable[..., Pair]) -> None:
    compressor = stir(pair("llama").compressor)
    adapters, ids = compressor.adapters, tokens(1, 9)
    with torch.no_grad():
        with adapters.merged(THETA):
            once = compressor.base(ids).logits
            with adapters.merged(THETA):
                assert torch.equal(compressor.base(ids).logits, once)
            with pytest.raises(InputError, match="phi can't be merged within theta"), adapters.merged(PHI):
                pass
            assert torch.equal(compressor.base(ids).logits, once)
        with adapters.merged(PHI):
            assert not torch.equal(compressor.base(ids).logits, once)


@pytest.mark.parametrize("targets", [("q_proj", "query"), ("query",)])
def test_a_layer_that_the_base_has_not_is_named_though_others_are_there(pair: Maker, targets: tuple[str, ...]) -> None:
    found = r"no linear layer 'query'; it has (?=.*\bq_proj\b)(?!.*lora)"
    with pytest.raises(InputError, match=found):
        pair("llama", decoder=LoraSettings(rank=2, targets=targets))
    pair("llama", decoder=LoraSettings(rank=2, targets=("q_proj", "self_attn.o_proj")))


def test_merged_weights_follow_an_optimizer_that_tells_nobody(pair: Maker) -> None:
    compressor = stir(pair().compressor)
    adapters, ids = compressor.adapters, tokens(1, 6)
    optimizer = torch.optim.AdamW(compressor.parameters(), lr=0.1, fused=True)
    for mode in ("use", "mixed"):
        with torch.no_grad(), adapters.merged(THETA):
            before = compressor.base(ids).logits
        with adapters.use(THETA) if mode == "use" else adapters.mixed(torch.zeros_like(ids, dtype=torch.bool)):
            compressor.base(ids).logits.pow(2).mean().backward()
        optimizer.step()
        with torch.no_grad(), adapters.merged(THETA):
            after = compressor.base(ids).logits
        with torch.no_grad(), adapters.use(THETA):
            wanted = compressor.base(ids).logits
        assert not torch.allclose(before, wanted, atol=1e-3)
        torch.testing.assert_close(after, wanted, atol=1e-4, rtol=1e-4)


def test_a_base_made_in_inference_mode_is_merged_too() -> None:
    with torch.inference_mode():
        compressor = stir(Compressor(tiny_model(), small_config()).eval())
        with compressor.adapters.merged(THETA):
            merged = compressor.base(tokens(1, 6)).logits
        with compressor.adapters.use(THETA):
            torch.testing.assert_close(merged, compressor.base(tokens(1, 6)).logits, atol=1e-4, rtol=1e-4)


def test_fresh_adapters_leave_the_generators_of_gpus_alone(pair: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seeded = tiny_model(), []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.manual_seed(3)
    assert seeded == [3]
    Compressor(model, small_config())
    assert seeded == [3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    model = tiny_model()
    torch.set_default_dtype(dtype)
    try:
        compressor = Compressor(model, small_config())
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in compressor.scorer.parameters()} == {torch.float32}
    assert compressor.encode(tokens(1, 20), ratio=4).keys.dtype == torch.float32


def test_a_copy_of_a_checkpointed_model_runs_its_own_layers(pair: Maker) -> None:
    compressor = stir(pair().compressor)
    plain = copy.deepcopy(compressor)
    compressor.adapters.checkpoint_gradients()
    for other in (copy.deepcopy(compressor), pickle.loads(pickle.dumps(compressor))):
        with torch.no_grad():
            for parameter in compressor.parameters():  # the original's
                parameter.add_(1.0)
        ids = tokens(2, 30)
        for one in (plain, other):
            one.zero_grad()
            _loss(one, ids).backward()
        for (name, a), (_, b) in zip(plain.named_parameters(), other.named_parameters(), strict=True):
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, msg=name)
        with torch.no_grad():
            for parameter in compressor.parameters():
                parameter.sub_(1.0)

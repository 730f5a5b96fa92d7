"""Laws of `Nuggets` and its file."""

import dataclasses
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache

from dodo import nuggets_file
from dodo.errors import FingerprintMismatch, InputError, NuggetsFileError
from dodo.nuggets import Fingerprint, Nuggets
from tests.conftest import FAMILIES, Pair, stir, tokens

Maker = Callable[..., Pair]


@pytest.fixture
def made(pair: Maker) -> Nuggets:
    compressor = stir(pair("llama", keep_first=True).compressor)
    compressor.fingerprint = Fingerprint("base", "tokenizer", "adapter")
    with torch.no_grad():
        return compressor.encode(tokens(1, 45), ratio=4)


def assert_same(a: Nuggets, b: Nuggets) -> None:
    for field in dataclasses.fields(Nuggets):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if field.name == "rotary":
            assert left.layers == right.layers
            assert all(torch.equal(x, y) for x, y in zip(left.frequencies, right.frequencies, strict=True))
        else:
            assert torch.equal(left, right) if isinstance(left, Tensor) else left == right, field.name


# -- moving and joining


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_nuggets_equal_encoding_at_those_positions(pair: Maker, family: str) -> None:
    compressor = stir(pair(family).compressor)
    texts = [tokens(1, n, seed=n) for n in (20, 31, 9)]
    with torch.no_grad():
        joined = Nuggets.cat([compressor.encode(text, ratio=3) for text in texts])
        starts = (0, 20, 51)
        parts = [compressor.encode(text, ratio=3, start=start) for text, start in zip(texts, starts, strict=True)]
    torch.testing.assert_close(joined.keys, torch.cat([p.keys for p in parts], dim=3), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(joined.values, torch.cat([p.values for p in parts], dim=3), atol=2e-4, rtol=2e-4)
    assert joined.positions.tolist() == torch.cat([p.positions for p in parts], dim=1).tolist()
    assert joined.next_positions.tolist() == [60]
    assert joined.lengths.tolist() == [60]
    assert joined.k.tolist() == [7 + 11 + 3]
    assert bool((joined.indices.diff() > 0).all())


def test_joining_compact_nuggets_puts_states_side_by_side(pair: Maker) -> None:
    compressor = pair("llama", positions="compact", keep_first=True).compressor
    with torch.no_grad():
        joined = Nuggets.cat([compressor.encode(tokens(1, n), ratio=3) for n in (20, 13)])
    assert joined.positions[0].tolist() == list(range(8 + 5))
    assert joined.next_positions.tolist() == [13]
    assert joined.sinks.tolist() == [2]
    assert joined.k.tolist() == [7 + 4]
    assert joined.lengths.tolist() == [19 + 12]


def test_joining_joined_nuggets_is_joining_all(pair: Maker) -> None:
    compressor = stir(pair("llama", keep_first=True).compressor)
    with torch.no_grad():
        a, b, c = (compressor.encode(tokens(1, n, seed=n), ratio=3) for n in (20, 13, 8))
    nested, flat = Nuggets.cat([Nuggets.cat([a, b]), c]), Nuggets.cat([a, b, c])
    torch.testing.assert_close(nested.keys, flat.keys, atol=1e-5, rtol=1e-5)
    assert nested.positions.tolist() == flat.positions.tolist()
    assert nested.indices.tolist() == flat.indices.tolist()
    assert (nested.lengths.tolist(), nested.sinks.tolist()) == (flat.lengths.tolist(), [3])


def test_shifting_there_and_back_gives_the_same_keys(made: Nuggets) -> None:
    torch.testing.assert_close(made.shift(100).shift(-100).keys, made.keys, atol=1e-5, rtol=1e-5)
    assert torch.equal(made.shift(100).values, made.values)


def test_shifting_below_zero_is_refused(made: Nuggets) -> None:
    with pytest.raises(InputError, match="negative"):
        made.shift(-1)


def test_compact_nuggets_stand_at_zero_to_k(made: Nuggets) -> None:
    compact = made.compact()
    assert compact.positions[0].tolist() == list(range(int(made.states)))
    assert torch.equal(compact.next_positions, made.states)
    assert compact.scheme == "compact"
    assert torch.equal(compact.indices, made.indices)


def test_nuggets_of_different_models_are_not_joined(made: Nuggets) -> None:
    other = dataclasses.replace(made, fingerprint=Fingerprint("base", "tokenizer", "another"))
    for join in (Nuggets.cat, Nuggets.stack):
        with pytest.raises(FingerprintMismatch, match="adapter"):
            join([made, other])


def test_nothing_or_different_schemes_are_not_joined(made: Nuggets) -> None:
    with pytest.raises(InputError, match="no nuggets"):
        Nuggets.cat([])
    with pytest.raises(InputError, match="scheme"):
        Nuggets.cat([made, made.compact()])
    with pytest.raises(InputError, match="single texts"):
        Nuggets.cat([Nuggets.stack([made, made]), made])


def test_a_stack_gives_its_parts_back(pair: Maker) -> None:
    compressor = pair("llama").compressor
    with torch.no_grad():
        parts = [compressor.encode(tokens(1, n), ratio=4) for n in (30, 5, 17)]
    stacked = Nuggets.stack(parts)
    assert stacked.batch_size == 3
    for part, back in zip(parts, stacked, strict=True):
        assert_same(part, back)
    assert_same(parts[-1], stacked[-1])
    with pytest.raises(IndexError):
        stacked[3]


# -- caches


def test_a_cache_is_a_transformers_cache_and_a_copy(made: Nuggets) -> None:
    cache = made.to_cache()
    assert isinstance(cache, Cache)
    assert cache.get_seq_length() == int(made.states)
    before = made.keys.clone(), made.values.clone()
    cache.layers[1].values.fill_(3)
    cache.update(torch.ones_like(made.keys[0][:, :, :2]), torch.ones_like(made.values[0][:, :, :2]), 0)
    cache.layers[0].keys.fill_(3)
    assert torch.equal(made.keys, before[0]) and torch.equal(made.values, before[1])


# -- files


def test_a_saved_file_gives_the_same_nuggets_back(made: Nuggets, tmp_path: Path) -> None:
    for name, nuggets in {"one": made, "many": Nuggets.stack([made, made]), "joined": Nuggets.cat([made, made])}.items():
        nuggets.save(tmp_path / name)
        assert_same(Nuggets.load(tmp_path / name), nuggets)


def test_what_happens_to_a_file_later_does_not_reach_loaded_nuggets(made: Nuggets, tmp_path: Path) -> None:
    path = tmp_path / "a.nuggets"
    made.save(path)
    loaded = Nuggets.load(path)
    with open(path, "r+b") as file:
        size = path.stat().st_size
        file.seek(size // 2)
        file.write(b"\0" * (size // 2))
        file.flush()
        assert_same(loaded, made)
        file.truncate(0)
    assert_same(loaded, made)


def test_one_text_of_several_does_not_hold_the_others(pair: Maker) -> None:
    with torch.no_grad():
        several = pair("llama").compressor.encode(tokens(16, 45), ratio=4)
    one = several[3]
    assert one.keys.untyped_storage().nbytes() == one.keys.nbytes < several.keys.nbytes / 10
    assert one[0].keys.data_ptr() == one.keys.data_ptr()  # of one text alone there is nothing to copy


@pytest.mark.parametrize("storage", ["float32", "int8", None])
def test_values_that_are_not_finite_are_refused_in_any_type(made: Nuggets, tmp_path: Path, storage: str | None) -> None:
    made.values[0, 0, 0, 0, 0] = torch.inf
    with pytest.raises(InputError, match="values are not all finite"):
        made.save(tmp_path / "x", storage=storage)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("short", "storage"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_types_have_short_names(made: Nuggets, tmp_path: Path, short: str, storage: str) -> None:
    made.save(tmp_path / "short", storage=short)  # type: ignore[arg-type]
    made.save(tmp_path / "long", storage=storage)  # type: ignore[arg-type]
    assert (tmp_path / "short").read_bytes() == (tmp_path / "long").read_bytes()


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_half_storage_rounds_once_and_keeps_the_dtype(made: Nuggets, tmp_path: Path, storage: str) -> None:
    made.save(tmp_path / "f", storage=storage)  # type: ignore[arg-type]
    loaded = Nuggets.load(tmp_path / "f")
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.keys, made.keys.to(getattr(torch, storage)).float())


def test_int8_storage_is_within_half_a_step_of_each_channels_scale(made: Nuggets, tmp_path: Path) -> None:
    made.save(tmp_path / "f", storage="int8")
    loaded = Nuggets.load(tmp_path / "f")
    for name in ("keys", "values"):
        want, got = getattr(made, name), getattr(loaded, name)
        step = want.abs().amax(dim=3, keepdim=True) / 127
        assert bool(((want - got).abs() <= 0.501 * step).all())
    assert torch.equal(loaded.positions, made.positions)


def test_values_that_do_not_fit_half_precision_are_refused(made: Nuggets, tmp_path: Path) -> None:
    large = dataclasses.replace(made, keys=made.keys + 1e6)
    with pytest.raises(InputError, match="do not fit float16"):
        large.save(tmp_path / "f", storage="float16")
    assert not list(tmp_path.iterdir())


def test_an_unknown_storage_type_is_refused(made: Nuggets, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="int4"):
        made.save(tmp_path / "f", storage="int4")  # type: ignore[arg-type]


def test_sizes_on_disk_are_those_of_the_states(pair: Maker, tmp_path: Path) -> None:
    compressor = pair("llama").compressor
    with torch.no_grad():
        made = compressor.encode(tokens(1, 250), nuggets=240)
    sizes = {}
    for storage in ("float32", "float16", "int8"):
        made.save(tmp_path / storage, storage=storage)  # type: ignore[arg-type]
        sizes[storage] = (tmp_path / storage).stat().st_size
    overhead = sizes["float32"] - made.nbytes
    assert 0 < overhead < 0.1 * made.nbytes  # tiny heads; the benchmark holds real ones to 2%
    assert sizes["float16"] == pytest.approx(overhead + made.nbytes / 2, rel=0.01)
    scales = 2 * made.nbytes // (int(made.states) * 2)  # two fp32 scales, per channel, for what n states hold
    assert sizes["int8"] == pytest.approx(overhead + made.nbytes / 4 + scales, rel=0.05)


def _header(path: Path) -> tuple[dict[str, object], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _rewrite(path: Path, header: dict[str, object], rest: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)


def test_every_damaged_file_is_refused_with_one_clear_error(made: Nuggets, tmp_path: Path) -> None:
    path = tmp_path / "f.nuggets"
    made.save(path)
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-5] ^= 1
    damaged = {
        "empty": b"",
        "text": b"just some text, not nuggets at all",
        "truncated": good[: len(good) // 2],
        "header cut": good[:40],
        "flipped": bytes(flipped),
        "pickle": pickle.dumps({"keys": [1, 2, 3]}),
    }
    for name, data in damaged.items():
        path.write_bytes(data)
        with pytest.raises(NuggetsFileError, match=r"f\.nuggets") as caught:
            Nuggets.load(path)
        assert "\n" not in str(caught.value), name


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "exploded",))  # type: ignore[return-value]

    for save in (lambda p: p.write_bytes(pickle.dumps(Bomb())), lambda p: torch.save({"a": Bomb()}, p)):
        save(tmp_path / "f.nuggets")
        with pytest.raises(NuggetsFileError):
            Nuggets.load(tmp_path / "f.nuggets")
    assert not (tmp_path / "exploded").exists()


def test_a_file_of_a_later_version_says_so(made: Nuggets, tmp_path: Path) -> None:
    path = tmp_path / "f.nuggets"
    made.save(path)
    header, rest = _header(path)
    ours = json.loads(header["__metadata__"]["dodo_nuggets"])  # type: ignore[index]
    ours["version"] = nuggets_file.FORMAT_VERSION + 1
    header["__metadata__"] = {"dodo_nuggets": json.dumps(ours)}
    _rewrite(path, header, rest)
    with pytest.raises(NuggetsFileError, match=f"version {nuggets_file.FORMAT_VERSION + 1}.*upgrade"):
        Nuggets.load(path)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _forge(path: Path, tensors: dict[str, torch.Tensor], header: dict[str, object]) -> None:
    """A file whose checksum is right, whatever is in it."""
    header = {name: value for name, value in header.items() if name != "checksum"}
    nuggets_file._write(path, tensors, {**header, "checksum": nuggets_file._checksum(tensors, header)})


def test_no_flipped_bit_of_the_header_goes_unnoticed(made: Nuggets, tmp_path: Path) -> None:
    path = tmp_path / "f.nuggets"
    made.save(path)
    good = path.read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0]
    spaces = range(end - 8, end)  # safetensors pads with what JSON does not see
    for bit in range(0, 8 * end, 7):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        if bit // 8 in spaces and chr(good[bit // 8]) == " ":
            continue
        path.write_bytes(flipped)
        with pytest.raises(NuggetsFileError):
            Nuggets.load(path)


def test_files_of_the_first_version_are_read(made: Nuggets, tmp_path: Path) -> None:
    path = tmp_path / "f.nuggets"
    made.save(path)
    ours = json.loads(_header(path)[0]["__metadata__"]["dodo_nuggets"])  # type: ignore[index]
    _forge(path, _tensors(path), {**ours, "version": 1})
    assert torch.equal(Nuggets.load(path).keys, made.keys)
    made.save(path)
    header, rest = _header(path)
    header["__metadata__"] = {"dodo_nuggets": json.dumps({**ours, "version": 1})}  # with the checksum of the second
    _rewrite(path, header, rest)
    with pytest.raises(NuggetsFileError, match="damaged"):
        Nuggets.load(path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("keys", lambda keys: keys[:, :, :, :-1]),
        ("values", lambda values: values * torch.nan),
        ("scores", lambda scores: scores[:, 1:]),
        ("mask", torch.zeros_like),
        ("mask", lambda mask: mask.to(torch.int32)),
        ("sinks", lambda sinks: sinks - 3),
        ("lengths", lambda lengths: lengths[:1].repeat(3)),
        ("rotary.0", lambda turns: turns.repeat(9)),
    ],
)
def test_contents_that_do_not_fit_are_refused(name: str, change: Callable[..., Any], made: Nuggets, tmp_path: Path) -> None:
    path = tmp_path / "f.nuggets"
    made.save(path)
    ours = json.loads(_header(path)[0]["__metadata__"]["dodo_nuggets"])  # type: ignore[index]
    tensors = _tensors(path)
    tensors[name] = change(tensors[name]).contiguous()
    _forge(path, tensors, ours)
    with pytest.raises(NuggetsFileError, match="damaged"):
        Nuggets.load(path)


@pytest.mark.parametrize(
    "change", [{"rotary_layers": [0]}, {"rotary_layers": [7] * 4}, {"ratio": "abc"}, {"dtype": "int64"}, {"version": -3}]
)
def test_headers_that_do_not_fit_are_refused(change: dict[str, object], made: Nuggets, tmp_path: Path) -> None:
    path = tmp_path / "f.nuggets"
    made.save(path)
    ours = json.loads(_header(path)[0]["__metadata__"]["dodo_nuggets"])  # type: ignore[index]
    _forge(path, _tensors(path), {**ours, **change})
    with pytest.raises(NuggetsFileError, match="damaged"):
        Nuggets.load(path)


def test_headers_with_missing_or_wrong_entries_are_refused(made: Nuggets, tmp_path: Path) -> None:
    path = tmp_path / "f.nuggets"
    made.save(path)
    header, rest = _header(path)
    ours = json.loads(header["__metadata__"]["dodo_nuggets"])  # type: ignore[index]
    for key in ours:
        for broken in ({k: v for k, v in ours.items() if k != key}, {**ours, key: None}):
            if key == "ratio" and "ratio" in broken:
                continue  # no ratio is a valid value
            header["__metadata__"] = {"dodo_nuggets": json.dumps(broken)}
            _rewrite(path, header, rest)
            with pytest.raises(NuggetsFileError):
                Nuggets.load(path)


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "f")
    with pytest.raises(NuggetsFileError, match="holds no nuggets"):
        Nuggets.load(tmp_path / "f")


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(NuggetsFileError, match="no file"):
        Nuggets.load(tmp_path / "none")
    with pytest.raises(NuggetsFileError, match="directory"):
        Nuggets.load(tmp_path)


def test_a_full_disk_leaves_what_was_there(made: Nuggets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.nuggets"
    made.save(path)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nuggets_file, "save_file", full)
    with pytest.raises(NuggetsFileError, match="No space left"):
        made.shift(3).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["f.nuggets"]


def test_a_missing_folder_is_named(made: Nuggets, tmp_path: Path) -> None:
    with pytest.raises(NuggetsFileError, match="could not write"):
        made.save(tmp_path / "none" / "f.nuggets")


def test_parts_are_joined_on_the_first_ones_device(pair: Callable[..., Pair]) -> None:
    compressor = pair().compressor
    one, two = (compressor.encode(tokens(1, 20, seed=seed), ratio=4) for seed in (1, 2))
    both = Nuggets.stack([one.to(device="meta"), two])
    assert {both.keys.device.type, both.positions.device.type, both.lengths.device.type} == {"meta"}
    assert both.keys.shape == Nuggets.stack([one, two]).keys.shape

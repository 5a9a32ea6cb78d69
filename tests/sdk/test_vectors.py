"""Sets of vectors: from arrays, from files, and every file that is not in order."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from steergate import ConventionRequired, InvalidVectors, VectorSet, payloads
from steergate._arrays import numbers, to_floats
from steergate.errors import InvalidSteering
from steergate_server.registry.numbers import canonical_numbers, payload_digest
from steergate_server.schema.decode import decode
from steergate_server.schema.requests import InlineVec

VALUES = [0.5, -1.25, 3.0, 1e-3]


def canonical(vectors: VectorSet) -> dict[str, list[float]]:
    """What the server makes of a set."""
    return {path: row.tolist() for path, row in canonical_numbers(received(vectors)).items()}


def received(vectors: VectorSet) -> InlineVec:
    import msgspec

    return decode(msgspec.json.encode({"kind": "inline", "packed": vectors.packed()}), InlineVec)


# Arrays

ARRAYS = {
    "list": VALUES,
    "tuple": tuple(VALUES),
    "float16": np.array(VALUES, "f2"),
    "float32": np.array(VALUES, "f4"),
    "float64": np.array(VALUES, "f8"),
    "big-endian": np.array(VALUES, ">f4"),
    "a column": np.array([[value, 9] for value in VALUES], "f4")[:, 0],
    "torch bfloat16": torch.tensor(VALUES, dtype=torch.bfloat16),
    "torch float16": torch.tensor(VALUES, dtype=torch.float16),
    "torch float64": torch.tensor(VALUES, dtype=torch.float64),
    "torch, strided, with gradients": torch.tensor([[v, 9.0] for v in VALUES], requires_grad=True)[:, 0],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_the_server_reads_what_was_given(name):
    array = ARRAYS[name]
    plain = array.detach().double().numpy() if isinstance(array, torch.Tensor) else array
    given = np.array(plain, "f4").tolist()
    vectors = VectorSet.from_rows({7: array})
    assert canonical(vectors) == {"post_block/00000007": given}
    assert list(vectors.row(7)) == pytest.approx(given, rel=1e-7)


def test_lists_become_float32_and_arrays_keep_their_type():
    dtypes = {name: numbers(array).dtype for name, array in ARRAYS.items()}
    assert [dtypes[name] for name in ("list", "float16", "float64", "torch bfloat16")] == [
        "float32", "float16", "float64", "bfloat16",
    ]  # fmt: skip
    assert numbers(np.array([1, 2])).dtype == numbers(torch.tensor([1, 2])).dtype == "float32"


@pytest.mark.parametrize(
    ("array", "code"),
    [
        ([1.0, float("nan")], "not_finite"),
        ([1e39], "not_finite"),
        (np.array([np.inf], "f2"), "not_finite"),
        (np.array([1e39]), "not_finite"),
        (torch.tensor([float("-inf")], dtype=torch.bfloat16), "not_finite"),
        (["1.0"], "invalid_type"),
        ([True], "invalid_type"),
        ([[1.0], [1.0, 2.0]], "shape_mismatch"),
        ([[1.0], 2.0], "invalid_type"),
        (np.array([True]), "invalid_type"),
        (np.array([1j]), "invalid_type"),
        (np.array(["a"]), "invalid_type"),
        (torch.tensor([True]), "invalid_type"),
        ("1.0", "invalid_type"),
        (5, "invalid_type"),
    ],
    ids=str,
)
def test_what_is_no_array_of_finite_floats_is_refused(array, code):
    with pytest.raises(InvalidVectors) as caught:
        numbers(array)
    assert caught.value.code == code
    assert str(caught.value).startswith("The numbers")


def test_bfloat16_is_read_exactly():
    halves = torch.arange(0, 0x7F80, 7, dtype=torch.int16).view(torch.bfloat16)
    assert to_floats(numbers(halves)) == tuple(halves.double().tolist())


# Sets


def test_a_set_is_what_it_says():
    vectors = VectorSet.from_rows({10: VALUES, 11: VALUES, 14: VALUES}) | VectorSet.from_rows({2: VALUES}, "pre_attn")
    assert vectors.hooks == ("pre_attn", "post_block")
    assert vectors.layers == (2, 10, 11, 14)
    assert (vectors.width, len(vectors)) == (4, 4)
    assert repr(vectors) == (
        "<VectorSet pre_attn: layer 2, 4 wide, float32; post_block: layers 10-11, 14, 4 wide, float32>"
    )
    assert vectors.select(hook="pre_attn") == VectorSet.from_rows({2: VALUES}, "pre_attn")
    assert vectors.select(layers=[11, 10]).layers == (10, 11)
    assert (VectorSet.from_rows({1: [1.0]}) | VectorSet.from_rows({1: [1.0, 2.0]}, "attn_heads")).width is None


def test_a_scale_travels_beside_the_numbers():
    vectors = VectorSet.from_rows({3: VALUES, 4: VALUES}).scaled(0.1)
    assert vectors.packed()["post_block"].scales == [0.1, 0.1]
    scaled = [float(np.float32(np.float64(np.float32(value)) * 0.1)) for value in VALUES]
    assert canonical(vectors)["post_block/00000003"] == scaled
    assert vectors.scaled(10).packed()["post_block"].scales is None
    assert vectors != vectors.scaled(2)


def test_rows_of_several_types_travel_exactly():
    halves = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    mixed = VectorSet.from_rows({1: halves, 2: np.array([0.5, 2**-20], "f2"), 0: [0.1, 0.2]})
    packed = mixed.packed()["post_block"]
    assert (packed.dtype, packed.layer_indices) == ("float32", [0, 1, 2])
    assert canonical(mixed) == {f"post_block/{layer:08d}": list(mixed.row(layer)) for layer in (0, 1, 2)}
    assert VectorSet.from_rows({1: halves, 2: np.array([0.1, 0.2])}).packed()["post_block"].dtype == "float64"


def test_the_digest_is_that_of_the_numbers():
    plain = VectorSet.from_rows({3: VALUES})
    digests = {payload_digest(received(made)) for made in (plain, VectorSet.from_rows({3: np.array(VALUES, "f4")}))}
    assert digests == {payload_digest(received(plain.scaled(2).scaled(0.5)))}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({}, "No rows"),
        ({-1: [1.0]}, "counted from 0"),
        ({3: []}, r"shape \[0\]"),
        ({3: [[1.0]]}, r"shape \[1, 1\]"),
        ({3: [1.0], 4: [1.0, 2.0]}, "4:post_block is 2 wide, 3:post_block is 1"),
        ({"3": [1.0]}, "'3' is no layer"),
        ({True: [1.0]}, "True is no layer"),
        ({3: [float("nan")]}, "The numbers of layer 3 are not all finite"),
    ],
    ids=str,
)
def test_rows_that_make_no_set(rows, message):
    with pytest.raises(InvalidVectors, match=message):
        VectorSet.from_rows(rows)


def test_what_a_set_does_not_have_is_refused():
    vectors = VectorSet.from_rows({3: [1.0], 4: [2.0]})
    with pytest.raises(InvalidVectors, match="no row for layer 5, only for 3, 4"):
        vectors.select(layers=[4, 5])
    with pytest.raises(InvalidVectors, match="no rows at hook `mlp_in`, only at post_block"):
        vectors.select(hook="mlp_in")
    with pytest.raises(InvalidVectors, match="Both have a row at 4:post_block"):
        vectors | vectors.select(layers=[4])
    with pytest.raises(InvalidVectors, match="must be finite"):
        vectors.scaled(float("nan"))


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def safetensors(folder: Path, **tensors: np.ndarray) -> Path:
    path = folder / "v.safetensors"
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)
    return path


def npz(folder: Path, **tensors: np.ndarray) -> Path:
    path = folder / "v.npz"
    np.savez(path, **{name.replace("__", "."): tensor for name, tensor in tensors.items()})
    return path


ROW = np.array(VALUES, "f4")
STACK = np.arange(12, dtype="f4").reshape(3, 4) + 1


@pytest.mark.parametrize("write", [safetensors, npz])
@pytest.mark.parametrize("names", [["layer__3", "layer__11"], ["direction__3", "direction__11"], ["3", "11"]], ids=str)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_one_tensor_per_layer(folder, write, names, dtype):
    path = write(folder, **{names[0]: ROW.astype(dtype), names[1]: 2 * ROW.astype(dtype)})
    vectors = VectorSet.load(path, hook="mlp_out")
    rows = {3: ROW.astype(dtype), 11: 2 * ROW.astype(dtype)}
    assert vectors == VectorSet.from_rows(rows, "mlp_out")
    assert [str(origin) for origin in vectors.mapping] == [
        f"{name.replace('__', '.')} -> {layer}:mlp_out" for name, layer in zip(names, rows, strict=True)
    ]
    assert VectorSet.load(path, layers=[11]).layers == (11,)


def test_bfloat16_needs_no_numpy_support(folder):
    tensor = torch.tensor(VALUES, dtype=torch.bfloat16)
    save_torch({"layer.3": tensor}, folder / "v.safetensors")
    vectors = VectorSet.load(folder / "v.safetensors")
    assert vectors == VectorSet.from_rows({3: tensor})
    assert vectors.packed()["post_block"].dtype == "bfloat16"


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "npy"])
def test_one_vector_without_a_layer_needs_one(folder, suffix):
    path = folder / f"v.{suffix}"
    {"safetensors": lambda: save_file({"dir": ROW}, path), "npz": lambda: np.savez(path, dir=ROW)}.get(
        suffix, lambda: np.save(path, ROW)
    )()
    assert VectorSet.load(path, layers=[5]) == VectorSet.from_rows({5: ROW})
    for layers in (None, [5, 6]):
        with pytest.raises(InvalidVectors, match="is one vector and names no layer"):
            VectorSet.load(path, layers=layers)


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "npy"])
def test_a_stack_is_told_apart_or_inferred(folder, suffix):
    path = folder / f"v.{suffix}"
    {"safetensors": lambda: save_file({"dirs": STACK}, path), "npz": lambda: np.savez(path, dirs=STACK)}.get(
        suffix, lambda: np.save(path, STACK)
    )()
    blocks = VectorSet.from_rows(dict(enumerate(STACK)))
    states = VectorSet.from_rows({0: STACK[1], 1: STACK[2]})
    assert VectorSet.load(path, convention="blocks") == VectorSet.load(path, model_layers=3) == blocks
    assert VectorSet.load(path, convention="hidden_states") == VectorSet.load(path, model_layers=2) == states
    assert VectorSet.load(path, convention="blocks", layers=[2]).layers == (2,)
    with pytest.raises(ConventionRequired, match="stack of 3 rows"):
        VectorSet.load(path)
    with pytest.raises(InvalidVectors, match=r"has 3 rows\. A model of 5 blocks has 5"):
        VectorSet.load(path, model_layers=5)
    with pytest.raises(InvalidVectors, match="is `blocks`, not `hidden_states`"):
        VectorSet.load(path, model_layers=3, convention="hidden_states")


def test_the_mapping_of_a_stack_can_be_printed(folder):
    np.save(folder / "v.npy", STACK)
    mapping = VectorSet.load(folder / "v.npy", convention="hidden_states").mapping
    assert [str(origin) for origin in mapping] == [
        "v.npy[0] -> the embeddings; not used",
        "v.npy[1] -> 0:post_block",
        "v.npy[2] -> 1:post_block; Hugging Face gives the last hidden state after the final norm",
    ]


@pytest.mark.parametrize("write", [safetensors, npz])
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"layer__3": ROW, "bias": ROW}, "Tensor `bias` names no layer"),
        ({"layer__3": ROW, "layer__x": ROW}, "Tensor `layer.x` names no layer"),
        ({"layer__3": ROW, "layer__-1": ROW}, "Tensor `layer.-1` names no layer"),
        ({"layer__3": ROW, "layer__03": ROW}, "Tensor `layer.03` names no layer"),
        ({"layer__3": ROW, "3": ROW}, "Tensors `(3|layer.3)` and `(3|layer.3)` both give layer 3"),
        ({"layer__3": ROW, "layer__4": STACK}, r"Tensor `layer.4` has the shape \[3, 4\]"),
        ({"layer__3": STACK}, r"Tensor `layer.3` has the shape \[3, 4\]"),
        ({"layer__3": ROW, "layer__4": ROW[:3]}, "Tensor `layer.4` is 3 wide, `layer.3` is 4"),
        ({"dirs": STACK, "extra": STACK}, "Tensor `dirs` names no layer"),
        ({"dirs": STACK[None]}, "Tensor `dirs` names no layer"),
        ({"layer__3": ROW.astype("i4")}, "numbers of tensor `layer.3` are (I32|int32)"),
        ({"layer__3": ROW * np.nan}, "numbers of tensor `layer.3` are not all finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_name_the_tensor(folder, write, tensors, message):
    with pytest.raises(InvalidVectors, match=message):
        VectorSet.load(write(folder, **tensors))


def test_other_tensors_of_safetensors_are_named(folder):
    save_torch({"layer.3": torch.zeros(4, dtype=torch.float8_e4m3fn)}, folder / "v.safetensors")
    with pytest.raises(InvalidVectors, match=r"tensor `layer\.3` are F8_E4M3"):
        VectorSet.load(folder / "v.safetensors")


def test_a_convention_where_layers_have_names_is_refused(folder):
    with pytest.raises(InvalidVectors, match="names its layers"):
        VectorSet.load(safetensors(folder, layer__3=ROW), convention="blocks")


class Bomb:
    """Unpickling it fails the test."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was executed",)


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_a_pickle_in_any_disguise_is_never_executed(folder, suffix):
    path = folder / f"v.{suffix}"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InvalidVectors):
        VectorSet.load(path)


def test_a_pickle_inside_of_an_archive_is_never_executed(folder):
    np.savez(folder / "v.npz", **{"layer.3": np.array([Bomb()], dtype=object)})
    with pytest.raises(InvalidVectors):
        VectorSet.load(folder / "v.npz")


def test_files_that_are_not_read(folder):
    with pytest.raises(InvalidVectors, match="files of this kind are not read"):
        VectorSet.load(folder / "v.pt")
    with pytest.raises(FileNotFoundError):
        VectorSet.load(folder / "v.npy")
    (folder / "v.npy").write_bytes(b"")
    with pytest.raises(InvalidVectors, match="no plain numpy file"):
        VectorSet.load(folder / "v.npy")
    np.savez(folder / "e.npz")
    with pytest.raises(InvalidVectors, match="holds no tensors"):
        VectorSet.load(folder / "e.npz")


# Payloads


def test_payloads_are_checked_when_they_are_made():
    with pytest.raises(InvalidSteering) as caught:
        payloads.linear([[1.0, 2.0]])
    assert (caught.value.code, caught.value.param) == ("shape_mismatch", "weight.shape")
    with pytest.raises(InvalidSteering) as caught:
        payloads.lowrank([[1.0]], [[float("nan")]])
    assert (caught.value.code, caught.value.param) == ("not_finite", "projector2.data")
    with pytest.raises(InvalidSteering) as caught:
        payloads.concept_pair(VectorSet.from_rows({3: [1.0]}), VectorSet.from_rows({4: [1.0]}))
    assert (caught.value.code, caught.value.param) == ("shape_mismatch", "h2")
    reft = payloads.reft(np.ones((4, 2)), torch.ones(2, 4), [0.0, 1.0], layer=7)
    assert (reft.rotate_layer.shape, reft.learned_source_weight.dtype, reft.layer) == ([4, 2], "float32", 7)

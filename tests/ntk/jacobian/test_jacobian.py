"""The Jacobian in both representations against a plain double loop of autograd.

All in float64: a relative difference of 1e-10 leaves five digits for rounding in sums of at most
a few thousand terms.
"""

import contextlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedntk.ntk import BadReply, Jacobian, NotEnoughMemory, jacobian
from fedntk.ntk.jacobian import blocks, factors
from fedntk.ntk.jacobian.factors import FactoredBlock
from fedntk.ntk.payloads.jacobian_format import jacobian_from_arrays, jacobian_to_arrays
from fedntk.ntk.support import memory as ntk_memory

from ..cases import CASES, make

STRUCTURES = ("dense", "factored")
RELATIVE = 1e-10


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= RELATIVE * (1 + b.norm()))


def loop(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The definition: one backward pass for each example and output."""
    model.eval()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for example in x:
        outputs = model(example[None])[0]
        grads = [
            torch.autograd.grad(f, list(parameters.values()), retain_graph=True, allow_unused=True)
            for f in outputs
        ]
        rows.append(grads)
    return {
        name: torch.stack(
            [
                torch.stack([torch.zeros_like(p) if g[k] is None else g[k] for g in row])
                for row in rows
            ]
        )
        for k, (name, p) in enumerate(parameters.items())
    }


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    return make(request.param)


@pytest.fixture(params=STRUCTURES)
def structure(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_dense_tensor_equals_double_loop(case, structure):
    model, x = case
    expected = loop(model, x)
    actual = jacobian(model, x, structure=structure, chunk_size=4).dense()
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].shape == expected[name].shape
        assert close(actual[name], expected[name]), name


def test_gram_vjp_jvp_equal_their_definitions(case, structure):
    model, x = case
    tensors = loop(model, x).values()
    flat = torch.cat([t.reshape(*t.shape[:2], -1) for t in tensors], dim=2)  # (n, C, P)
    jac = jacobian(model, x, structure=structure)
    n, num_outputs, _ = flat.shape
    assert (jac.num_examples, jac.num_outputs) == (n, num_outputs)
    assert close(jac.gram(), torch.einsum("ncp,mcp->nm", flat, flat) / num_outputs)
    assert close(jac.squared_norms(), flat.square().sum((1, 2)))

    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(n, num_outputs, dtype=x.dtype, generator=generator)
    update = jac.vjp(residual)
    expected = torch.einsum("ncp,nc->p", flat, residual)
    names = list(loop(model, x))
    assert close(torch.cat([update[name].flatten() for name in names]), expected)
    for name, parameter in model.named_parameters():
        assert name not in update or update[name].shape == parameter.shape
    assert close(jac.jvp(update), torch.einsum("ncp,p->nc", flat, expected))


def test_vjp_and_jvp_are_adjoint(case, structure):
    """<jvp(u), R> = <u, vjp(R)> for any update u and residual R."""
    model, x = case
    jac = jacobian(model, x, structure=structure)
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(jac.num_examples, jac.num_outputs, dtype=x.dtype, generator=generator)
    update = {
        name: torch.randn(p.shape, dtype=p.dtype, generator=generator)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    left = (jac.jvp(update) * residual).sum()
    right = sum((jac.vjp(residual)[name] * u).sum() for name, u in update.items())
    assert close(left, right)


def test_gram_between_two_sets_is_a_block_of_the_joint_one(case, structure):
    model, x = case
    whole = jacobian(model, x, structure=structure)
    first, second = (jacobian(model, part, structure=structure) for part in (x[:2], x[2:]))
    assert close(first.gram(second), whole.gram()[:2, 2:])
    joined = Jacobian.concatenate([first, second])
    assert close(joined.gram(), whole.gram())


def test_wire_round_trip_keeps_every_bit(case, structure):
    model, x = case
    jac = jacobian(model, x, structure=structure)
    shapes = {name: p.shape for name, p in model.state_dict().items()}
    back = jacobian_from_arrays(jacobian_to_arrays(jac), parameters=shapes)
    assert back.layout == jac.layout
    for block, other in zip(jac.blocks, back.blocks, strict=True):
        for array, same in zip(block.arrays, other.arrays, strict=True):
            assert torch.equal(array, same)


PATHS = {
    ("mlp", "0.weight"): "linear, 1 position, features first",
    ("in-place", "0.weight"): "linear, 1 position, features first",
    ("frozen-layer", "4.bias"): "bias of linear, summed over positions",
    ("called-twice", "layer.weight"): "linear, 2 positions, positions first",
    ("unrolled", "inner.weight"): "linear, 3 positions, features first",
    ("sequence", "layer.weight"): "linear, summed over positions",
    ("tied-weights", "first.weight"): "differentiated as it is",
    ("functional-use", "layer.weight"): "differentiated as it is",
    ("folded-positions", "layer.weight"): "differentiated as it is",
    ("shuffled", "layer.weight"): "differentiated as it is",
    ("batch-statistics", "4.weight"): "differentiated as it is",
    ("lstm", "lstm.weight_ih_l0"): "differentiated as it is",
    ("attention", "attention.in_proj_weight"): "differentiated as it is",
    ("tokens-first", "table.weight"): "embedding, 7 positions, positions first",
    ("tokens-first", "norm.weight"): "LayerNorm, summed over positions",
    ("batch-norm", "1.weight"): "BatchNorm2d, summed over positions",
    ("group-norm", "1.bias"): "GroupNorm, summed over positions",
    ("cnn", "0.weight"): "conv, summed over positions",
    ("narrow-maps", "0.weight"): "conv, 4 positions, positions first",
    ("narrow-maps", "4.weight"): "conv, 1 position, features first",
    ("conv-1d", "0.weight"): "conv, 2 positions, features first",
    ("conv-3d", "0.weight"): "conv, 2 positions, features first",
    ("depthwise", "0.weight"): "conv, 1 position, features first",
    ("conv-twice", "conv.weight"): "conv, summed over positions",
}


@pytest.mark.parametrize(("name", "parameter"), sorted(PATHS))
def test_each_layer_takes_the_path_that_is_exact_and_cheaper(name, parameter):
    """By the counts of operations and numbers in `factors.py` and `rules.py`."""
    jac = jacobian(*make(name))
    (block,) = [block for block in jac.blocks if parameter in block.names]
    assert block.path == PATHS[name, parameter]
    assert block.path in jac.describe()


@pytest.mark.parametrize("name", ["narrow-maps", "tokens-first", "unrolled", "conv-3d", "mlp"])
@pytest.mark.parametrize("features", [True, False])
def test_both_orders_of_contraction_give_the_same_gram(name, features, monkeypatch):
    """Whichever the count of operations would choose, and over several tiles and chunks."""
    model, x = make(name)
    tensors = jacobian(model, x, structure="dense").dense().values()
    flat = torch.cat([t.flatten(1) for t in tensors], dim=1)
    jac = jacobian(model, x)
    first = slice(0, 2)
    part = Jacobian(tuple(block.rows(first) for block in jac.blocks))
    monkeypatch.setattr(FactoredBlock, "_features_first", features)
    for workspace in (1, 2000, 2**26):
        monkeypatch.setattr(factors, "WORKSPACE", workspace)
        assert close(jac.gram() * jac.num_outputs, flat @ flat.T)
        assert close(part.gram(jac) * jac.num_outputs, flat[first] @ flat.T)
        assert close(jac.squared_norms(), flat.square().sum(1))


def test_gram_of_several_tiles_is_that_of_one(monkeypatch):
    model, x = make("narrow-maps", num_examples=11)
    expected = jacobian(model, x).gram()
    monkeypatch.setattr(blocks, "TILE", 4)
    monkeypatch.setattr(blocks, "CPU_TILE", 4)
    monkeypatch.setattr(blocks.tiles, "__kwdefaults__", {"size": 4})
    kernel = jacobian(model, x).gram()
    assert close(kernel, expected)
    assert torch.equal(kernel, kernel.T)


def test_products_without_a_matrix_equal_those_with_it(case):
    """H V with the mean kernel, and J J^T R with all outputs coupled."""
    model, x = case
    jac = jacobian(model, x)
    tensors = jacobian(model, x, structure="dense").dense().values()
    flat = torch.cat([t.reshape(*t.shape[:2], -1) for t in tensors], dim=2)
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(jac.num_examples, jac.num_outputs, dtype=x.dtype, generator=generator)
    assert close(jac.mean_product(v), jac.gram() @ v)
    assert close(jac.full_product(v), torch.einsum("ncp,mdp,md->nc", flat, flat, v))


def test_what_was_found_out_at_some_weights_serves_at_others(case):
    """Plans are about the network: at new weights the Jacobian is the same with and without."""
    model, x = case
    plans: dict = {}
    jacobian(model, x, plans=plans)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.ones_like(parameter))
    known, anew = jacobian(model, x, plans=plans), jacobian(model, x)
    assert known.layout == anew.layout
    for a, b in zip(known.blocks, anew.blocks, strict=True):
        for mine, expected in zip(a.arrays, b.arrays, strict=True):
            assert torch.equal(mine, expected)


def test_outputs_can_be_differentiated_alone(case):
    model, x = case
    whole = jacobian(model, x).dense()
    some = jacobian(model, x, outputs=[0]).dense()
    for name, tensor in whole.items():
        assert close(some[name], tensor[:, :1])


def test_columns_are_those_of_the_dense_tensor(case):
    model, x = case
    jac = jacobian(model, x)
    for block in jac.blocks:
        for name, tensor in block.dense().items():
            flat = tensor.reshape(*tensor.shape[:2], -1)
            indices = torch.arange(flat.shape[2])[::2]
            assert close(block.columns(name, indices), flat[:, :, indices])


def test_factored_form_of_the_papers_network_is_about_420_times_smaller():
    """MLP 784-100-10: 79,510 parameters x 10 outputs against 784 + 1,000 + 100 + 100 numbers.

    795,100 / 1,984 = 400.8, and 420 less what the second layer's own factors take.
    """
    model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    x = torch.randn(3, 784)
    ratio = jacobian(model, x, structure="dense").nbytes / jacobian(model, x).nbytes
    assert ratio == pytest.approx(795_100 / 1_984)


def test_inputs_of_a_first_layer_are_read_off_either_form():
    """Design fact: a weight's row over its bias's is the input, so both forms reveal it."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    x = torch.randn(4, 5)
    for structure in STRUCTURES:
        tensors = jacobian(model, x, structure=structure).dense()
        recovered = tensors["0.weight"][:, 0, 0] / tensors["0.bias"][:, 0, 0, None]
        torch.testing.assert_close(recovered, x)


def test_gradients_switched_off_by_the_caller_change_nothing(case, structure):
    model, x = case
    expected = jacobian_to_arrays(jacobian(model, x, structure=structure))
    with torch.no_grad():
        arrays = jacobian_to_arrays(jacobian(model, x, structure=structure))
        assert not torch.is_grad_enabled()
    for name, array in expected.items():
        assert arrays[name].tobytes() == array.tobytes()


def test_training_mode_and_weights_are_left_as_they_were():
    model, x = make("batch-norm")
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    jacobian(model, x)
    assert model.training
    assert model[1].training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(not module._forward_hooks for module in model.modules())


def test_what_cannot_be_differentiated_is_refused():
    model, x = make("mlp")
    with pytest.raises(ValueError, match="at least one example"):
        jacobian(model, x[:0])
    with pytest.raises(ValueError, match="structure"):
        jacobian(model, x, structure="sparse")
    with pytest.raises(ValueError, match=r"outputs of shape \(n, C\), got \(1, 5, 1\)"):
        jacobian(nn.Sequential(nn.Linear(5, 5), nn.Unflatten(1, (5, 1))), x.float())
    with pytest.raises(ValueError, match="trainable parameters"):
        jacobian(model.requires_grad_(requires_grad=False), x)
    with pytest.raises(ValueError, match="different parameters"):
        Jacobian.concatenate([jacobian(*make("mlp")), jacobian(*make("no-bias"))])
    with pytest.raises(ValueError, match="at least one"):
        Jacobian.concatenate([])


def test_what_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    jac = jacobian(*make("mlp"))
    monkeypatch.setattr(ntk_memory, "available_memory", lambda device: 100)
    with pytest.raises(NotEnoughMemory, match=r"kernel of 6 x 6 examples needs 0.1 GB"):
        jac.gram()
    with pytest.raises(NotEnoughMemory, match="dense Jacobian of one example x 3 outputs"):
        jacobian(*make("mlp"), structure="dense")


def _wire(name: str = "cnn") -> tuple[list[np.ndarray], dict[str, tuple[int, ...]]]:
    model, x = make(name)
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    return list(jacobian_to_arrays(jacobian(model, x)).values()), shapes


def _parsed(arrays: list[np.ndarray], shapes: dict[str, tuple[int, ...]]) -> Jacobian:
    names = ["layout", *(f"block-{k:03}" for k in range(len(arrays)))]
    return jacobian_from_arrays(dict(zip(names, arrays, strict=False)), parameters=shapes)


def _layout(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _edited(old: str, new: str):
    """Damage that replaces a text of the layout."""

    def damage(arrays: list[np.ndarray]) -> list[np.ndarray]:
        text = arrays[0].tobytes().decode()
        assert old in text
        return [_layout(text.replace(old, new, 1)), *arrays[1:]]

    return damage


def refused(arrays, shapes, reason):
    with pytest.raises(BadReply) as caught:
        _parsed(arrays, shapes)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda a: [], "arrays"),
        (lambda a: a[:-1], "shape"),
        (lambda a: [*a, a[-1]], "shape"),
        (lambda a: [a[0], a[1][:2], *a[2:]], "shape"),
        (lambda a: [a[0], a[1][:, :1], *a[2:]], "shape"),
        (lambda a: [a[0], *[b[:0] for b in a[1:]]], "shape"),
        (lambda a: [a[0], a[1].astype(np.int64), *a[2:]], "dtype"),
        (lambda a: [a[0], a[1].astype(np.float32), *a[2:]], "dtype"),
        (lambda a: [a[0], a[1].astype(object), *a[2:]], "dtype"),
        (lambda a: [a[0], a[1] * np.nan, *a[2:]], "non-finite"),
        (lambda a: [a[0], *a[1:-1], a[-1] + np.inf], "non-finite"),
        (lambda a: [a[1], *a[1:]], "layout"),
        (lambda a: [_layout("{"), *a[1:]], "layout"),
        (lambda a: [_layout("[]")], "layout"),
        (lambda a: [_layout("7"), *a[1:]], "layout"),
        (lambda a: [_layout("[" * 100_000), *a[1:]], "layout"),
        (lambda a: [_layout('[{"kind": "dense", "name": "no"}]'), a[1]], "layout"),
        (lambda a: [_layout('[{"kind": "dense"}]'), a[1]], "layout"),
        (lambda a: [_layout('[{"kind": "linear", "weight": null, "bias": null}]')], "layout"),
        (
            lambda a: [
                _layout('[{"kind": "linear", "weight": "0.weight", "bias": null}]'),
                *a[1:3],
            ],
            "layout",
        ),
        (lambda a: [_layout(a[0].tobytes().decode()[:-1] + ", {}]"), *a[1:]], "layout"),
        (
            lambda a: [_layout(json.dumps([{"kind": "dense", "name": "0.bias"}] * 2)), *a[-1:] * 2],
            "layout",
        ),
    ],
)
def test_a_damaged_upload_is_refused_with_its_reason(damage, reason):
    arrays, shapes = _wire()
    _parsed(arrays, shapes)
    refused(damage(arrays), shapes, reason)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("narrow-maps", lambda a: [a[0], a[1][:, 2:], *a[2:]], "shape"),  # fewer places
        ("narrow-maps", lambda a: [a[0], a[1][:, :, 0], *a[2:]], "shape"),  # one axis too few
        ("narrow-maps", lambda a: [a[0], a[1][..., :6], *a[2:]], "layout"),  # half a group
        ("narrow-maps", lambda a: [a[0], a[1], a[2][:, :, :1], *a[3:]], "shape"),
        ("narrow-maps", _edited('"stride": [2, 2]', '"stride": [0, 2]'), "layout"),
        ("narrow-maps", _edited('"stride": [2, 2]', '"stride": [2, true]'), "layout"),
        ("narrow-maps", _edited('"stride": [2, 2]', f'"stride": [{2**63}, 2]'), "layout"),
        ("narrow-maps", lambda a: [a[0], a[1] * 1e15, *a[2:]], "scale"),
        ("narrow-maps", _edited('"stride": [2, 2]', '"stride": [2]'), "layout"),
        ("narrow-maps", _edited('"stride": [2, 2]', '"stride": 2'), "layout"),
        ("narrow-maps", _edited('"stride": [2, 2]', '"stride": [9, 9]'), "shape"),
        ("narrow-maps", _edited('"dilation": [1, 1]', '"dilation": [1, 99]'), "shape"),
        ("narrow-maps", _edited('"weight": "0.weight"', '"weight": "6.weight"'), "layout"),
        ("tokens-first", lambda a: [a[0], a[1] + 30, *a[2:]], "layout"),
        ("tokens-first", lambda a: [a[0], a[1] - 30, *a[2:]], "layout"),
        ("tokens-first", lambda a: [a[0], a[1].astype(np.int32), *a[2:]], "dtype"),
        ("tokens-first", lambda a: [a[0], a[1].astype(np.float64), *a[2:]], "dtype"),
        ("tokens-first", lambda a: [a[0], a[1][:, 1:], *a[2:]], "shape"),
        ("tokens-first", _edited('"bias": null', '"bias": "head.bias"'), "layout"),
        ("tokens-first", _edited('"weight": "table.weight"', '"weight": "norm.bias"'), "layout"),
    ],
)
def test_damaged_factors_are_refused_with_their_reason(name, damage, reason):
    arrays, shapes = _wire(name)
    _parsed(arrays, shapes)
    refused(damage(arrays), shapes, reason)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_bytes_in_the_layout_raise_anything_but_bad_reply(data):
    arrays, shapes = _wire(data.draw(st.sampled_from(["cnn", "narrow-maps", "tokens-first"])))
    layout = bytearray(arrays[0].tobytes())
    for _ in range(data.draw(st.integers(1, 5))):
        layout[data.draw(st.integers(0, len(layout) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadReply):
        _parsed([np.frombuffer(bytes(layout), np.uint8), *arrays[1:]], shapes)

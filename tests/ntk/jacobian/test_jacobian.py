"""The Jacobian in both representations against a plain double loop of autograd.

All in float64: a relative difference of 1e-10 leaves five digits for rounding in sums of at most
a few thousand terms.
"""

import contextlib
import functools
import gc
import json
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedntk.ntk import (
    BadReply,
    Jacobian,
    NotEnoughMemory,
    example_gradients,
    gauss_newton,
    gradient_norms,
    jacobian,
)
from fedntk.ntk.jacobian import blocks, differentiate
from fedntk.ntk.jacobian.attention import no_fast_path
from fedntk.ntk.jacobian.factors import FactoredBlock
from fedntk.ntk.payloads.jacobian_format import jacobian_from_arrays, jacobian_to_arrays
from fedntk.ntk.support import memory as ntk_memory

from ...conftest import refused
from ..arithmetic import close, normal
from ..cases import CASES, layer_and_head, make, one_by_one


@functools.cache
def loop(name: str) -> dict[str, Tensor]:
    """The definition, for a case."""
    return one_by_one(*make(name))


def flat(tensor: Tensor) -> Tensor:
    """(n, C, ...) -> (n, C, p)."""
    return tensor.reshape(*tensor.shape[:2], -1)


def flat_loop(name: str) -> Tensor:
    """The definition as one tensor (n, C, P)."""
    return torch.cat([flat(tensor) for tensor in loop(name).values()], dim=2)


@functools.cache
def made(name: str, structure: differentiate.Structure = "factored") -> Jacobian:
    """The Jacobian of a case, which tests only read."""
    return jacobian(*make(name), structure=structure)


def require_same(actual: Jacobian, expected: Jacobian) -> None:
    """Equal forms and equal bits."""
    assert actual.layout == expected.layout
    for a, b in zip(actual.blocks, expected.blocks, strict=True):
        assert all(map(torch.equal, a.arrays, b.arrays))


@pytest.fixture
def plans():
    differentiate._PLANS.clear()
    return differentiate._PLANS


@pytest.fixture(params=sorted(CASES))
def case(request):
    return request.param


@pytest.fixture(params=["dense", "factored"])
def structure(request):
    return request.param


def test_dense_tensor_and_its_columns_equal_double_loop(case, structure):
    expected = loop(case)
    jac = jacobian(*make(case), structure=structure, chunk_size=4)
    actual = jac.dense()
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].shape == expected[name].shape
        assert close(actual[name], expected[name]), name
    for block in jac.blocks:
        for name in block.names:
            columns = flat(expected[name])
            every = torch.arange(columns.shape[2])
            # many, one or two, none
            for indices in (every[::2], every[:: len(every) // 2 + 1], every[:0]):
                out = torch.empty_like(columns[:, :, indices])
                block.write_columns(name, indices, out)
                assert close(out, columns[:, :, indices])


def test_products_equal_their_definitions(case, structure):
    rows, jac = flat_loop(case), made(case, structure)
    n, num_outputs, _ = rows.shape
    assert (jac.num_examples, jac.num_outputs) == (n, num_outputs)
    kernel = torch.einsum("ncp,mcp->nm", rows, rows) / num_outputs
    assert close(jac.gram(), kernel)
    assert close(jac.squared_norms(), rows.square().sum((1, 2)))

    residual = normal(n, num_outputs, seed=0)
    change = {name: normal(*t.shape[2:], seed=k) for k, (name, t) in enumerate(loop(case).items())}
    moved = torch.cat([t.flatten() for t in change.values()])
    assert close(jac.jvp(change), rows @ moved)
    update, expected = jac.vjp(residual), torch.einsum("ncp,nc->p", rows, residual)
    assert {name: t.shape for name, t in update.items()} == {k: t.shape for k, t in change.items()}
    assert close(torch.cat([update[name].flatten() for name in change]), expected)
    assert close(jac.mean_product(residual[:, :2]), kernel @ residual[:, :2])
    assert close(jac.full_product(residual), rows @ expected)


def test_normal_matrix_and_its_products_equal_their_definitions(case, structure):
    rows, jac = flat_loop(case).flatten(0, 1), made(case, structure)
    names, matrix = list(loop(case)), rows.T @ rows
    assert close(jac.normal_matrix(names), matrix)
    size = loop(case)[names[-1]][0, 0].numel()
    assert close(jac.normal_matrix(names[-1:]), matrix[-size:, -size:])
    diagonal = jac.normal_diagonal()
    assert {name: t.shape[2:] for name, t in loop(case).items()} == {
        name: t.shape for name, t in diagonal.items()
    }
    assert close(torch.cat([diagonal[name].flatten() for name in names]), matrix.diag())


def test_gradients_of_examples_and_their_norms_equal_a_loop(case):
    """With a loss that couples all outputs of an example with its target."""
    model, x = make(case)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        flat = outputs.reshape(len(outputs), -1)
        return flat.exp().sum(1).log() * targets + flat[:, 0].square()

    targets = normal(len(x), seed=3)
    expected = one_by_one(model, x, lambda f, i: loss(f, targets[i : i + 1]))
    actual = example_gradients(model, x, targets, loss).dense()
    assert actual.keys() == expected.keys()
    for name in expected:
        assert close(actual[name], expected[name])
    squares = sum(t.reshape(len(t), -1).square().sum(1) for t in expected.values())
    assert close(gradient_norms(model, x, targets, loss, chunk_size=4), squares.sqrt())


def test_combined_outputs_have_the_combined_jacobian():
    rows, weights = flat_loop("narrow-maps"), normal(6, 3, 2, seed=1)
    combined = made("narrow-maps").combine(weights).to_dense()
    actual = torch.cat([flat(t) for t in combined.dense().values()], 2)
    assert close(actual, torch.einsum("nck,ncp->nkp", weights, rows))


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_gauss_newton_matrix_of_a_linear_model_is_the_hessian_of_its_loss(loss):
    """Which it is because the model has no curvature of its own; and the matrix's definition."""
    model, x = make("linear")
    targets = torch.softmax(normal(6, 3, seed=5), 1)
    names, shapes = ["weight", "bias"], [p.shape for p in model.parameters()]

    def value(vector: Tensor) -> Tensor:
        outputs = x @ vector[:15].view(3, 5).T + vector[15:]
        if loss == "mse":
            return (outputs - targets).square().mean() / 2
        return nn.functional.cross_entropy(outputs, targets)

    with torch.no_grad():
        ggn = gauss_newton(jacobian(model, x), model(x), loss)
        vector = nn.utils.parameters_to_vector(model.parameters())
    hessian = torch.autograd.functional.hessian(value, vector)
    assert close(ggn.normal_matrix(names), hessian)
    update = {name: normal(*s, seed=7) for name, s in zip(names, shapes, strict=True)}
    product = ggn.normal_product(update)
    moved = torch.cat([update[name].flatten() for name in names])
    assert close(torch.cat([product[name].flatten() for name in names]), hessian @ moved)
    refused("names: expected some of weight, bias, got", ggn.normal_matrix, ["scale"])


def test_gram_between_two_sets_is_a_block_of_the_joint_one(case, structure):
    (model, x), whole = make(case), made(case, structure)
    first, second = (jacobian(model, part, structure=structure) for part in (x[:2], x[2:]))
    assert close(first.gram(second), whole.gram()[:2, 2:])
    joined = Jacobian.concatenate([first, second])
    assert close(joined.gram(), whole.gram())


def test_wire_round_trip_keeps_every_bit(case, structure):
    (model, x), jac = make(case), made(case, structure)
    require_same(_parsed(list(jacobian_to_arrays(jac).values()), model.state_dict()), jac)
    with torch.no_grad():  # which the caller has switched off: nothing changes
        require_same(jacobian(model, x, structure=structure), jac)
        assert not torch.is_grad_enabled()


PATHS = {
    "linear, read out by 2.weight": ["mlp:0.weight"],
    "linear, the outputs": ["mlp:2.weight"],
    "linear, 1 position, features first": [
        *("layer-norm:0.weight", "frozen-layer:0.weight", "single-output:0.weight"),
        "shuffled:layer.weight",
    ],
    "linear, 2 positions, positions first": ["called-twice:layer.weight"],
    "linear, 3 positions, features first": ["unrolled:inner.weight"],
    "linear, 3 positions, positions first": ["gpt:blocks.1.attention.out_proj.bias"],
    "linear, summed over positions": [
        *("sequence:layer.weight", "attention:attention.in_proj_weight"),
        "cross-attention:attention.in_proj_weight",
    ],
    "bias of linear, summed over positions": ["frozen-layer:4.bias"],
    "differentiated as it is": [
        *("tied-weights:first.weight", "functional-use:layer.weight", "lstm:lstm.weight_ih_l0"),
        *("folded-positions:layer.weight", "cross-attention:attention.bias_k", "vit:token"),
    ],
    "embedding, summed over positions": ["vit:places.weight"],
    "embedding, 7 positions, positions first": ["tokens-first:table.weight"],
    "transposed-conv, 2 positions, features first": ["transposed:0.weight"],
    "transposed-conv, summed over positions": ["transposed-twice:conv.weight"],
    "bias of transposed conv, summed over positions": ["transposed:0.bias"],
    "RMSNorm, summed over positions": ["rms-norm:1.weight"],
    "LayerNorm, summed over positions": ["tokens-first:norm.weight"],
    "BatchNorm2d, summed over positions": ["batch-norm:1.weight"],
    "conv, summed over positions": ["cnn:0.weight"],
    "conv, 4 positions, positions first": ["narrow-maps:0.weight"],
    "conv, 1 position, features first": ["narrow-maps:4.weight"],
}


@pytest.mark.parametrize("path", PATHS)
def test_each_layer_takes_the_path_that_is_exact_and_cheaper(path):
    """By the counts of operations and numbers in `factors.py` and `rules.py`."""
    for name, parameter in (place.split(":") for place in PATHS[path]):
        jac = made(name)
        (block,) = [block for block in jac.blocks if parameter in block.names]
        assert block.path == path
        assert block.path in jac.describe()


@pytest.mark.parametrize(
    "name", ["narrow-maps", "tokens-first", "unrolled", "conv-3d", "layer-norm", "transposed"]
)
@pytest.mark.parametrize("features", [True, False])
def test_both_orders_of_contraction_give_the_same_gram(name, features, monkeypatch):
    """Whichever the count of operations would choose, and over several tiles and chunks."""
    rows, jac = flat_loop(name).flatten(1), made(name)
    first = slice(0, 2)
    part = Jacobian(tuple(block.rows(first) for block in jac.blocks))
    monkeypatch.setattr(FactoredBlock, "_features_first", features)
    for workspace in (1, 2000, 2**26):
        monkeypatch.setattr(blocks, "WORKSPACE", workspace)
        assert close(jac.gram() * jac.num_outputs, rows @ rows.T)
        assert close(part.gram(jac) * jac.num_outputs, rows[first] @ rows.T)
        assert close(jac.squared_norms(), rows.square().sum(1))


def test_gram_of_several_tiles_is_that_of_one(monkeypatch):
    jac = jacobian(*make("narrow-maps", num_examples=11))
    expected = jac.gram()
    monkeypatch.setattr(blocks, "TILE", 4)
    monkeypatch.setattr(blocks, "CPU_TILE", 4)
    monkeypatch.setattr(blocks.tiles, "__kwdefaults__", {"size": 4})
    kernel = jac.gram()
    assert close(kernel, expected)
    assert torch.equal(kernel, kernel.T)


def test_a_plan_serves_at_other_weights_and_single_outputs_can_be_differentiated(case, plans):
    """Each of two networks of one structure gets the Jacobian that it gets on its own."""
    model, x = make(case)
    jacobian(model, x)
    assert len(plans) == (case != "lstm")  # which holds references to its weights
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.ones_like(parameter))
    before = len(plans)
    actual = jacobian(model, x)
    assert len(plans) == before
    plans.clear()
    require_same(actual, jacobian(model, x))
    for name, some in jacobian(model, x, outputs=[0]).dense().items():
        assert close(some, actual.dense()[name][:, :1])


def test_a_residual_network_is_examined_once_whatever_the_number_of_images(plans, monkeypatch):
    """Torchvision's hold the class of their norms, or a partial of one; pooling knows sizes."""
    examined, find = [], differentiate.find_layers
    monkeypatch.setattr(differentiate, "find_layers", lambda *a: examined.append(1) or find(*a))
    pooled = nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(pooled, nn.Linear(4, 3)).to(memory_format=torch.channels_last)
    model.kind, model.norm = nn.BatchNorm2d, functools.partial(nn.GroupNorm, 2)
    for n in (5, 3):
        images = torch.randn(n, 2, 6, 6).contiguous(memory_format=torch.channels_last)
        jacobian(model, images, chunk_size=2)
    assert len(examined) == len(plans) == 1


def test_a_network_that_changes_between_chunks_is_examined_anew():
    """Four chunks: by the examples, a layer is read by a function besides or called again."""

    def use(layer: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, layer.weight, layer.bias) if x.mean() > 0 else layer(x)

    model = layer_and_head(5, 5, use).double()
    x = normal(4, 5, seed=1)
    x[:3] = -x[:3].abs()
    x[3] = x[3].abs()
    actual = jacobian(model, x, chunk_size=1)
    assert "since its layer's rule does not hold" in actual.describe()
    for name, tensor in jacobian(model, x, structure="dense").dense().items():
        assert close(actual.dense()[name], tensor), name
    model.apply_layer = lambda layer, x: torch.relu(layer(x).relu() if x.mean() > 0 else layer(x))
    actual = jacobian(model, x, chunk_size=1).dense()
    for name, tensor in jacobian(model, x, structure="dense").dense().items():
        assert close(actual[name], tensor), name


def test_plans_are_few_and_hold_no_network(plans):
    model, x = make("mlp")
    alive = weakref.ref(model)
    jacobian(model, x)
    del model
    gc.collect()
    assert alive() is None
    for width in range(1, differentiate.MAX_PLANS + 3):
        jacobian(nn.Linear(width, 2), torch.ones(1, width))
    assert len(plans) == differentiate.MAX_PLANS


def test_training_mode_and_weights_are_left_as_they_were():
    model, x = make("batch-norm")
    before = {k: v.clone() for k, v in model.train().state_dict().items()}
    jacobian(model, x)
    assert model.training
    assert model[1].training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(not module._forward_hooks for module in model.modules())
    model, x = make("attention")
    jacobian(model, x)
    assert [name for name, _ in model.attention.named_children()] == ["out_proj"]
    assert "forward" not in vars(model.attention)
    first, second = no_fast_path(model), no_fast_path(model)
    for block in (first, second):
        block.__enter__()
    for block in (first, second):  # in the order in which they began, as in two threads
        assert not torch.backends.mha.get_fastpath_enabled()
        block.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_cannot_be_differentiated_is_refused():
    model, x = make("mlp")
    refused("at least one example", jacobian, model, x[:0])
    refused("structure", jacobian, model, x, structure="sparse")
    with pytest.raises(ValueError, match=r"outputs of shape \(n, \.\.\.\), got \(5,\) for n = 1"):
        jacobian(nn.Sequential(nn.Linear(5, 5), nn.Flatten(0)), x.float())
    refused("use reduction='none'", gradient_norms, model, x, x, lambda f, y: (f - y[:, :3]).sum())
    refused("cannot be differentiated; pass x.detach", jacobian, model, x.clone().requires_grad_())
    refused("trainable parameters", jacobian, model.requires_grad_(requires_grad=False), x)
    with pytest.raises(ValueError, match="different parameters"):
        Jacobian.concatenate([jacobian(*make("mlp")), jacobian(*make("linear"))])


def test_what_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    jac = jacobian(*make("mlp"))
    monkeypatch.setattr(ntk_memory, "available_memory", lambda device: 100)
    monkeypatch.setattr(differentiate, "_PLANS", {})
    refused(r"kernel of 6 x 6 examples needs 0.1 GB", jac.gram, error=NotEnoughMemory)
    with pytest.raises(NotEnoughMemory, match="dense Jacobian of one example x 3 outputs"):
        jacobian(*make("mlp"), structure="dense")


@functools.cache
def _wire(name: str) -> tuple[list[np.ndarray], dict[str, Tensor]]:
    return list(jacobian_to_arrays(made(name)).values()), make(name)[0].state_dict()


def _parsed(arrays: list[np.ndarray], weights: dict[str, Tensor]) -> Jacobian:
    names = ["layout", *(f"block-{k:03}" for k in range(len(arrays)))]
    named = dict(zip(names, arrays, strict=False))
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    return jacobian_from_arrays(named, parameters=shapes, weights=weights)


def _layout(text: str):
    """Damage that replaces the layout."""
    return _changed(0, lambda _: np.frombuffer(text.encode(), dtype=np.uint8))


def _changed(index: int, change):
    """Damage to one of the arrays."""
    return lambda arrays: [*arrays[:index], change(arrays[index]), *arrays[index + 1 :]]


def _edited(old: str, new: str):
    """Damage that replaces a text of the layout."""

    def damage(arrays: list[np.ndarray]) -> list[np.ndarray]:
        text = arrays[0].tobytes().decode()
        assert old in text
        return _layout(text.replace(old, new, 1))(arrays)

    return damage


TWICE = json.dumps([{"kind": "dense", "name": "0.bias"}] * 2)
OF_A_CONV = '[{"kind": "linear", "weight": "0.weight", "bias": null}]'
DAMAGE = {
    "cnn": [
        (lambda _: [], "arrays"),
        (lambda a: a[:-1], "shape"),
        (lambda a: [*a, a[-1]], "shape"),
        (_changed(1, lambda b: b[:2]), "shape"),
        (_changed(1, lambda b: b[:, :1]), "shape"),
        (lambda a: [a[0], *[b[:0] for b in a[1:]]], "shape"),
        (_changed(1, lambda b: b.astype(np.float32)), "dtype"),
        (_changed(1, lambda b: b * np.nan), "non-finite"),
        (_changed(-1, lambda b: b + np.inf), "non-finite"),
        (lambda a: [a[1], *a[1:]], "layout"),
        (_layout("{"), "layout"),
        (_layout("[" * 100_000), "layout"),
        (_layout("[]"), "layout"),
        (lambda a: _layout('[{"kind": "dense", "name": "no"}]')(a[:2]), "layout"),
        (lambda a: _layout('[{"kind": "linear", "weight": null, "bias": null}]')(a[:1]), "layout"),
        (lambda a: _layout(OF_A_CONV)(a[:3]), "layout"),
        (lambda a: _layout(a[0].tobytes().decode()[:-1] + ", {}]")(a), "layout"),
        (lambda a: _layout(TWICE)([a[0], a[-1], a[-1]]), "layout"),
    ],
    "narrow-maps": [
        (_changed(1, lambda b: b[:, 2:]), "shape"),  # fewer places
        (_changed(1, lambda b: b[:, :, 0]), "shape"),  # one axis too few
        (_changed(1, lambda b: b[..., :6]), "layout"),  # half a group
        (_changed(2, lambda b: b[:, :, :1]), "shape"),
        (_changed(1, lambda b: b * 1e15), "scale"),
        (_edited('"stride": [2, 2]', '"stride": [0, 2]'), "layout"),
        (_edited('"stride": [2, 2]', '"stride": [2, true]'), "layout"),
        (_edited('"stride": [2, 2]', f'"stride": [{2**63}, 2]'), "layout"),
        (_edited('"stride": [2, 2]', '"stride": [2]'), "layout"),
        (_edited('"stride": [2, 2]', '"stride": [9, 9]'), "shape"),
        (_edited('"weight": "0.weight"', '"weight": "6.weight"'), "layout"),
    ],
    "mlp": [
        (_edited('"readout": "2.weight"', '"readout": "9.weight"'), "layout"),
        (_edited('"readout": "2.weight"', '"readout": "0.weight"'), "layout"),
        (_edited('"readout": "2.weight"', '"readout": "2.bias"'), "layout"),
        (_edited('"readout": "2.weight"', '"readout": ["2.weight"]'), "layout"),
        (_edited('"readout": "2.weight"', '"readout": null'), "layout"),
        (_edited('"readout": "2.weight"', '"readout": ""'), "shape"),  # 7 outputs
        (_edited('"readout": ""', '"readout": "2.weight"'), "layout"),
        (_edited('"kind": "readout"', '"kind": "linear"'), "layout"),
        (_edited('"kind": "readout"', '"kind": "readout", "more": 1'), "layout"),
        (_edited('"bias": "0.bias"', '"bias": "2.bias"'), "layout"),
        (_changed(2, lambda b: b[:, 1:]), "shape"),
        (_changed(2, lambda b: b[:, None]), "shape"),
        (_changed(4, lambda b: b[:, 1:]), "shape"),
        (_changed(4, lambda b: b[:, 0]), "shape"),
        (_changed(2, lambda b: b * np.nan), "non-finite"),
        (_changed(2, lambda b: b + 1e15), "scale"),
    ],
    "transposed": [
        (_changed(1, lambda b: b[:, :1]), "shape"),
        (_changed(1, lambda b: b[..., :6]), "shape"),
        (_changed(2, lambda b: b[:, :, :0]), "shape"),
        (_changed(2, lambda b: b[:, 0]), "shape"),
        (_changed(2, lambda b: b[..., :35]), "layout"),
        (_changed(2, lambda b: np.tile(b, 13)), "layout"),  # more groups than channels
        (_edited('"bias": null', '"bias": "0.bias"'), "layout"),
        (_edited('"weight": "0.weight"', '"weight": "0.bias"'), "layout"),
        (_edited('"weight": "0.weight"', '"weight": "5.weight"'), "layout"),
    ],
    "tokens-first": [
        (_changed(1, lambda b: b + 30), "layout"),
        (_changed(1, lambda b: b - 30), "layout"),
        (_changed(1, lambda b: b.astype(np.int32)), "dtype"),
        (_changed(1, lambda b: b.astype(np.float64)), "dtype"),
        (_changed(1, lambda b: b[:, 1:]), "shape"),
        (_edited('"bias": null', '"bias": "head.bias"'), "layout"),
        (_edited('"weight": "table.weight"', '"weight": "norm.bias"'), "layout"),
    ],
}


@pytest.mark.parametrize(
    ("name", "damage", "reason"), [(name, *row) for name, rows in DAMAGE.items() for row in rows]
)
def test_a_damaged_upload_is_refused_with_its_reason(name, damage, reason):
    arrays, shapes = _wire(name)
    _parsed(arrays, shapes)
    refused(f"^{reason}: ", _parsed, damage(arrays), shapes, error=BadReply)


def test_what_needs_weights_is_refused_without_them_and_a_huge_identity_is_not_built():
    arrays, weights = _wire("mlp")
    named = dict(zip(["layout", *(f"block-{k:03}" for k in range(4))], arrays, strict=True))
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    refused("^layout: ", jacobian_from_arrays, named, parameters=shapes, error=BadReply)
    arrays, weights = _wire("linear")
    assert b'"readout": ""' in arrays[0].tobytes()
    named = dict(zip(["layout", "block-000", "block-001"], arrays, strict=True))
    huge = {"weight": (10**7, 5), "bias": (10**7,)}
    refused(
        "^shape: ", jacobian_from_arrays, named, parameters=huge, weights=weights, error=BadReply
    )


ACTIVATIONS = [
    nn.Identity(), nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.Tanh(), nn.Sigmoid(),
    nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.ELU(), nn.CELU(), nn.SELU(), nn.LeakyReLU(),
    nn.Softplus(), nn.Mish(), nn.Hardtanh(), nn.Hardswish(), nn.Hardsigmoid(),
    nn.Threshold(0.1, 0.2), nn.Sequential(nn.Tanh(), nn.ReLU()),
]  # fmt: skip
OTHERS = [nn.Softmax(1), nn.LayerNorm(7), nn.PReLU(7), nn.GLU()]


@pytest.mark.parametrize("activation", ACTIVATIONS + OTHERS, ids=str)
def test_only_what_takes_each_number_by_itself_stands_between_layers_that_are_read_out(activation):
    """Exact in any case, also with no bias, a frozen one, and the last layer's weights at zero."""
    hidden, last = nn.Linear(5, 8 if isinstance(activation, nn.GLU) else 7), nn.Linear(7, 3)
    if isinstance(activation, nn.GLU):
        last = nn.Linear(4, 3, bias=False)
    model = nn.Sequential(hidden, activation, last).double()
    hidden.bias.requires_grad_(requires_grad=isinstance(activation, nn.Tanh))
    x = normal(6, 5, seed=2)
    for zero in (False, True):
        if zero:
            nn.init.zeros_(last.weight)
        jac, expected = jacobian(model, x), jacobian(model, x, structure="dense")
        assert (jac.blocks[0].kind == "readout") == (activation in ACTIVATIONS)
        for name, tensor in expected.dense().items():
            assert close(jac.dense()[name], tensor), name
        assert close(jac.gram(), expected.gram())


def test_jacobians_at_different_weights_keep_their_own():
    model, x = make("mlp")
    before = jacobian(model, x)
    rows = flat(torch.cat([flat(t) for t in before.dense().values()], 2)).clone()
    with torch.no_grad():
        model[2].weight.mul_(-2.0)
    after = jacobian(model, x)
    both = torch.cat([rows, torch.cat([flat(t) for t in after.dense().values()], 2)])
    kernel = torch.einsum("ncp,mcp->nm", both, both) / 3
    assert close(before.gram(after), kernel[:6, 6:])
    assert close(Jacobian.concatenate([before, after]).gram(), kernel)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_no_bytes_in_the_layout_raise_anything_but_bad_reply(data):
    arrays, shapes = _wire(data.draw(st.sampled_from(sorted(DAMAGE))))
    layout = bytearray(arrays[0].tobytes())
    for _ in range(data.draw(st.integers(1, 5))):
        layout[data.draw(st.integers(0, len(layout) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadReply):
        _parsed([np.frombuffer(bytes(layout), np.uint8), *arrays[1:]], shapes)

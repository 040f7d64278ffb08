"""Networks that move the rows of their batch, against one example at a time, in float64.

All have rows that are in order in some batches and not in others; what was found of one batch must
not be taken for another.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedntk.ntk import entk_features, gradient_norms, jacobian
from fedntk.ntk.jacobian import differentiate
from fedntk.ntk.jacobian.rows import draw_weights, keeps_rows, rows_of_examples

from ..arithmetic import close, normal
from ..cases import Net, one_by_one

TOKENS = torch.tensor([
    [5, 4, 3, 2], [9, 3, 2, 0], [6, 1, 0, 0], [3, 0, 0, 0], [7, 5, 1, 2], [2, 8, 0, 0], [4, 2, 7, 0]
])  # fmt: skip
SHORT = TOKENS * torch.tensor([[1, 0, 0, 0]] * 3 + [[1, 1, 0, 0]] * 4)
REPEATED = TOKENS[[2, 1, 0, 4, 5, 5, 3]]  # two are the same, in a second chunk of four


def order(x: Tensor) -> Tensor:
    return x.sum(tuple(range(1, x.ndim))).argsort()


def by_index(m: Any, x: Tensor) -> Tensor:
    o = order(x)
    return m.head(torch.tanh(m.second(torch.tanh(m.first(x[o])))))[o.argsort()]


def without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        o = order(x)
        x = x[o]
    h = m.first(x)
    put_back = torch.empty_like(h)
    put_back[o] = h
    return m.head(torch.tanh(m.second(torch.tanh(put_back))))


def by_scatter(m: Any, x: Tensor) -> Tensor:
    o = order(x)
    h = torch.tanh(m.first(x.gather(0, o[:, None].expand(-1, 5))))
    return m.head(torch.zeros_like(h).scatter(0, o[:, None].expand_as(h), h))


def by_matrix(m: Any, x: Tensor) -> Tensor:
    p = torch.eye(len(x), dtype=x.dtype)[order(x)]
    return p.T @ m.head(torch.tanh(m.first(p @ x)))


def pairs(m: Any, x: Tensor) -> Tensor:
    """Neighbours change places, by a view that depends on the number of examples."""
    whole = len(x) // 2 * 2

    def swap(h: Tensor) -> Tensor:
        return torch.cat([h[:whole].view(-1, 2, 6).flip(1).reshape(whole, 6), h[whole:]])

    return m.head(swap(torch.tanh(m.second(swap(torch.tanh(m.first(x)))))))


def experts(m: Any, x: Tensor) -> Tensor:
    """Each of two layers gets some examples, and both are put together again."""
    chosen = x[:, 0] > 0
    h = x.new_zeros(len(x), 6)
    h[chosen] = m.first(x[chosen])
    h = h.index_add(0, (~chosen).nonzero().flatten(), 2 * m.first(x[~chosen]))
    return m.head(torch.tanh(h))


class Moved(torch.autograd.Function):
    """A user's function, which the graph does not show."""

    @staticmethod
    def forward(ctx, h, o):
        ctx.o = o
        return h[o]

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(gradient).index_copy(0, ctx.o, gradient), None


def by_function(m: Any, x: Tensor) -> Tensor:
    o = order(x)
    return Moved.apply(m.head(torch.tanh(m.first(x[o]))), o.argsort())


def mixed(m: Any, x: Tensor) -> Tensor:
    """Each row of a layer has gradients of all examples."""
    h = m.first(x)
    total = h.sum(0, keepdim=True)
    return m.head(torch.tanh(h + (total - total.detach())))


def lengths(x: Tensor) -> Tensor:
    return (x != 0).sum(1)


def tokens_by_length(m: Any, x: Tensor) -> Tensor:
    o = lengths(x).argsort(descending=True, stable=True)
    return m.head(torch.tanh(m.first(m.table(x[o]).mean(1))))[o.argsort()]


def pack(m: Any, x: Tensor) -> nn.utils.rnn.PackedSequence:
    return nn.utils.rnn.pack_padded_sequence(
        m.table(x), lengths(x), batch_first=True, enforce_sorted=False
    )


def packed(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.lstm(pack(m, x))[1][0][-1]))


def packed_layer(m: Any, x: Tensor) -> Tensor:
    """A layer of all tokens of the batch, which may be as many as the examples."""
    parts = pack(m, x)
    parts = parts._replace(data=torch.tanh(m.first(parts.data)))
    return m.head(nn.utils.rnn.pad_packed_sequence(parts, batch_first=True)[0].sum(1))


def distinct(m: Any, x: Tensor) -> Tensor:
    """Each text once, however often it comes."""
    texts, place = x.unique(dim=0, return_inverse=True)
    return m.head(torch.tanh(m.first(m.table(texts).mean(1))))[place]


NUMBERS = [by_index, without_gradients, by_scatter, by_matrix, pairs, experts, by_function, mixed]
TEXTS = [tokens_by_length, packed, packed_layer, distinct]


def network(use: Callable[[Any, Tensor], Tensor]) -> Net:
    """Two layers and a head, and a table, used in some way."""
    torch.default_generator.manual_seed(5)
    layers = {"first": nn.Linear(5, 6), "second": nn.Linear(6, 6), "head": nn.Linear(6, 3)}
    layers["table"] = nn.Embedding(10, 5, padding_idx=0)
    if use is packed:  # no plan of a network with an LSTM is kept
        layers["lstm"] = nn.LSTM(5, 6, batch_first=True)
    return Net(use, **layers).double()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of packed texts, by torch
@pytest.mark.parametrize("chunk_size", [None, 4, 1])
@pytest.mark.parametrize("use", NUMBERS + TEXTS, ids=lambda use: use.__name__)
def test_each_example_gets_its_own_row(use, chunk_size):
    """After examples in order, whose plan is kept, ones in another."""
    model = network(use)
    x = normal(7, 5, seed=1)
    batches = (x[order(x)], x, x.flip(0)) if use in NUMBERS else (TOKENS, REPEATED, SHORT)
    targets, loss = torch.arange(7) % 3, nn.CrossEntropyLoss(reduction="none")
    for examples in batches:
        expected = one_by_one(model, examples)
        actual = jacobian(model, examples, chunk_size=chunk_size)
        for name, tensor in actual.dense().items():
            assert close(tensor, expected[name]), name
        rows = torch.cat([t.flatten(2) for t in expected.values()], 2)
        assert close(actual.gram(), torch.einsum("ncp,mcp->nm", rows, rows) / 3)
        features = entk_features(
            model, examples, rows.shape[2], 0, 1, dtype=torch.float64, chunk_size=chunk_size
        )
        assert close(features, rows[:, 1])
        with torch.no_grad():
            slopes = torch.softmax(model(examples), 1) - functional.one_hot(targets, 3)
        gradients = torch.einsum("nc,ncp->np", slopes, rows)
        norms = gradient_norms(model, examples, targets, loss, chunk_size=chunk_size)
        assert close(norms, gradients.norm(dim=1))


def test_the_form_does_not_depend_on_the_order_of_the_examples():
    """Jacobians of clients with other examples can be stacked."""
    x = normal(7, 5, seed=1)
    forms = {jacobian(network(by_index), part).layout for part in (x[order(x)], x, x.flip(0))}
    assert len(forms) == 1


def test_a_layer_without_a_row_for_each_example_is_differentiated_as_it_is():
    """Only the second chunk has a text twice: all chunks get the form that serves them all."""
    model = network(distinct)
    differentiate._PLANS.clear()
    assert "embedding, 4 positions" in jacobian(model, TOKENS).describe()
    actual = jacobian(model, REPEATED, chunk_size=4).describe()
    assert "differentiated as it is, since its layer's rule does not hold" in actual
    assert "embedding" not in actual


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda h: h[torch.tensor([1, 0, 2, 3])],
    "flip": lambda h: h.flip(0),
    "transposed": lambda h: h[:, :4].t() @ torch.eye(4),
    "permuted": lambda h: h.view(4, 2, 3).permute(1, 0, 2).reshape(4, 6),
    "negative axis": lambda h: h[:, :4].transpose(-1, -2),
    "view": lambda h: h.view(2, 2, 6).transpose(0, 1).reshape(4, 6),
    "other view": lambda h: h.view(2, 2, 6).softmax(1).view(4, 6),
    "sum": lambda h: h[:, None, :4].expand(4, 4, 4).sum(0),
    "softmax": lambda h: h.softmax(0),
    "cumulated": lambda h: h.cumsum(-2),
    "left of a product": lambda h: torch.ones(4, 4) @ h,
    "expanded": lambda h: h[:, :4].expand(4, 4, 4)[:, 1],
    "spread": lambda h: torch.ones(4, 4) * h.sum(1),
    "padded": lambda h: functional.pad(h, (0, 0, 1, -1)),
    "norm": lambda h: functional.layer_norm(h, h.shape),
    "batch norm": lambda h: functional.batch_norm(h, None, None, training=True),
    "mean": lambda h: h - h.mean(),
    "sorted": lambda h: h.sort(0)[0],
}
STAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda h: torch.relu(2 * h + 1) / 3 - h.tanh(),
    "view": lambda h: h.view(4, 2, 3).transpose(1, 2).flatten(1),
    "whole slices": lambda h: h[0:4][:, None][::1].flatten(1) + h[:],
    "positions": lambda h: functional.linear(h.view(4, 3, 2), torch.ones(5, 2), torch.ones(5)),
    "axes": lambda h: h.softmax(1).sum(-1, keepdim=True).squeeze(1)[:, None].expand(4, 3),
    "images": lambda h: functional.max_pool2d(
        functional.conv2d(functional.pad(h, (1, 1)).view(4, 1, 2, 4), torch.ones(2, 1, 1, 1)), 2
    ).mean((2, 3)),
    "loss": lambda h: functional.cross_entropy(h, torch.arange(4), reduction="none"),
    "norm": lambda h: functional.group_norm(functional.layer_norm(h, (6,)), 2),
}


@pytest.mark.parametrize("name", [*MOVES, *STAYS])
def test_a_graph_shows_that_rows_stay_only_where_they_do(name):
    """By the derivative of each row of outputs by each row of the point."""
    point = normal(4, 6, seed=2).float().requires_grad_() * 1
    outputs = (MOVES | STAYS)[name](point)
    stays = all(
        not torch.autograd.grad(row.sum(), point, retain_graph=True)[0][torch.arange(4) != i].any()
        for i, row in enumerate(outputs)
    )
    assert stays == (name in STAYS)
    assert keeps_rows(outputs, [point]) == stays


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_found_by_weights_or_not_at_all(dtype):
    """A permutation has rows; mixed, shared or missing rows have none."""
    n = 300
    weights, examples = draw_weights(n, torch.ones(1, dtype=dtype)), normal(n, seed=4).argsort()
    gradients = normal(n, 4, seed=3).to(dtype)
    gradients[7] = 0  # acts on nothing
    assert torch.equal(
        rows_of_examples(gradients, weights[examples, None] * gradients, weights),
        examples.argsort(),
    )
    marked = weights[:, None] * gradients
    mixed, twice = marked.clone(), marked.clone()
    mixed[3] += 0.01 * gradients[4]
    twice[3] = weights[4] * gradients[3]
    assert rows_of_examples(gradients, mixed, weights) is None
    assert rows_of_examples(gradients, twice, weights) is None
    assert rows_of_examples(gradients[1:], marked[1:], weights) is None

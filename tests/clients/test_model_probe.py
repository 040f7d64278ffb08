"""Networks and batches that cannot be trained on are refused before a step; sparse ones can."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from fedntk.clients import (
    DFedSAMClient,
    DittoClient,
    LocalSGD,
    NTKFLClient,
    SCAFFOLDClient,
    SGDClient,
)
from fedntk.clients.core.weights import NamedArrays

TOKENS = torch.randint(0, 6, (9, 4), generator=torch.Generator().manual_seed(0))
X, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(1)), torch.arange(9) % 3


def embedding(kind, *, sparse):
    torch.manual_seed(0)
    mean = [] if kind is nn.EmbeddingBag else [Mean()]
    return nn.Sequential(kind(6, 5, sparse=sparse), *mean, nn.Linear(5, 3))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    "options",
    [{}, {"sgd": LocalSGD(batch_size=4, momentum=0.9, weight_decay=0.1)}, {"option": "I"}],
)
def test_sparse_embeddings_are_trained_as_dense_ones(kind, options):
    """With equal tokens in a batch, whose rows a sparse gradient has twice."""
    make = SCAFFOLDClient if "option" in options else SGDClient
    found = []
    for sparse in (False, True):
        client = make(
            embedding(kind, sparse=sparse), TOKENS, Y, **{"sgd": LocalSGD(batch_size=4), **options}
        )
        arrays = client.model_weights()
        zero = {name: np.zeros_like(array) for name, array in arrays.items()}
        sent = {"arrays": arrays} | ({"corrections": zero} if "option" in options else {})
        found.append(client.fit(NamedArrays(sent), {"proximal-mu": 0.0})[0])
    for dense, sparse in zip(*found, strict=True):
        np.testing.assert_allclose(sparse, dense, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # bags, dense ones as well
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_sparse_embeddings_have_the_rows_of_dense_ones(kind, structure):
    uploads = []
    for sparse in (False, True):
        client = NTKFLClient(embedding(kind, sparse=sparse), TOKENS, Y, structure=structure)
        uploads.append(client.upload(client.get_parameters({}), {}).jacobian.dense())
    for name, rows in uploads[0].items():
        assert uploads[1][name].layout == torch.strided
        torch.testing.assert_close(uploads[1][name], rows)


class Training(nn.Module):
    """Returns what `change` makes of its scores while it trains."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.change = nn.Linear(4, 3), change

    def forward(self, x):
        return self.change(self.layer(x)) if self.training else self.layer(x)


OUTPUTS = {
    "a tuple": lambda scores: (scores, scores),
    "a list": lambda scores: [scores],
    "a dict": lambda scores: {"logits": scores, "aux": scores},
    r"a Tensor of shape \(9, 4\)": lambda scores: torch.cat([scores, scores[:, :1]], 1),
    r"a Tensor of shape \(9, 3, 1\)": lambda scores: scores.unsqueeze(2),
    r"a Tensor of shape \(8, 3\)": lambda scores: scores[1:],
}


@pytest.mark.parametrize("said", sorted(OUTPUTS))
@pytest.mark.parametrize("make", [SGDClient, DittoClient, DFedSAMClient])
def test_other_outputs_in_training_are_refused_before_a_step(said, make):
    client = make(Training(OUTPUTS[said]), X, Y, seed=0)
    before = client.model_weights()
    with pytest.raises(ValueError, match=rf"scores \(9, 3\) in training mode.* got {said};"):
        client.sgd.descend(client, list(before.values()), X, client.targets, {})
    for name, array in client.model_weights().items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize(("n", "batch_size", "rate"), [(1, 32, 1.0), (9, 1, 1.0), (9, 32, 0.1)])
def test_one_example_under_batch_norm_is_refused(n, batch_size, rate):
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    options = {"sgd": LocalSGD(batch_size=batch_size), "sampling_rate": rate}
    client = SGDClient(network, X[:n], Y[:n], **options)
    with pytest.raises(ValueError, match=r"x: expected batches of at least 2.*BatchNorm.* GroupN"):
        client.fit(client.get_parameters({}), {})
    images = SGDClient(
        nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 3)),
        X[:n], Y[:n], **options,
    )  # fmt: skip
    images.fit(images.get_parameters({}), {})  # several values per channel can be normalised


PAIRS = [None if i % 7 == 0 else (torch.ones(4) * i, i % 3) for i in range(20)]
COLLATED = {
    "drops": lambda items: default_collate([item for item in items if item is not None]),
    "returns None": lambda items: None,
    "returns nothing": lambda items: (),
    "fails": lambda items: items[0]["x"],
    "leaves out the first": lambda items: default_collate(items[1:] + items[1:2]),
}


@pytest.mark.parametrize("name", sorted(COLLATED))
def test_a_collate_fn_that_loses_examples_is_refused_with_the_cure(name):
    for pairs, size in ((PAIRS, 8), (PAIRS[1:], 1)):
        loader = DataLoader(pairs, batch_size=size, collate_fn=COLLATED[name])
        with pytest.raises(ValueError, match=r"^x: .*torch\.utils\.data\.Subset"):
            trained(loader)


def trained(loader):
    client = SGDClient(nn.Linear(4, 3), loader)
    return client.fit(client.get_parameters({}), {})


def test_a_dataset_that_holds_none_is_refused_with_the_cure():
    with pytest.raises(ValueError, match=r"NoneType.*every example must come out .*Subset"):
        SGDClient(nn.Linear(4, 3), PAIRS)


def test_a_collate_fn_that_writes_over_its_items_changes_none():
    def centre(items):
        for x, _ in items:
            x.sub_(1)
        return default_collate(items)

    pairs = [(torch.full((4,), float(i)), i % 3) for i in range(9)]
    client = SGDClient(nn.Linear(4, 3), DataLoader(pairs, collate_fn=centre))
    for _ in range(2):
        x, _ = client.training_examples({})
        assert x[:, 0].tolist() == [i - 1.0 for i in range(9)]

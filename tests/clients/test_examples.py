"""Clients take examples in the forms that people have, or say in one line what they expected."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from fedntk.clients import (
    ModelClient,
    SGDClient,
    TCTClient,
    get_weights,
)
from fedntk.ntk import one_hot

N = 11
X = torch.randn(N, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3


def network(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, outputs)
        )


class Dicts(Dataset[dict[str, Any]]):
    """Items as of Flower's quickstart; `names` are the keys, `more` other entries."""

    def __init__(self, names: tuple[str, str] = ("img", "label"), **more: Any) -> None:
        self.names, self.more = names, more

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return dict(zip(self.names, (X[i], int(Y[i])), strict=True)) | self.more


class Augmented(Dicts):
    """Adds noise from all three global generators."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        noise = random.random() + np.random.random() + torch.rand(())  # noqa: NPY002, S311
        return {"img": X[i] + noise, "label": int(Y[i])}


def pairs() -> list[tuple[Tensor, int]]:
    return [(X[i], int(Y[i])) for i in range(N)]


def as_pairs(items: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    return torch.stack([item["img"] for item in items]), torch.tensor([i["label"] for i in items])


HUGGING_FACE = datasets.Dataset.from_dict({"image": X.numpy().tolist(), "label": Y.tolist()})
TWICE = TensorDataset(torch.cat([X, X]), torch.cat([Y, Y]))
FORMS: dict[str, Any] = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "float64 arrays": lambda: (X.double().numpy(), Y.numpy()),
    "reversed arrays": lambda: (X.flip(0).numpy()[::-1], Y.flip(0).numpy()[::-1]),
    "big-endian arrays": lambda: (X.numpy().astype(">f4"), Y.numpy().astype(">i4")),
    "labels in a list": lambda: (X, Y.tolist()),
    "labels of uint16": lambda: (X, Y.numpy().astype("uint16")),
    "labels of uint64": lambda: (X, Y.numpy().astype("uint64")),
    "labels (n, 1)": lambda: (X, Y[:, None]),
    "one-hot floats": lambda: (X.numpy(), np.eye(3, dtype=np.float32)[Y.numpy()]),
    "dataset": lambda: (TensorDataset(X, Y),),
    "list of pairs": lambda: (pairs(),),
    "dataset of dicts": lambda: (Dicts(),),
    "other keys": lambda: (Dicts(("image", "target"), id=3),),
    "subset": lambda: (Subset(TWICE, range(N)),),
    "sampler": lambda: (DataLoader(TWICE, batch_size=2, sampler=SubsetRandomSampler(range(N))),),
    "loader that drops": lambda: (DataLoader(Dicts(), batch_size=4, shuffle=True, drop_last=True),),
    "loader with workers": lambda: (DataLoader(Dicts(), batch_size=4, num_workers=2),),
    "loader with a collate_fn": lambda: (DataLoader(Dicts(), batch_size=3, collate_fn=as_pairs),),
    "float64 loader": lambda: (DataLoader(TensorDataset(X.double(), one_hot(Y, 3))),),
    "Hugging Face": lambda: (DataLoader(HUGGING_FACE.with_format("torch"), shuffle=True),),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_each_example_once_and_in_order(form):
    """To the bit: what a client computes of them is then the same."""
    data = FORMS[form]()
    given = {"x_test": data[0]} | ({"y_test": data[1]} if len(data) > 1 else {})
    client = ModelClient(network(), *data, **given)
    for x, targets in (
        (client.inputs, client.targets),
        (client.test_inputs, client.test_targets),
        client.training_examples({"server-round": 3}),
    ):
        assert torch.equal(x, X)
        assert torch.equal(targets, one_hot(Y, 3))
        assert (x.dtype, targets.dtype) == (torch.float32, torch.float32)


def test_examples_take_the_dtype_of_the_models_parameters_and_are_not_copied_if_they_have_it():
    """Whole numbers, such as tokens, stay for a model that takes them."""
    client = ModelClient(network(), X, Y)
    assert client.inputs is client.test_inputs
    assert client.inputs.data_ptr() == X.data_ptr()
    for data in ((X.numpy(), Y), (DataLoader(TensorDataset(X, Y), batch_size=4),)):
        assert ModelClient(network().double(), *data).inputs.dtype == torch.float64
    text = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))
    assert ModelClient(text, torch.randint(9, (N, 5)), Y).inputs.dtype == torch.int64


@pytest.mark.parametrize(
    ("dataset", "columns"),
    [
        (Dicts(("scan", "diagnosis")), ("scan", "diagnosis")),
        (Dicts(coarse_label=1, labels=2), ("img", "label")),
        ([(i, X[i], 0.5, int(Y[i])) for i in range(N)], (1, 3)),
    ],
)
def test_columns_say_which_entries_count(dataset, columns):
    with pytest.raises(ValueError, match=r"say which two with columns=\("):
        ModelClient(network(), dataset)
    client = ModelClient(network(), dataset, columns=columns)
    assert torch.equal(client.inputs, X)
    assert torch.equal(client.targets, one_hot(Y, 3))


# -------------------------------------------------------------------------------- augmentation


def augmented(server_round: int, **options: Any) -> Tensor:
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True)
    client = SGDClient(network(), loader, **options)
    return client.training_examples({"server-round": server_round})[0]


def test_all_exchanges_of_a_round_see_the_same_augmented_examples():
    """A client is made anew for each message; the next round, or another client, sees others."""
    first = augmented(1)
    assert not torch.equal(first, X)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)  # what others draw plays no part
    assert torch.equal(first, augmented(1))
    for other in (augmented(2), augmented(1, seed=(0, 1))):
        assert not torch.equal(first, other)


def test_evaluation_does_not_change_with_the_round():
    weights = get_weights(network())

    def evaluate(server_round: int, **options: Any) -> Any:
        client = SGDClient(network(), Augmented(), **options)
        return client.evaluate(weights, {"server-round": server_round})

    assert evaluate(1) == evaluate(2)
    assert evaluate(1, x_test=Augmented()) == evaluate(2, x_test=Augmented())
    assert evaluate(1) != evaluate(1, seed=(1,))


def test_tct_has_the_same_examples_through_stage_2_and_others_in_each_round_of_stage_1(tmp_path):
    def client() -> TCTClient:
        return TCTClient(network(), Augmented(), cache=tmp_path, seed=(0, 3))

    assert torch.equal(client().inputs, client().inputs)
    first, second = (client().training_examples({"server-round": r})[0] for r in (1, 2))
    assert not torch.equal(first, second)
    assert not torch.equal(first, client().inputs)


def test_global_generators_are_as_they_were():
    def states() -> tuple[Any, ...]:
        legacy = np.random.get_state()  # noqa: NPY002
        return random.getstate(), legacy[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    before = states()
    augmented(1)
    assert states() == before

    class Failing(Augmented):
        def __getitem__(self, i: int) -> dict[str, Any]:
            super().__getitem__(i)
            raise OSError("stop")

    with pytest.raises(OSError, match="stop"):
        ModelClient(network(), Failing())
    assert states() == before


def test_only_the_chosen_examples_of_a_dataset_are_read():
    read = []

    class Noted(Dicts):
        def __getitem__(self, i: int) -> dict[str, Any]:
            read.append(i)
            return super().__getitem__(i)

    found, same = (
        ModelClient(network(), *data, sampling_rate=0.3).training_examples({"server-round": 1})
        for data in ((Noted(),), (X, Y))
    )
    probe, *chosen = read
    assert (probe, len(chosen)) == (0, 3)
    assert torch.equal(found[0], X[chosen])
    assert all(map(torch.equal, found, same))


# ------------------------------------------------------------------------------------ refusals


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(pairs())


class Own(BatchSampler):
    """A user's own."""


def with_nan() -> Tensor:
    x = X.clone()
    x[4, 0, 2, 2] = float("nan")
    x[6, 0, 0, 0] = float("inf")
    return x


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Dicts() if dataset is None else dataset, **options)


class Ragged(Dicts):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"img": X[i, :, : 6 - i // 4], "label": int(Y[i])}


# arguments -> what the error says
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": X},
     r"y: expected a label for each of the 11 examples in x, got none; give y, or a Dataset"),
    ({"x": TensorDataset(X, Y), "y": Y},
     r"y: expected none, as x is a TensorDataset and holds the labels, got a Tensor; leave"),
    ({"x": X, "y": Y, "y_test": Y},
     r"x_test: expected the examples of y_test, got none; give x_test, or leave both out"),
    ({"x": X, "y": Y[:5]}, r"x: .* as many labels, got 11 and 5"),
    ({"x": []}, r"x: expected at least one example, got an empty dataset"),
    ({"x": loader(Stream())}, r"got the IterableDataset Stream; give a list"),
    ({"x": loader(sampler=RandomSampler(Dicts(), replacement=True))},
     r"each example once, got one with a RandomSampler"),
    ({"x": loader(sampler=RandomSampler(Dicts(), num_samples=5))},
     r"each example once, got one with a RandomSampler"),
    ({"x": loader(sampler=SequentialSampler(range(5)))},
     r"each example once, got one with a SequentialSampler; give the dataset"),
    ({"x": loader(batch_sampler=Own(SequentialSampler(Dicts()), 3, False))},
     r"each example once, got one with an Own"),
    ({"x": loader(batch_size=None)},
     r"x: expected a DataLoader with a batch_size, got batch_size=None; give it one"),
    ({"x": loader(list(X))},
     r"x: expected batches of pairs .*, got a Tensor; have the dataset return the label, too"),
    ({"x": Dicts(), "columns": ("image", "label")},
     r"expected the columns image, label, got img, label without image; name them with columns"),
    ({"x": HUGGING_FACE},
     r"x: expected examples as one tensor, got a list; .* tensors of floating point, all of one"),
    ({"x": loader(batch_size=4, collate_fn=lambda items: (X[:3], Y[:3]))},
     r"x: expected 1 examples and labels in a batch, got 3 and 3; every example must come out"),
    ({"x": X.permute(0, 2, 3, 1).byte(), "y": Y},
     r"try x\.float\(\) / 255, .* and x\.permute\(0, 3, 1, 2\), which puts channels first$"),
    ({"x": X[:, 0], "y": Y},
     r"examples of shape \(6, 6\) .*; try x\.unsqueeze\(1\), which adds the channel of images$"),
    ({"x": with_nan(), "y": Y},
     r"x: expected finite numbers, got NaN or infinity in 2 of 11 examples, the first at 4; rem"),
    ({"x": X, "y": torch.full((N, 3), 1 / 3)},
     r"y labels: expected one-hot rows, a single 1 and otherwise 0, got other numbers; take the"),
    ({"x": X, "y": Y.float()},
     r"y labels: expected integers, or one-hot rows \(n, 3\), got float32 of shape \(11,\); "),
    ({"x": X, "y": torch.zeros(N, 6, 6).long()},
     r"y labels: expected the shape \(n,\), .*, got \(11, 6, 6\); give one class number"),
    ({"x": X, "y": Y, "x_test": X, "y_test": Y - 1}, r"y_test labels: .* got -1 ... 1"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_cannot_be_taken_is_refused_in_one_line(given, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        ModelClient(network(), **given)
    assert "\n" not in str(caught.value)


# what the first example of a dataset does not show
READ: list[tuple[Any, str]] = [
    (TensorDataset(with_nan(), Y), "x: expected finite numbers, got NaN or infinity in 2 of 11 "),
    (DataLoader(Ragged(), batch_size=4), r"got \(1, 4, 6\) and \(1, 5, 6\); resize, crop or pad"),
    (DataLoader(Ragged(), batch_size=5), "x: its examples cannot be put into a batch"),
    (TensorDataset(X, torch.arange(N)), r"x labels: expected 0 ... 2, got 0 ... 10"),
]


@pytest.mark.parametrize(("data", "message"), READ)
def test_what_the_first_example_does_not_show_is_refused_when_it_is_read(data, message):
    client = ModelClient(network(), data)
    with pytest.raises(ValueError, match=message):
        client.training_examples({"server-round": 1})

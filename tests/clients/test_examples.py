"""Clients take examples in the forms that people have, or say in one line what they expected."""

import itertools
import random

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import data

from fedntk.clients import ModelClient, SGDClient, TCTClient, get_weights
from fedntk.ntk import one_hot

from ..conftest import refused

N = 11
X = torch.randn(N, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
ROUND = {"server-round": 1}


def network():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        )


def item(i):
    return {"img": X[i], "label": int(Y[i])}


def augmented(i):
    noise = random.random() + np.random.random() + torch.rand(())  # noqa: NPY002, S311
    return item(i) | {"img": X[i] + noise}


class Made(data.Dataset):
    """Examples that a function makes of their positions."""

    def __init__(self, make=item):
        self.make = make

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.make(i)


def as_pairs(items):
    return torch.stack([item["img"] for item in items]), torch.tensor([i["label"] for i in items])


def loader(dataset=None, **options):
    return data.DataLoader(Made() if dataset is None else dataset, **options)


HUGGING_FACE = datasets.Dataset.from_dict({"image": X.numpy().tolist(), "label": Y.tolist()})
TWICE = data.TensorDataset(torch.cat([X, X]), torch.cat([Y, Y]))
FORMS = {
    "reversed arrays": lambda: (X.flip(0).numpy()[::-1], Y.flip(0).numpy()[::-1]),
    "big-endian float64": lambda: (X.numpy().astype(">f8"), Y.numpy().astype(">i4")),
    "labels in a list": lambda: (X, Y.tolist()),
    "labels (n, 1)": lambda: (X, Y[:, None]),
    "one-hot floats": lambda: (X.numpy(), np.eye(3, dtype=np.float32)[Y.numpy()]),
    "list of pairs": lambda: ([(X[i], int(Y[i])) for i in range(N)],),
    "other keys": lambda: (Made(lambda i: {"image": X[i], "target": int(Y[i]), "id": 3}),),
    "sampler": lambda: (loader(TWICE, batch_size=2, sampler=data.SubsetRandomSampler(range(N))),),
    "loader": lambda: (loader(batch_size=4, shuffle=True, drop_last=True, num_workers=2),),
    "loader with a collate_fn": lambda: (loader(batch_size=3, collate_fn=as_pairs),),
    "Hugging Face": lambda: (loader(HUGGING_FACE.with_format("torch"), shuffle=True),),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_each_example_once_and_in_order(form):
    arguments = FORMS[form]()
    client = ModelClient(
        network(), *arguments, **dict(zip(("x_test", "y_test"), arguments, strict=False))
    )
    for x, targets in (
        (client.inputs, client.targets),
        (client.test_inputs, client.test_targets),
        client.training_examples(ROUND),
    ):
        assert torch.equal(x, X)
        assert torch.equal(targets, one_hot(Y, 3))
        assert (x.dtype, targets.dtype) == (torch.float32, torch.float32)


def test_examples_take_the_dtype_of_the_models_parameters_and_are_not_copied_if_they_have_it():
    """Whole numbers, such as tokens, stay for a model that takes them."""
    client = ModelClient(network(), X, Y)
    assert client.inputs is client.test_inputs
    assert client.inputs.data_ptr() == X.data_ptr()
    for arguments in ((X.numpy(), Y), (Made(),)):
        assert ModelClient(network().double(), *arguments).inputs.dtype == torch.float64
    text = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))
    assert ModelClient(text, torch.randint(9, (N, 5)), Y).inputs.dtype == torch.int64


@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (lambda i: {"scan": X[i], "diagnosis": int(Y[i])}, ("scan", "diagnosis")),
        (lambda i: item(i) | {"coarse_label": 1, "labels": 2}, ("img", "label")),
        (lambda i: (i, X[i], 0.5, int(Y[i])), (1, 3)),
    ],
)
def test_columns_say_which_entries_count(make, columns):
    refused(r"say which two with columns=\(", ModelClient, network(), Made(make))
    client = ModelClient(network(), Made(make), columns=columns)
    assert torch.equal(client.inputs, X)
    assert torch.equal(client.targets, one_hot(Y, 3))


def read(server_round, make=augmented, **options):
    client = SGDClient(network(), loader(Made(make), shuffle=True), **options)
    return client.training_examples({"server-round": server_round})[0]


def test_augmentation_is_the_same_through_a_round_and_other_otherwise():
    """Global generators play no part and stay as they were, also after an error."""

    def states():
        legacy = np.random.get_state()  # noqa: NPY002
        return random.getstate(), legacy[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    def fail(i):
        augmented(i)
        raise OSError("stop")

    before, first = states(), read(1)
    refused("stop", read, 1, fail, error=OSError)
    assert states() == before
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    assert torch.equal(first, read(1))
    for other in (X, read(2), read(1, seed=(0, 1))):
        assert not torch.equal(first, other)


@pytest.mark.parametrize("test_examples", [{}, {"x_test": Made(augmented)}])
def test_evaluation_does_not_change_with_the_round(test_examples):
    def evaluate(server_round, **options):
        client = SGDClient(network(), Made(augmented), **test_examples, **options)
        return client.evaluate(get_weights(network()), {"server-round": server_round})

    assert evaluate(1) == evaluate(2) != evaluate(1, seed=(1,))


def test_tct_has_the_same_examples_through_stage_2_and_others_in_each_round_of_stage_1(tmp_path):
    def client():
        return TCTClient(network(), Made(augmented), cache=tmp_path, seed=(0, 3))

    assert torch.equal(client().inputs, client().inputs)
    first, second = (client().training_examples({"server-round": r})[0] for r in (1, 2))
    assert not torch.equal(first, second)
    assert not torch.equal(first, client().inputs)


def test_only_the_chosen_examples_of_a_dataset_are_read():
    positions = []

    def noted(i):
        positions.append(i)
        return item(i)

    actual, same = (
        ModelClient(network(), *arguments, sampling_rate=0.3).training_examples(ROUND)
        for arguments in ((Made(noted),), (X, Y))
    )
    probe, *chosen = positions
    assert (probe, len(chosen)) == (0, 3)
    assert torch.equal(actual[0], X[chosen])
    assert all(map(torch.equal, actual, same))


class Stream(data.IterableDataset):
    def __iter__(self):
        return itertools.repeat(item(0))


class Own(data.BatchSampler): ...


SPOILT = X.clone()
SPOILT[4, 0, 2, 2], SPOILT[6, 0, 0, 0] = float("nan"), float("inf")
RAGGED = Made(lambda i: (X[i, :, : 6 - i // 4], int(Y[i])))
EACH = "each example once, got one with"

# arguments -> what the error says
REFUSED = [
    ({"x": X}, r"y: expected a label for each of the 11 examples in x, got none; give y, or"),
    ({"x": TWICE, "y": Y}, "y: expected none, as x is a TensorDataset and holds the labels, got"),
    ({"x": X, "y": Y, "y_test": Y}, r"x_test: expected the examples of y_test, got none; give"),
    ({"x": X, "y": Y[:5]}, r"x: .* as many labels, got 11 and 5"),
    ({"x": []}, r"x: expected at least one example, got an empty dataset"),
    ({"x": loader(Stream())}, r"got the IterableDataset Stream; give a list"),
    ({"x": loader(sampler=data.RandomSampler(Made(), replacement=True))}, f"{EACH} a RandomSam"),
    ({"x": loader(sampler=data.RandomSampler(Made(), num_samples=5))}, f"{EACH} a RandomSampler"),
    ({"x": loader(sampler=data.SequentialSampler(range(5)))}, f"{EACH} a SequentialSampler; give"),
    ({"x": loader(batch_sampler=Own(range(N), 3, False))}, f"{EACH} an Own"),
    ({"x": loader(batch_size=None)}, "x: expected a DataLoader with a batch_size, got batch_size="),
    ({"x": loader(list(X))}, r"x: expected batches of pairs .*, got a Tensor; have the dataset"),
    ({"x": Made(), "columns": ["img"]}, "columns: expected two names or positions, such"),
    ({"x": Made(), "columns": ("a", "label")}, "columns a, label, got img, label without a; name"),
    ({"x": HUGGING_FACE}, r"x: expected examples as one tensor, got a list; .* all of one shape"),
    ({"x": loader(batch_size=4, collate_fn=lambda items: (X[:3], Y[:3]))},
     r"x: expected 1 examples and labels in a batch, got 3 and 3; every example must come out"),
    ({"x": X.permute(0, 2, 3, 1).byte(), "y": Y},
     r"try x\.float\(\) / 255, .* and x\.permute\(0, 3, 1, 2\), which puts channels first$"),
    ({"x": SPOILT, "y": Y}, "expected finite .* NaN or infinity in 2 of 11 .*, the first at 4;"),
    ({"x": X, "y": torch.full((N, 3), 1 / 3)}, "y labels: expected one-hot rows, a single 1 and"),
    ({"x": X, "y": Y.float()}, r"y labels: expected integers .*, got float32 of shape \(11,\); "),
    ({"x": X, "y": torch.zeros(N, 5).long()}, r"y labels: expected integers .* \(11, 5\); conv"),
    ({"x": X, "y": Y, "x_test": X, "y_test": Y - 1}, r"y_test labels: .* got -1 ... 1"),
    ({"x": data.TensorDataset(SPOILT, Y)}, "finite numbers, got NaN or infinity in 2 of 11 "),
    ({"x": loader(RAGGED, batch_size=4)}, r"got \(1, 4, 6\) and \(1, 5, 6\); resize, crop or pad"),
    ({"x": loader(RAGGED, batch_size=5)}, "x: its examples cannot be put into a batch"),
    ({"x": data.TensorDataset(X, torch.arange(N))}, r"x labels: expected 0 ... 2, got 0 ... 10"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_taken_is_refused_in_one_line(arguments, message):
    """Arrays at once; a dataset as it is read, if its first example does not show the fault."""

    def use():
        client = ModelClient(network(), **arguments)
        assert not isinstance(arguments["x"], Tensor)
        client.training_examples(ROUND)

    with pytest.raises((ValueError, TypeError), match=message) as caught:
        use()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [tuple, dict, np.asarray])
def test_a_dataset_that_writes_over_what_it_keeps_is_refused(kind):
    """Each reading would centre its examples once more; a transform that copies is taken."""

    class Centred(data.Dataset):
        def __init__(self, *, in_place):
            x = torch.arange(24.0).reshape(6, 4)
            self.x, self.in_place = x.numpy() if kind is np.asarray else x, in_place

        def __len__(self):
            return 6

        def __getitem__(self, i):
            x = self.x[i]
            if self.in_place:
                x -= 1
            pair = (x if self.in_place else x - 1), i % 3
            return dict(zip(("x", "y"), pair, strict=True)) if kind is dict else pair

    made = SGDClient(nn.Linear(4, 3), Centred(in_place=False))
    for _ in range(2):
        assert made.training_examples({})[0][0].tolist() == [-1.0, 0.0, 1.0, 2.0]
    refused("x: expected a dataset .* changes in place", trained, Centred(in_place=True))


PAIRS = [None if i % 7 == 0 else (torch.ones(4) * i, i % 3) for i in range(20)]
COLLATED = {
    "drops": lambda items: data.default_collate([item for item in items if item is not None]),
    "returns None": lambda items: None,
    "returns nothing": lambda items: (),
    "fails": lambda items: items[0]["x"],
    "leaves out the first": lambda items: data.default_collate(items[1:] + items[1:2]),
}


@pytest.mark.parametrize("name", sorted(COLLATED))
def test_a_collate_fn_that_loses_examples_is_refused_with_the_cure(name):
    for pairs, size in ((PAIRS, 8), (PAIRS[1:], 1)):
        loader = data.DataLoader(pairs, batch_size=size, collate_fn=COLLATED[name])
        refused(r"^x: .*torch\.utils\.data\.Subset", trained, loader)


def trained(dataset):
    client = SGDClient(nn.Linear(4, 3), dataset)
    return client.fit(client.get_parameters({}), {})


def test_a_dataset_that_holds_none_is_refused_with_the_cure():
    refused(r"NoneType.*every example must come out .*Subset", trained, PAIRS)


def test_a_collate_fn_that_writes_over_its_items_changes_none():
    def centre(items):
        for x, _ in items:
            x.sub_(1)
        return data.default_collate(items)

    pairs = [(torch.full((4,), float(i)), i % 3) for i in range(9)]
    client = SGDClient(nn.Linear(4, 3), data.DataLoader(pairs, collate_fn=centre))
    for _ in range(2):
        x, _ = client.training_examples({})
        assert x[:, 0].tolist() == [i - 1.0 for i in range(9)]

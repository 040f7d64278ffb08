"""What clients that promise something tell of their training examples: a list, and nothing else."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn
from torch.utils.data import Dataset

from fedntk.clients import (
    ClosedFormClient,
    CPNTKFLClient,
    DittoClient,
    FedEnsembleClient,
    FedProtoClient,
    MaskedWeights,
    NamedArrays,
    PersonalisedClient,
    PrivacyLimits,
    SGDClient,
    TCTClient,
    client_app,
)
from fedntk.ntk import FeatureMap
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.noise import ANSWERED, HARMLESS, Noise
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, SumFormat
from fedntk.ntk.payloads.sum_task import SumTask
from fedntk.simulations.engine._flower import become_server
from fedntk.strategies import CPNTKFL, OneExchange

from ..conftest import refused

GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(41, 1, 12, 12, generator=GENERATOR), torch.arange(41) % 3
KINDS = (
    *("train", "evaluate", "query", "query.partition", "query.keys", "query.input_sums"),
    *("query.public_key", "evaluate.model"),
)


def network(*more):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = nn.Conv2d(1, 5, 3), nn.ReLU(), *more, nn.Flatten(), nn.Linear(500, 40), nn.Tanh()
        return nn.Sequential(*layers, nn.Linear(40, 3))


NOISE = {"clip": 1.0, "noise_multiplier": 1.0, "noise_seed": (0,)}
TESTS = {"x_test": X[:5], "y_test": Y[:5]}
LIMITS = PrivacyLimits(ledger="nobody reads it here", epsilon=3.0)
PRIVATE = {
    "masked sums": lambda **own: ClosedFormClient(network(), X, Y, only_masked=True, **own),
    "a budget": lambda **own: ClosedFormClient(network(), X, Y, privacy=LIMITS, **own),
    "masked TCT": lambda **own: TCTClient(network(), X, Y, only_masked=True, **own),
    "rows with noise": lambda **own: CPNTKFLClient(network(), X, Y, **NOISE, **own),
    "in an ensemble": lambda **own: FedEnsembleClient(
        CPNTKFLClient(network(), X, Y, **NOISE, **own)
    ),
}


def answer(app, kind, config=None, arrays=None):
    weights = network().state_dict() if arrays is None else arrays
    content = {"arrays": ArrayRecord(dict(weights)), "config": ConfigRecord(config or {})}
    become_server()
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    return app(Message(RecordDict(content), 2, kind), context).content


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("kind", sorted(set(KINDS) - ANSWERED))
def test_a_private_client_answers_no_message_that_is_not_on_the_list(name, kind):
    app = client_app(lambda _: PRIVATE[name](**TESTS))
    refused(f"answers only evaluate, .*; got {kind}:", answer, app, kind)


@pytest.mark.parametrize("name", PRIVATE)
def test_it_evaluates_on_examples_for_that_and_never_on_its_training_examples(name):
    if name != "in an ensemble":  # which takes the records of several models
        answer(client_app(lambda _: PRIVATE[name](**TESTS)), "evaluate")
    on_training = client_app(lambda _: PRIVATE[name]())
    refused("give it examples for evaluation", answer, on_training, "evaluate")


def test_a_mod_that_masks_lets_no_client_evaluate_on_its_training_examples():
    def masked(**own):
        return client_app(lambda _: SGDClient(network(), X, Y, **own), mods=[MaskedWeights()])

    assert answer(masked(**TESTS), "evaluate")["metrics"]["num-examples"] == 5
    refused("give it examples for evaluation", answer, masked(), "evaluate")
    limited = MaskedWeights(privacy=LIMITS, only_masked=False)
    app = client_app(lambda _: SGDClient(network(), X, Y), mods=[limited])
    refused("give it examples for evaluation", answer, app, "evaluate")
    refused("sends only masked sums", answer, masked(**TESTS), "query.input_sums")


def asked(client, total=None, **options):
    """What a client is sent that a trusted server asks for sums, and will add noise to them."""
    task = SumTask(bits=8, epsilon=1.0, **options)
    state = client.model.state_dict()
    records = {"arrays": {name: array.numpy() for name, array in state.items()}}
    records["steps"] = {"step": np.ones(list(state.values())[-2].shape[1], np.float32)}
    if total is not None:
        records["total"] = total
    return NamedArrays(records), {**FeatureMap("last-layer").to_config(), **task.to_config()}


def sums_of(client, **options):
    arrays, count, metrics = client.fit(*asked(client, **options))
    return arrays.records["arrays"], count, metrics


def test_a_private_client_evaluates_no_arrays_of_its_own_and_trains_no_weights_in_the_clear():
    """Personal arrays, and weights of the first stage of TCT, are functions of the examples."""
    for kind in (PersonalisedClient, DittoClient, FedProtoClient):
        app = client_app(lambda _, k=kind: k(network(), X, Y, **TESTS), mods=[MaskedWeights()])
        refused("arrays of its own are computed from these", answer, app, "evaluate")
    limited = TCTClient(network(), X, Y, privacy=LIMITS, **TESTS)
    weights = [v.numpy() for v in network().state_dict().values()]
    refused("stage 1 sends weights without masks", limited.fit, weights, {"server-round": 2})


@pytest.mark.parametrize("name", ["masked sums", "a budget"])
def test_a_private_client_makes_no_model_of_a_total_that_the_server_sends(name, tmp_path):
    """It would be an exact function of the client's own sums, as often as asked for."""
    client = PRIVATE[name](**TESTS, cache=tmp_path)
    total = FeatureStatistics.of([torch.ones(2, 40)], torch.arange(2), 3)
    message = asked(client, total=total.to_arrays())
    refused("have the strategy set personal = False", client.evaluate, *message)
    refused("secure_aggregation = False, got True", OneExchange, personal=True,
            network=network(), secure_aggregation=True)  # fmt: skip


def parsed(arrays, width):
    fixed = FixedPoint(np.ones(width, np.float32), 8)
    return FeatureStatistics.from_arrays(arrays, SumFormat(width, 3, None, fixed))


def client_of(chosen, cache, model=None, **own):
    return ClosedFormClient(model or network(), X[chosen], Y[chosen], cache=cache, **own)


class Neighbours(nn.Module):
    """Depends on other examples, but only on many, which no check of a few can see."""

    def forward(self, x):
        return x + x[-1:] if len(x) > 32 else x


def test_a_row_depends_on_its_own_example_to_the_last_bit(tmp_path):
    """Without one example the sums lack exactly its row, wherever it stood and whatever came after.

    Rows are made one by one, so that no check, and no last bit of a product of matrices, matters.
    """
    x = torch.randn(300, 100, generator=GENERATOR)
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Linear(100, 50), Neighbours(), nn.Linear(50, 3))

    def sums(*left_out):
        chosen = np.delete(np.arange(300), left_out)
        client = ClosedFormClient(model, x[chosen], chosen % 3, cache=tmp_path)
        return parsed(sums_of(client)[0], 50)

    whole = sums()
    for left_out in (0, 7, 299):
        only = sums(*(i for i in range(300) if i != left_out))
        others = sums(left_out)
        np.testing.assert_array_equal(whole.gram - others.gram, only.gram)
        np.testing.assert_array_equal(whole.class_sums - others.class_sums, only.class_sums)
    _, count, metrics = sums_of(ClosedFormClient(network(), X, Y, cache=tmp_path))
    assert (count, metrics) == (1, {})


class Augmented(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i] + torch.randn(1), int(Y[i])


def test_a_jacobians_row_with_noise_depends_on_its_own_example():
    x, labels = torch.randn(40, 10, generator=GENERATOR), torch.arange(40) % 3
    model = nn.Sequential(nn.Linear(10, 6), Neighbours(), nn.Linear(6, 3))
    weights = [array.detach().numpy() for array in model.state_dict().values()]
    changed = x.clone()
    changed[-1] = 9.0
    config, rows = {"server-round": 1}, []
    for own in (x, changed):
        client = CPNTKFLClient(model, own, labels, **NOISE)
        upload = client.upload(weights, config)
        blocks = [a for b in upload.jacobian.expanded().blocks for a in b.arrays]
        rows.append([array[:39] for array in (upload.outputs, *blocks)])
    for first, second in zip(*rows, strict=True):
        assert torch.equal(first, second)


def test_rows_that_depend_on_other_rows_are_refused(tmp_path):
    sampled = client_of(range(20), tmp_path, sampling_rate=0.5)
    refused("sampling_rate: with noise .* expected 1.0, got 0.5", sums_of, sampled)
    augmented = ClosedFormClient(network(), Augmented(), cache=tmp_path)
    refused("expected arrays of examples", sums_of, augmented)
    noisy = CPNTKFLClient(network(), Augmented(), **NOISE)
    weights = [v.numpy() for v in network().state_dict().values()]
    refused("expected arrays of examples", noisy.fit, weights, {"server-round": 1})
    across = client_of(range(20), tmp_path, network(nn.BatchNorm2d(5, track_running_stats=False)))
    refused("depend only on the example", sums_of, across)
    sums_of(client_of(range(20), tmp_path, network(nn.InstanceNorm2d(5))))  # of an example's own


@pytest.mark.parametrize("kind", [OneExchange, CPNTKFL])
def test_an_option_that_no_list_has_keeps_its_default_with_noise(kind):
    """A method of one's own may add an option; at its default it is as if it were not there."""
    names = {name for one in (OneExchange, CPNTKFL, *map(type, (client() for client in
             list(PRIVATE.values())[:4]))) for name in one.options()}  # fmt: skip
    assert names >= HARMLESS
    mechanism = kind.mechanism_of(SimpleNamespace(epsilon=1.0, noise_multiplier=1.0))
    assert issubclass(mechanism, Noise)
    values = {name: option.default for name, option in kind.options().items()}
    values |= {name: allowed[0] for name, allowed in mechanism.needs.items()}
    mechanism.require_covered(SimpleNamespace(options=kind.options, **values))
    free = HARMLESS | mechanism.covers
    for name in kind.options().keys() - free:
        odd = SimpleNamespace(options=kind.options, **values | {name: object()})
        refused(f"^{name}: with noise only what", mechanism.require_covered, odd)


def test_only_listed_metrics_of_replies_are_counted_with_noise():
    told = {"num-examples": 3, "train-loss": 0.7, "replies-rejected": 1, "mean-age": 51.0}
    mechanism = OneExchange.mechanism_of(SimpleNamespace(epsilon=1.0))
    assert mechanism.filtered(told) == {"num-examples": 3, "replies-rejected": 1}
    json.dumps(mechanism.releases)

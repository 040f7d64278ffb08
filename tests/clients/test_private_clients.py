"""What clients that promise something tell of their training examples: a list, and nothing else."""

import inspect
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn
from torch.utils.data import Dataset

import fedntk.clients
from fedntk.clients import (
    ClosedFormClient,
    DittoClient,
    FedEnsembleClient,
    FedProtoClient,
    MaskedSums,
    MaskedWeights,
    NamedArrays,
    PersonalisedClient,
    PrivacyLimits,
    SGDClient,
    TCTClient,
    client_app,
)
from fedntk.clients.core.base import STEP
from fedntk.clients.tct import tct
from fedntk.ntk import FeatureMap
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.noise import ANSWERED, HARMLESS, Noise
from fedntk.ntk.options import parameters_of, parts_of
from fedntk.ntk.payloads.agreement import Agreement
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.ntk.payloads.feature_statistics import SECURE_STEPS, FeatureStatistics, SumFormat
from fedntk.ntk.payloads.sum_task import SumTask
from fedntk.simulations.engine._flower import become_server
from fedntk.strategies import FeatureSums, NoisySums, OneExchange

from ..conftest import refused
from .test_chains import CLIENTS as ALL_CLIENTS

GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(41, 1, 12, 12, generator=GENERATOR), torch.arange(41) % 3


def network(*more):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = nn.Conv2d(1, 5, 3), nn.ReLU(), *more, nn.Flatten(), nn.Linear(500, 40), nn.Tanh()
        return nn.Sequential(*layers, nn.Linear(40, 3))


TESTS = {"x_test": X[:5], "y_test": Y[:5]}
LIMITS = PrivacyLimits(ledger="nobody reads it here", epsilon=3.0)
MASKED, LIMITED = MaskedSums(only_masked=True), MaskedSums(privacy=LIMITS)
PRIVATE = {
    "masked sums": lambda **own: ClosedFormClient(network(), X, Y, secure=MASKED, **own),
    "a budget": lambda **own: ClosedFormClient(network(), X, Y, secure=LIMITED, **own),
    "masked TCT": lambda **own: TCTClient(network(), X, Y, secure=MASKED, **own),
    "in an ensemble": lambda **own: FedEnsembleClient(
        ClosedFormClient(network(), X, Y, secure=MASKED, **own)
    ),
}


def answer(app, kind, config=None, arrays=None):
    weights = network().state_dict() if arrays is None else arrays
    content = {"arrays": ArrayRecord(dict(weights)), "config": ConfigRecord(config or {})}
    become_server()
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    return app(Message(RecordDict(content), 2, kind), context).content


def served(kind, **options):
    return client_app(lambda _: kind(network(), X, Y, **TESTS, **options))


def guarded(kind, **options):
    mods = [MaskedWeights(**options)]
    return client_app(lambda _: kind(network(), X, Y, **TESTS), mods=mods)


def in_ensemble(kind, **options):
    return client_app(lambda _: FedEnsembleClient(kind(network(), X, Y, **TESTS, **options)))


CLIENTS = [kind for kind in ALL_CLIENTS if not inspect.isabstract(kind)]
MASKING = [kind for kind in CLIENTS if "secure" in parts_of(kind)]
PROMISES = {"masked": {"only_masked": True}, "limited": {"only_masked": False, "privacy": LIMITS}}
EVERY_PRIVATE = {
    **{
        f"{kind.__name__}, {name}{way}": partial(make, kind, secure=MaskedSums(**promise))
        for kind in MASKING
        for name, promise in PROMISES.items()
        for way, make in (("", served), (", in an ensemble", in_ensemble))
    },
    **{
        f"{kind.__name__}, {name} by the mod": partial(guarded, kind, **promise)
        for kind in CLIENTS
        for name, promise in PROMISES.items()
    },
}
KINDS = {k.removesuffix(".default") for k in client_app(None)._default_app._registered_funcs}
STEPS = (
    {
        name.removeprefix(STEP).replace("_", "-")
        for kind in CLIENTS
        for name in dir(kind)
        if name.startswith(STEP)
    }
    | set(ConvexTask.options()["step"].choices)
    | set(SumTask.options()["step"].choices)
)
REFUSALS = "sends only masked sums|promises what its messages tell|stage 1 sends weights"
UNKNOWN = "step: expected one of"  # a step of another client


def permitted_steps(name):
    """Return the steps that a private client's mechanism lists."""
    stage_1 = set(tct.STAGE_1) if name.startswith("TCTClient, masked") else set()
    return set() if name.endswith("mod") else {*SECURE_STEPS, *stage_1}


@pytest.mark.parametrize("name", EVERY_PRIVATE)
def test_a_private_client_answers_no_kind_of_message_that_its_mechanism_does_not_list(name):
    """All types of messages and steps of training that any client of the room answers."""
    assert {"train", "evaluate", "query", "query.input_sums", "evaluate.model"} <= KINDS
    assert {"train", "moments", "linear", "statistics", "class-means", "evolve"} <= STEPS
    app = EVERY_PRIVATE[name]()
    for kind in sorted(KINDS - ANSWERED):
        refused(REFUSALS, answer, app, kind)
    kind = getattr(fedntk.clients, name.partition(",")[0])
    agreed = Agreement(kind.strategy, kind.__name__, kind.replies).to_config()
    task = agreed | SumTask().to_config() | ConvexTask(step="linear").to_config()
    for step in sorted(STEPS - permitted_steps(name)):
        refused(f"{REFUSALS}|{UNKNOWN}", answer, app, "train", task | {"option-step": step})


@pytest.mark.parametrize("name", PRIVATE)
def test_it_evaluates_on_examples_for_that_and_never_on_its_training_examples(name):
    if name != "in an ensemble":  # which takes the records of several models
        answer(client_app(lambda _: PRIVATE[name](**TESTS)), "evaluate")
    on_training = client_app(lambda _: PRIVATE[name]())
    refused("give it examples for evaluation", answer, on_training, "evaluate")


def test_a_mod_that_masks_lets_no_client_evaluate_on_its_training_examples():
    assert answer(guarded(SGDClient), "evaluate")["metrics"]["num-examples"] == 5
    for promise in PROMISES.values():
        app = client_app(lambda _: SGDClient(network(), X, Y), mods=[MaskedWeights(**promise)])
        refused("give it examples for evaluation", answer, app, "evaluate")


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
        refused("arrays of its own are computed from these", answer, guarded(kind), "evaluate")
    limited = TCTClient(network(), X, Y, secure=LIMITED, **TESTS)
    weights = [v.numpy() for v in network().state_dict().values()]
    refused("stage 1 sends weights without masks", limited.fit, weights, {"server-round": 2})


@pytest.mark.parametrize("name", ["masked sums", "a budget"])
def test_a_private_client_makes_no_model_of_a_total_that_the_server_sends(name):
    """It would be an exact function of the client's own sums, as often as asked for."""
    client = PRIVATE[name](**TESTS)
    total = FeatureStatistics.of([torch.ones(2, 40)], torch.arange(2), 3)
    message = asked(client, total=total.to_arrays())
    refused("have the strategy set personal = False", client.evaluate, *message)
    refused("expected secure = None", OneExchange, personal=True,
            network=network(), secure=True)  # fmt: skip


def parsed(arrays, width):
    fixed = FixedPoint(np.ones(width, np.float32), 8)
    return FeatureStatistics.from_arrays(arrays, SumFormat(width, 3, None, fixed))


def client_of(chosen, cache, model=None, **own):
    secure = MaskedSums(cache=cache)
    return ClosedFormClient(model or network(), X[chosen], Y[chosen], secure=secure, **own)


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
        client = ClosedFormClient(model, x[chosen], chosen % 3, secure=MaskedSums(cache=tmp_path))
        return parsed(sums_of(client)[0], 50)

    whole = sums()
    for left_out in (0, 7, 299):
        only = sums(*(i for i in range(300) if i != left_out))
        others = sums(left_out)
        np.testing.assert_array_equal(whole.gram - others.gram, only.gram)
        np.testing.assert_array_equal(whole.class_sums - others.class_sums, only.class_sums)
    _, count, metrics = sums_of(
        ClosedFormClient(network(), X, Y, secure=MaskedSums(cache=tmp_path))
    )
    assert (count, metrics) == (1, {})


class Augmented(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i] + torch.randn(1), int(Y[i])


def test_rows_that_depend_on_other_rows_are_refused(tmp_path):
    sampled = client_of(range(20), tmp_path, sampling_rate=0.5)
    refused("sampling_rate: with noise .* expected 1.0, got 0.5", sums_of, sampled)
    augmented = ClosedFormClient(network(), Augmented(), secure=MaskedSums(cache=tmp_path))
    refused("expected arrays of examples", sums_of, augmented)
    across = client_of(range(20), tmp_path, network(nn.BatchNorm2d(5, track_running_stats=False)))
    refused("depend only on the example", sums_of, across)
    sums_of(client_of(range(20), tmp_path, network(nn.InstanceNorm2d(5))))  # of an example's own


def test_an_option_that_no_list_has_keeps_its_default_with_noise():
    """A method of one's own may add an option; at its default it is as if it were not there."""

    def holder(**values):
        made = object.__new__(kind)
        vars(made).update(values)
        return made

    kind = OneExchange
    names = parameters_of(OneExchange).keys() | parameters_of(ClosedFormClient).keys()
    assert names >= HARMLESS
    mechanism = kind.mechanism_of(SimpleNamespace(noise=NoisySums(epsilon=1.0)))
    assert issubclass(mechanism, Noise)
    values = {name: declared.default for name, declared in parameters_of(kind).items()}
    values["sums"] = FeatureSums(auto_ridge=False, validation_share=0.0)
    mechanism.require_covered(holder(**values))
    always = {name for name, part in parts_of(kind).items() if not part.optional}
    for name in parameters_of(kind).keys() - HARMLESS - mechanism.covers - always:
        outside = holder(**values | {name: object()})
        refused(f"^{name}: with noise only what", mechanism.require_covered, outside)
    for name in always - HARMLESS - mechanism.covers:
        for below in values[name].options():
            if f"{name}.{below}" in mechanism.covers:
                continue
            changed = values[name].copy()
            setattr(changed, below, object())
            outside = holder(**values | {name: changed})
            refused(rf"^{name}\.{below}: with noise only", mechanism.require_covered, outside)


def test_only_listed_metrics_of_replies_are_counted_with_noise():
    told = {"num-examples": 3, "train-loss": 0.7, "replies-rejected": 1, "mean-age": 51.0}
    mechanism = OneExchange.mechanism_of(SimpleNamespace(noise=NoisySums(epsilon=1.0)))
    assert mechanism.filtered(told) == {"num-examples": 3, "replies-rejected": 1}
    json.dumps(mechanism.releases)

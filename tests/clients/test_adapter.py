"""client_app: any NumPyClient answers today's messages; each client draws its own numbers."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedntk.clients import (
    FedEnsembleClient,
    LocalSGD,
    NamedArrays,
    NTKFLClient,
    SGDClient,
    client_app,
)
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.clients.core.weights import records_of
from fedntk.simulations.engine._flower import become_server
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import NTKFL, NoUsableReply, SeededFedAvg

from ..conftest import refused
from ..strategies.federation import arrays_of, as_record
from .problem import X, Y

ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(4, dtype=np.int64)}
RECORDS = {
    "arrays": ARRAYS,
    "empty": {},
    "corrections": {"w": np.full((2, 3), 2.0), "again": np.zeros(1, np.float16)},
}
FLAT = [array for own in RECORDS.values() for array in own.values()]


def client(**methods):
    made = NumPyClient()
    vars(made).update(methods)
    return made


TOLD = {"f32": np.float32(0.5), "flag": True, "text": "hello", "raw": b"x"}
ECHO = client(
    fit=lambda parameters, config: ([(p + 1).astype(p.dtype) for p in parameters], 7, TOLD),
    evaluate=lambda parameters, config: (float(parameters[0].sum()), 3, {"accuracy": 0.25}),
    get_properties=lambda config: {"memory": 8},
    query=lambda parameters, config: {"losses": np.array([1.0, 2.0])},
)


def listed(records):
    return [
        (name, [(key, a.dtype, a.shape, a.tobytes()) for key, a in own.items()])
        for name, own in records.items()
    ]


def received(content):
    return {name: arrays_of(own) for name, own in content.array_records.items()}


WEIGHTS = {"arrays": ARRAYS}


def answer(app, kind, sent=WEIGHTS):
    """Send some records, and see that they stay as they were sent."""
    become_server()
    content = RecordDict({"config": ConfigRecord({"lr": 0.5})})
    for name, arrays in sent.items():
        content[name] = as_record(arrays)
    context = Context(1, 2, {"partition-id": 5}, RecordDict(), {})
    reply = app(Message(content, 2, kind), context)
    assert listed(received(content)) == listed(sent)
    assert dict(content["config"]) == {"lr": 0.5}
    return reply.content


def ask(kind, own=ECHO, sent=WEIGHTS):
    return answer(client_app(lambda _: own), kind, sent)


def test_train_returns_weights_under_their_own_names_and_dtypes():
    content = ask("train")
    expected = {name: (array + 1).astype(array.dtype) for name, array in ARRAYS.items()}
    assert listed(received(content)) == listed({"arrays": expected})
    told = {"partition-id": 5, "num-examples": 7, "f32": 0.5, "flag": 1}
    assert dict(content["metrics"]) == told
    assert dict(content["properties"]) == {"text": "hello", "raw": b"x"}


def test_evaluate_and_queries():
    """The partition is told without making a client; one without a query tells its properties."""
    told = {"partition-id": 5, "loss": 15.0, "num-examples": 3, "accuracy": 0.25}
    assert dict(ask("evaluate")["metrics"]) == told
    assert ask("query")["metrics"]["losses"] == [1.0, 2.0]
    assert ask("query", sent={})["metrics"]["memory"] == 8
    plain = client(get_properties=ECHO.get_properties)
    assert ask("query", plain)["metrics"]["memory"] == 8
    partition = answer(client_app(lambda _: pytest.fail("it is made")), "query.partition")
    assert dict(partition["metrics"]) == {"partition-id": 5}


def test_records_keep_their_names_on_the_way_to_a_client_and_back():
    """The client spoils what it was given."""
    seen = []

    def fit(parameters, config):
        seen.extend(listed(parameters.records))
        controls = {k: a + 1 for k, a in parameters.records["corrections"].items()}
        for array in parameters:
            array += 100
        for own in (*parameters.records.values(), parameters.records, config):
            own.clear()
        return NamedArrays({"controls": controls, "none": {}}), 1, {}

    content = ask("train", client(fit=fit), RECORDS)
    assert seen == listed(RECORDS)
    controls = {k: a + 1 for k, a in RECORDS["corrections"].items()}
    assert listed(received(content)) == listed({"controls": controls, "none": {}})


def test_records_come_by_name_or_the_missing_are_named():
    named = NamedArrays(RECORDS)
    records = records_of(named, "corrections", "arrays", strategy="SCAFFOLD")
    assert (list(records["corrections"]), list(records["arrays"])) == (["w", "again"], ["w", "n"])
    text = "got arrays, empty, corrections; linear, control comes from the strategy TCT"
    refused(text, records_of, named, "arrays", "linear", "control", strategy="TCT")
    named.records["arrays"].clear()  # they are not the ones that it was made of
    del named.records["corrections"]
    assert {name: list(record) for name, record in RECORDS.items()} == {
        "arrays": ["w", "n"], "empty": [], "corrections": ["w", "again"],
    }  # fmt: skip


def changed(parameters):
    del parameters[2:]
    parameters[0] = parameters[0] + 5
    return parameters


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (changed, {"w": FLAT[0] + 5, "n": FLAT[1]}),
        (lambda p: p, {str(i): a for i, a in enumerate(FLAT)}),
        (lambda p: [], {}),
    ],
)
def test_plain_clients_get_a_list_and_answer_with_one(make, expected):
    """As many arrays as the first record has go back under its names, others under numbers."""

    def fit(parameters, config):
        assert isinstance(parameters, list)
        assert all(np.array_equal(a, b) for a, b in zip(parameters, FLAT, strict=True))
        return make(parameters), 1, {}

    content = ask("train", client(fit=fit), RECORDS)
    assert listed(received(content)) == listed({"arrays": expected})


def own_reply(message, context):
    seen = {"num-examples": 3, "lr": message.content["config"]["lr"]}
    return Message(RecordDict({"mine": MetricRecord(seen)}), reply_to=message)


@pytest.mark.parametrize("category", ["train", "evaluate", "query"])
def test_a_function_registered_by_the_user_takes_the_place_of_ours(category):
    app = client_app(lambda _: ECHO)
    assert getattr(app, category)()(own_reply) is own_reply
    assert dict(answer(app, category)["mine"]) == {"num-examples": 3, "lr": 0.5}
    for kind in {"train", "evaluate", "query", "query.partition", "query.keys"} - {category}:
        assert answer(app, kind)["metrics"]["partition-id"] == 5
    refused("already registered", getattr(app, category)(), own_reply)
    app.train("other")(own_reply)
    assert "mine" in answer(app, "train.other")
    refused("No evaluate function registered with name 'other'", answer, app, "evaluate.other")


def test_mods_and_lifespan_go_with_both_kinds_of_function():
    seen = []

    def noting(message, context, call):
        seen.append(message.metadata.message_type)
        return call(message, context)

    def lifespan(context):
        seen.append("begin")
        yield
        seen.append("end")

    app = client_app(lambda _: ECHO, mods=[noting])
    app.lifespan()(lifespan)
    app.evaluate()(own_reply)
    answer(app, "train")
    answer(app, "evaluate")
    assert seen == ["begin", "train", "end", "begin", "evaluate", "end"]


# ------------------------------------------------------------------ making clients


class Augmented(Dataset[tuple[Tensor, int]]):
    """Adds noise from torch's global generator each time that an example is read."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return X[i] + torch.randn(4), int(Y[i])


def net():
    """A user's own network, built anew in each message, whose weights and dropout draw."""
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))


with torch.random.fork_rng(devices=[]):
    torch.default_generator.manual_seed(0)
    FIRST = ArrayRecord(dict(net().state_dict()))


def trained(client_fn, clients=2, strategy=None, rounds=1, **options):
    strategy = strategy or SeededFedAvg(fraction_evaluate=0.0)
    with LocalGrid(client_app(client_fn), clients, {}, **options) as grid:
        result = strategy.start(grid, FIRST, num_rounds=rounds)
    return {name: array.numpy().tobytes() for name, array in result.arrays.items()}


def test_clients_in_threads_do_not_draw_each_others_numbers():
    """client_fn builds a network, which draws from the generator that reading and dropout use."""

    def client_fn(context):
        return SGDClient(net(), Augmented(), sgd=LocalSGD(epochs=3, batch_size=4))

    sequential, *in_threads = (trained(client_fn, 12, rounds=2, workers=k) for k in (1, 4, 4))
    assert in_threads == [sequential, sequential]


def test_clients_without_a_seed_draw_numbers_of_their_own():
    """By their ids in the federation, and the same in each exchange of a round."""
    seen = {}

    def client_fn(context):
        class Watching(NTKFLClient):
            def training_examples(self, config):
                x, targets = super().training_examples(config)
                seen.setdefault(int(context.node_config["partition-id"]), []).append(x)
                return x, targets

        return Watching(net(), Augmented())

    trained(client_fn, strategy=NTKFL(learning_rate=0.1, steps=[20], fraction_evaluate=0.0))
    for fit, query in seen.values():
        assert torch.equal(fit, query)
    assert not torch.equal(seen[0][0], seen[1][0])


@pytest.mark.parametrize(("seed", "expected"), [(3, (3,)), ((1, 2), (1, 2)), (None, (0,))])
def test_a_seed_may_be_one_number_and_none_is_that_of_the_clients_id(seed, expected):
    """An ensemble's client tells the client within who it is."""
    own = SGDClient(nn.Linear(4, 3), X, Y, seed=seed)
    assert own.seed == expected
    FedEnsembleClient(own).identify("7")
    assert (own.seed == expected) == (seed is not None)
    text = "seed: expected a whole number of at least 0, or sever"
    refused(text, SGDClient, nn.Linear(4, 3), X, Y, seed=(0, -1))


def test_a_client_fn_of_older_tutorials_is_told_what_to_return():
    text = r"return the client itself, without .to_client\(\)"
    refused(text, trained, lambda _: SGDClient(net(), X, Y).to_client(), error=NoUsableReply)

"""FedAvg and its kin under masks: the bits of plain fixed-point sums, and nothing of one client."""

import functools

import numpy as np
import pytest
from flwr.app import ArrayRecord

from fedntk.clients import (
    DittoClient,
    LocalSGD,
    MaskedWeights,
    PersonalisedClient,
    SGDClient,
    client_app,
)
from fedntk.ntk.payloads.masked_average import average_of, average_words
from fedntk.strategies import Ditto, PersonalisedStrategy, SecureAggregation
from fedntk.strategies import SeededFedAvg as FedAvg
from fedntk.strategies.core.averaging import cast_like

from .federation import (
    Grid,
    app,
    arrays_of,
    as_record,
    bits,
    examples,
    first_model,
    forgetting,
    initial_bits,
    lost,
    network,
    owned,
    start,
    start_in_vain,
    told,
)

OPTIONS = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
SGD = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4)}
NORM = tuple(name for name in network().state_dict() if name.startswith("1."))
SECRETS = "fedntk.strategies.core.secure.secrets"
STEPS = ("public-key", "shares", "masked", "confirm", "reveal")
KINDS = {
    "FedAvg": (FedAvg, SGDClient),
    "Ditto": (Ditto, DittoClient),
    "personal": (functools.partial(PersonalisedStrategy, personal=NORM), PersonalisedClient),
}


def make(kind=FedAvg, **options):
    return kind(**OPTIONS | {"secure": True} | options)


@pytest.fixture
def masked(tmp_path):
    """Make the clients' app, with the mod's settings."""

    def made(client=SGDClient, **settings):
        settings = {"cache": tmp_path / "masks", "allow_repeats": True} | settings
        return app(client, mods=[MaskedWeights(**settings)], **SGD)

    return made


def step_of(message):
    return message.content["config"].get("option-masked-step")


def client_of(reply):
    return reply.content["metrics"]["partition-id"]


class Lossy(Grid):
    """Clients 1 and 4 are gone from a step of the protocol on."""

    gone = "never"

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        steps = {step_of(m) for m in messages}
        replies = super().send_and_receive(messages)
        return [r for r in replies if self.gone not in steps or client_of(r) not in (1, 4)]


def words_of(reply, model):
    metrics = reply.content["metrics"]
    weights = arrays_of(reply.content["arrays"])
    return average_words(model, weights, metrics["num-examples"], metrics["train-loss"])


def fixed_point(strategy, client, without=()):
    """Weights after one round of plain replies, which are rounded, and added up, without masks."""
    grid = Grid(app(client, **SGD))
    start(strategy, grid)
    model = arrays_of(next(m.content["arrays"] for way, m in grid.seen if way == "down"))
    came = [m for way, m in grid.seen if way == "up" and client_of(m) not in without]
    words = [words_of(reply, model) for reply in came]
    mean, metrics = average_of(np.sum(words, axis=0, dtype=np.uint64), model, len(came))
    initial = arrays_of(ArrayRecord(dict(first_model(strategy).state_dict())))
    return initial | arrays_of(cast_like(mean, model)), metrics


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("step", ["never", *STEPS])
def test_the_model_is_that_of_plain_fixed_point_sums_to_the_bit(name, step, masked):
    """Also if two of six are lost at any step: from their words on, the sum has them."""
    kind, client = KINDS[name]
    left = (1, 4) if step in STEPS[:3] else ()
    grid = Lossy(masked(client))
    grid.gone = step
    strategy = make(kind)
    after = start(strategy, grid)
    expected, metrics = fixed_point(kind(**OPTIONS), client, left)
    assert bits(after) == bits(expected)
    assert strategy.train_metrics[1]["replies-accepted"] == 6 - len(left)
    for metric in ("num-examples", "clipped", "train-loss"):
        assert strategy.train_metrics[1][metric] == metrics[metric]
    plain = start(kind(**OPTIONS), Grid(app(client, **SGD), changes=dict.fromkeys(left, lost)))
    for array, other in zip(after.values(), plain.values(), strict=True):
        np.testing.assert_allclose(array, other, rtol=2e-6, atol=1e-6)


def test_nodes_that_report_no_partition_may_have_any_id(masked, tmp_path):
    """Flower's are whole numbers of 64 bits without a sign."""

    def client_fn(context):
        hospital = int(context.node_config["hospital"])
        return SGDClient(network(), *examples(hospital), seed=(0, hospital), **SGD)

    mods = [MaskedWeights(cache=tmp_path / "others", allow_repeats=True)]
    grid = Grid(client_app(client_fn, mods=mods), node_ids=range(2**64 - 6, 2**64))
    for i, context in enumerate(grid.contexts.values()):
        context.node_config = {"hospital": i}
    assert bits(start(make(), grid)) == bits(start(make(), Grid(masked())))


def test_the_server_gets_no_clients_words_examples_or_loss(masked):
    """Nothing that a client sends is as without masks, or the same in another run."""
    grids = [Grid(masked()) for _ in range(2)]
    for grid in grids:
        start(make(), grid)
    plain = Grid(app(SGDClient, **SGD))
    start(FedAvg(**OPTIONS), plain)
    model = arrays_of(ArrayRecord(dict(network().state_dict())))
    for reply in (m for way, m in plain.seen if way == "up"):
        words = words_of(reply, model)
        sent = [
            [m.content for w, m in grid.seen if w == "up" and client_of(m) == client_of(reply)]
            for grid in grids
        ]
        metrics = {"num-examples": 1, "partition-id": client_of(reply)}
        assert all(dict(content["metrics"]) == metrics for content in sent[0])
        one, other = (arrays_of(content[2]["arrays"])["masked"] for content in sent)
        assert one.shape == words.shape
        assert not (one == words).any()
        assert not (one == other).any()


def test_a_client_that_was_sent_another_model_keeps_the_sum_closed(masked):
    """Else the difference to what the others add would tell of its own."""

    def lie(messages):
        for message in messages[1:2]:
            if step_of(message) == "masked":
                arrays = arrays_of(message.content["arrays"])
                changed = {n: np.asarray(a + 1, a.dtype) for n, a in arrays.items()}
                message.content["arrays"] = as_record(changed)

    after = start_in_vain(make(), Grid(masked(), on_send=lie))
    assert bits(after) == initial_bits()


def remembering(folder):
    """Make the app of clients whose owners have ledgers."""

    def masked(**options):
        def mask(message, context, call_next):
            privacy = owned(folder, context.node_config["partition-id"])
            mod = MaskedWeights(cache=folder / "masks", privacy=privacy, **options)
            return mod(message, context, call_next)

        return app(SGDClient, mods=[mask], **SGD)

    return masked


def test_a_client_gives_one_sum_of_its_weights_in_a_round(tmp_path, monkeypatch):
    """A server that asks again, without client 0, would get client 0's weights by subtraction."""
    masked, strategy = remembering(tmp_path), make()
    start(strategy, Grid(masked()), rounds=2)
    assert told(strategy) == [6, 6]  # each round is another function of the data
    key = strategy.secure.run_key
    monkeypatch.setattr(f"{SECRETS}.token_hex", lambda _: key)
    again = make(min_available_nodes=5)
    start_in_vain(again, Grid(masked(), changes={0: lost}), rounds=2)
    assert "only its owner can allow" in again.channel.last_refusal
    start(allowed := make(), Grid(masked(allow_repeats=True)), rounds=3)
    assert told(allowed) == [6, 6, 6]


def test_a_round_whose_sum_clients_gave_up_is_not_counted(tmp_path, monkeypatch):
    """But one that closed after they gave their shares is, whose round is asked for again."""
    for step, accepted in (("masked", [6, 6]), ("reveal", [0, 6])):
        masked = remembering(tmp_path / step)
        closed, grid = make(secure=SecureAggregation(threshold=0.8)), Lossy(masked())
        grid.gone = step
        start_in_vain(closed, grid)
        assert "4 clients are left, 5 are needed" in closed.channel.last_refusal
        with monkeypatch.context() as patch:
            patch.setattr(f"{SECRETS}.token_hex", lambda _, key=closed.secure.run_key: key)
            start(again := make(), Grid(masked()), rounds=2)
        assert told(again) == accepted


def test_a_client_insists_on_enough_clients_and_on_masks(masked, tmp_path):
    """Four of six are the threshold of 2 / 3."""

    def insisting(fewest):
        return masked(privacy=owned(tmp_path, "all", fewest_clients=fewest))

    start(make(), Grid(insisting(4)))
    few = make()
    start_in_vain(few, Grid(insisting(5)))
    assert (
        "opens only with 5 clients or more, got one that opens with 4 of 6"
        in few.channel.last_refusal
    )
    start(make(secure=SecureAggregation(threshold=0.8)), Grid(insisting(5)))
    plain = FedAvg(**OPTIONS)
    start_in_vain(plain, Grid(masked()))
    assert "sends only masked sums, and was asked for train" in plain.channel.last_refusal
    x, y = examples(9)
    for tests, accepted in (({}, 0), ({"x_test": x, "y_test": y}, 6)):
        evaluated = make(fraction_evaluate=1.0)
        start(evaluated, Grid(masked(functools.partial(SGDClient, **tests))))
        assert evaluated.evaluate_metrics[1]["replies-accepted"] == accepted
    start(FedAvg(**OPTIONS), Grid(masked(only_masked=False)))
    start_in_vain(unnamed := make(), Grid(masked(allow_repeats=None)))
    assert "fedntk privacy-ledger --new PATH" in unnamed.channel.last_refusal


def test_weights_that_are_not_finite_are_their_clients_error(masked):
    class Diverging(SGDClient):
        def fit(self, parameters, config):
            weights, count, metrics = super().fit(parameters, config)
            return [w * np.nan if self.seed[-1] == 3 else w for w in weights], count, metrics

    strategy = make()
    after = start(strategy, Grid(masked(Diverging)))
    assert bits(after) == bits(fixed_point(FedAvg(**OPTIONS), SGDClient, (3,))[0])
    assert "lower the step size" in strategy.channel.last_refusal
    assert strategy.train_metrics[1]["rejected-error"] == 1


def test_a_client_that_lost_its_personal_arrays_is_sent_them_within_the_sum(masked):
    strategy = make(KINDS["personal"][0])
    changes = {2: forgetting(strategy, until=2)}  # what all clients kept of round 1
    grid = Grid(masked(PersonalisedClient), changes=changes)
    start(strategy, grid, rounds=2)
    assert told(strategy) == [6, 6]
    exchanges = [kind for kind, _ in grid.exchanges]
    assert exchanges.count("train") == 5 + 6


def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(masked, tmp_path):
    straight = start(make(), Grid(masked()), rounds=3)
    start(make(), Grid(masked()), rounds=2, checkpoint=tmp_path / "run")
    again = start(make(), Grid(masked()), rounds=3, checkpoint=tmp_path / "run")
    assert bits(again) == bits(straight)

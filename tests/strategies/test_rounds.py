"""Rounds as generators: what drives them, what is left of them, and what is said of wrong ones."""

import copy
import functools
import pickle

import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvgM
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedntk.clients import (
    DFedAvgClient,
    DittoClient,
    FedEnsembleClient,
    LocalSGD,
    SCAFFOLDClient,
    SGDClient,
)
from fedntk.strategies import (
    SCAFFOLD,
    DFedAvg,
    Ditto,
    FedEnsemble,
    FromFlower,
    SeededFedAvg,
    Strategy,
    Update,
)

from .federation import NUM_CLIENTS, Grid, app, arrays_of, bits, failed, first_model, network, start
from .test_contract import FEWER, STRATEGIES, frozen, histories, richest

ALL = {"min_available_nodes": NUM_CLIENTS, "fraction_evaluate": 0.0}
SGD = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4)}
CLIENTS = app(SGDClient, **SGD)


def ensemble_client(*of, **more):
    return FedEnsembleClient(SGDClient(*of, **more))


ENSEMBLE = app(ensemble_client, **SGD)


def initial(strategy):
    return ArrayRecord(dict(first_model(strategy).state_dict()))


@richest(lambda _: True)
def test_after_a_run_a_strategy_is_copied_with_its_state(name):
    """It holds no grid and no round; the copy goes on to the bits of the strategy itself."""
    make, clients = STRATEGIES[name]
    strategy = make(fraction_evaluate=1.0, min_evaluate_nodes=FEWER, min_available_nodes=FEWER)
    after = start(strategy, Grid(clients, num_clients=FEWER))
    assert strategy.channel.grid is None
    again = copy.deepcopy(strategy)
    assert frozen(again) == frozen(strategy)
    assert bits(start(again, Grid(clients, num_clients=FEWER))) == bits(after)


@pytest.mark.parametrize(
    ("strategy", "clients"),
    [
        (SeededFedAvg(**ALL), CLIENTS),
        (FromFlower(FedAvgM(server_momentum=0.5), **ALL), CLIENTS),
        (FedEnsemble(inner=FedAdam, num_models=2, **ALL), ENSEMBLE),
    ],
)
def test_after_a_run_a_strategy_is_pickled_with_its_state(strategy, clients):
    after = start(strategy, Grid(clients), rounds=2)
    again = pickle.loads(pickle.dumps(strategy))  # noqa: S301 - our own
    assert frozen(again) == frozen(strategy)
    assert bits(start(again, Grid(clients), rounds=2)) == bits(after)


@richest(lambda _: True)
def test_flowers_own_start_drives_the_rounds_to_the_same_bits(name):
    """It calls the same functions in the same order, and ends with the same result."""
    make, clients = STRATEGIES[name]
    ours, theirs = (
        make(fraction_evaluate=1.0, min_evaluate_nodes=FEWER, min_available_nodes=FEWER)
        for _ in range(2)
    )

    def run(start, arrays):
        seen = []
        result = start(
            Grid(clients, num_clients=FEWER),
            arrays,
            num_rounds=2,
            evaluate_fn=lambda number, arrays: seen.append((number, bits(arrays_of(arrays)))),
        )
        return bits(arrays_of(result.arrays)), histories(result), seen

    arrays = theirs.begin(initial(theirs), 2, 0)
    theirs.last_round = 2
    expected = run(ours.start, initial(ours))
    assert run(functools.partial(FlowerStrategy.start, theirs), arrays) == expected


def test_flowers_wrapper_for_privacy_drives_a_strategy_of_ours():
    """Without clipping or noise the result is the strategy's, up to the rounding of clipping."""
    expected = start(SeededFedAvg(**ALL), Grid(CLIENTS), rounds=2)
    wrapped = DifferentialPrivacyServerSideFixedClipping(
        SeededFedAvg(**ALL), noise_multiplier=0.0, clipping_norm=1e9, num_sampled_clients=6
    )
    after = start(wrapped, Grid(CLIENTS), rounds=2)
    for key, array in expected.items():
        assert after[key] == pytest.approx(array, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "client"),
    [
        (SeededFedAvg, SGDClient),
        (SCAFFOLD, SCAFFOLDClient),
        (functools.partial(FedEnsemble, inner=SeededFedAvg, num_models=2), ensemble_client),
        (Ditto, DittoClient),
        (DFedAvg, DFedAvgClient),
    ],
)
def test_a_rate_that_falls_by_round_is_that_set_by_hand_in_each_message(make, client):
    """0.1 in rounds 1 and 2, then 0.07 and 0.049: the same bits, and no more in any message."""
    rates, sent = [0.1, 0.1, 0.1 * 0.7, 0.1 * 0.7**2], []

    def run(*, by_hand=False, **options):
        def look(messages):
            configs = [m.content["config"] for m in messages if "config" in m.content]
            sent[-1] += [sorted(config) for config in configs]
            for config in configs if by_hand else ():  # which messages may share
                config["lr"] = rates[config["server-round"] - 1]

        sent.append([])
        clients = app(client, sgd=LocalSGD(learning_rate=0.1, batch_size=4, **options))
        return bits(start(make(**ALL), Grid(clients, on_send=look), rounds=4))

    expected = run(by_hand=True)
    assert run(rate_decay=0.7, rate_decay_after=2) == expected != run()
    assert sent[0] == sent[1] == sent[2]


def bare(self, r):
    """Use what the round should have waited for."""
    uploads = r.ask(r.weights)
    yield from ()
    return Update(self.screening.drop_outliers(uploads, r.model))


def counted(self, r):
    uploads = r.ask(r.weights)
    yield from ()
    return Update(uploads if self.enough(uploads) else None)


def returned(_, r):
    yield from ()
    return Update(r.ask(r.weights))


def handed(_, r):
    """Hand on a round in place of an exchange."""
    uploads = yield r.ask(r.weights)
    return Update(uploads)


def plain(_, r):
    """Ask nobody, in what is no generator."""
    return Update(r.ask(r.weights))


@pytest.mark.parametrize("wrong", [bare, counted, returned, handed, plain])
def test_a_round_without_yield_from_says_what_to_write(wrong):
    kind = type("Wrong", (SeededFedAvg,), {"train_round": wrong})
    with pytest.raises(TypeError, match=r"uploads = yield from r\.ask\(\.\.\.\)"):
        start(kind(**ALL), Grid(CLIENTS))


@pytest.mark.parametrize("at", [0, 1])
def test_a_round_that_raises_leaves_the_strategy_usable(at):
    """Before its first exchange, or after it; for training and for evaluation."""

    class Failing(SeededFedAvg):
        fails = False

        def train_round(self, r):
            if self.fails and not at:
                raise ConnectionError
            update = yield from SeededFedAvg.train_round(self, r)
            if self.fails:
                raise ConnectionError
            return update

    strategy = Failing(**ALL)
    expected = start(strategy, Grid(CLIENTS), rounds=2)
    strategy.fails = True
    with pytest.raises(ConnectionError):
        start(strategy, Grid(CLIENTS), rounds=2)
    copy.deepcopy(strategy)
    strategy.fails = False
    assert bits(start(strategy, Grid(CLIENTS), rounds=2)) == bits(expected)


def test_over_flowers_hooks_a_round_that_was_not_finished_is_forgotten():
    strategy, grid = SeededFedAvg(**ALL), Grid(CLIENTS)
    strategy.configure_train(1, initial(strategy), ConfigRecord(), grid)
    expected = start(SeededFedAvg(**ALL), Grid(CLIENTS))
    assert bits(start(strategy, grid)) == bits(expected)
    assert strategy.aggregate_train(2, []) == (None, None)


class Anonymous(Grid):
    """Gives messages no ids."""

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages, timeout=timeout)
        for message in [*messages, *replies]:
            vars(message.metadata)["_message_id"] = ""
        return replies


def test_on_a_grid_without_message_ids_replies_count_by_node():
    changes = {1: failed, 2: lambda reply: [reply, reply]}
    plain, bare = SeededFedAvg(**ALL), SeededFedAvg(**ALL)
    expected = start(plain, Grid(CLIENTS, changes=changes), rounds=2)
    assert bits(start(bare, Anonymous(CLIENTS, changes=changes), rounds=2)) == bits(expected)
    metrics = bare.train_metrics[2]
    assert (metrics["rejected-error"], metrics["rejected-duplicate"]) == (1, 1)


def test_a_round_that_asks_nobody_goes_on_to_the_next():
    class Every(Strategy):
        """Trains in each second round."""

        def train_round(self, r):
            if r.number % 2 == 0:
                return Update(None)
            uploads = yield from r.ask(r.weights)
            return Update(uploads, r.arrays)

    strategy = Every(**ALL)
    start(strategy, grid := Grid(CLIENTS), rounds=3, model=network())
    assert sorted(strategy.train_metrics) == [1, 3]
    assert grid.exchanges == [("train", NUM_CLIENTS)] * 2

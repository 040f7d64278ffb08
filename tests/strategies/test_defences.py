"""Aggregation rules: strategies bear a malicious client that breaks them without, or refuse."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from fedntk.clients import (
    BootstrapSGD,
    DittoClient,
    FedEnsembleClient,
    LocalSGD,
    NTKDFLClient,
    NTKFLClient,
    PersonalisedClient,
    SCAFFOLDClient,
    SGDClient,
    TCTClient,
)
from fedntk.ntk import TCTModel
from fedntk.ntk.robust_averages import DEFENCES
from fedntk.simulations.attacks import ATTACKS
from fedntk.simulations.engine.faults import LyingGrid
from fedntk.strategies import (
    NTKDFL,
    NTKFL,
    SCAFFOLD,
    TCT,
    Ditto,
    FedBN,
    FedEnsemble,
    NoUsableReply,
    Screening,
    SeededFedAvg,
    Topology,
)
from fedntk.strategies.core.sampling import NotEnoughNodes
from fedntk.strategies.gossip.relay import MODEL

from .federation import (
    Grid,
    app,
    arrays_of,
    as_record,
    bits,
    initial_bits,
    lost,
    network,
    run_as_if_lost,
    start,
    told,
    with_arrays,
)

LOOSE = Screening(outlier_factor=np.inf)
ROBUST = [defence for defence in DEFENCES if defence != "none"]
CASES = {
    "fedavg": (partial(SeededFedAvg, screening=LOOSE), app(SGDClient)),
    "scaffold": (partial(SCAFFOLD, screening=LOOSE), app(SCAFFOLDClient)),
}


def lying(clients):
    """Client 2's change is -60 times an honest one: a sixth of it is ten honest changes."""
    return LyingGrid(Grid(clients), (2,), ATTACKS["sign-flip"], factor=60.0)


def distance(one, other):
    return max(float(np.abs(one[n] - other[n]).max()) for n in one if one[n].dtype.kind == "f")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("defence", [d for d in ROBUST if d != "bulyan"])  # six clients: too few
def test_a_liar_that_moves_the_mean_far_moves_the_defended_little(name, defence):
    make, clients = CASES[name]
    honest = start(make(), Grid(clients), 2)
    first = arrays_of(ArrayRecord(dict(network().state_dict())))
    moved = distance(first, honest)
    undefended = start(make(), lying(clients), 2)
    defended = start(make(screening=LOOSE.copy(rule=defence)), lying(clients), 2)
    assert distance(undefended, honest) > 3 * moved
    assert distance(defended, honest) < 2 * moved


def test_too_few_replies_for_the_malicious_clients_leave_the_model():
    """Krum bears two among seven, and six clients reply; with six clients none ever do."""
    strategy = SeededFedAvg(screening=Screening("krum", malicious=2), fraction_train=0.1)
    with pytest.raises(NotEnoughNodes, match=r"screening\.rule = krum = 7: this grid has 6 nodes"):
        start(strategy, Grid(CASES["fedavg"][1]))
    for own, clients in (
        (strategy, CASES["fedavg"][1]),
        (ntk_fl(Screening("leave-one-out", malicious=3)), many(NTKFLClient)),  # seven as well
    ):
        after = start(own, Grid(clients, num_clients=7, changes={6: lost}))
        assert (told(own), bits(after)) == ([6], initial_bits())


def test_personal_methods_defend_what_is_shared():
    make = partial(FedBN, network=network(), screening=LOOSE)
    clients = app(PersonalisedClient)
    honest = start(make(), Grid(clients), 2)
    defended = start(make(screening=LOOSE.copy(rule="nnm")), lying(clients), 2)
    assert distance(defended, honest) < distance(start(make(), lying(clients), 2), honest) / 3


def many(kind):
    """Clients with 36 examples of all three classes, enough to judge others by."""

    def make(model, *_, seed, **options):
        y = torch.arange(36) % 3
        noise = torch.randn(36, 4, generator=torch.Generator().manual_seed(seed[1]))
        return kind(model, noise + 5 * torch.nn.functional.one_hot(y, 4), y, seed=seed, **options)

    return app(make)


def alike(kind):
    """Clients whose steps are so small that none is worse than the others by 0.5 %."""
    return many(partial(kind, sgd=LocalSGD(learning_rate=1e-3)))


def shift(arrays):
    """Move a Jacobian's labels on by one class."""
    return arrays | {"targets": np.roll(arrays["targets"], 1, axis=1)}


def ntk_fl(screening=Screening("leave-one-out"), **options):  # noqa: B008
    options = {"learning_rate": 0.5, "steps": (20, 80), "selection": "linearised", **options}
    return NTKFL(screening=screening, fraction_evaluate=0.0, **options)


def test_false_labels_in_ntk_fl_have_the_result_of_a_lost_reply():
    run_as_if_lost(ntk_fl, many(NTKFLClient), with_arrays(shift), "leave-one-out")


LAST = "3.bias"


def judge(arrays):
    """A loss that grows with the last biases, or with the linear model once it is not zero."""
    weights = arrays_of(arrays)
    return 1 + float(np.linalg.norm(weights.get(TCTModel.ARRAYS[0], weights[LAST])))


def far(weights):
    """Add 9 to what `judge` looks at."""
    return {n: a + 9 if n in (LAST, TCTModel.ARRAYS[0]) else a for n, a in weights.items()}


JUDGED = {
    "screening": LOOSE.copy(rule="validation", validation_loss=judge), "fraction_evaluate": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "client"),
    [(SeededFedAvg, SGDClient), (SCAFFOLD, SCAFFOLDClient), (Ditto, DittoClient)],
)
def test_weights_that_raise_the_validation_loss_have_the_result_of_a_lost_reply(kind, client):
    clients = alike(client)
    run_as_if_lost(partial(kind, **JUDGED), clients, with_arrays(far), "validation", rounds=2)
    with pytest.raises(NoUsableReply):
        start(kind(**JUDGED), Grid(clients, changes=dict.fromkeys(range(6), lost)))


def test_replies_that_a_defence_dropped_count_as_completed():
    """All six are needed, and came; also where models of an ensemble have the defence."""
    single = SeededFedAvg(**JUDGED, min_completed=6)
    changes = {2: with_arrays(far)}
    assert bits(start(single, Grid(alike(SGDClient), changes=changes))) != initial_bits()
    members = alike(lambda *given, **own: FedEnsembleClient(SGDClient(*given, **own)))
    ensemble = FedEnsemble(
        inner=partial(SeededFedAvg, **JUDGED), num_models=1, min_completed=6, fraction_evaluate=0.0
    )
    start(ensemble, Grid(members, changes=changes))
    assert single.train_metrics[1]["rejected-validation"] == 1
    assert ensemble.train_metrics[1]["models-updated"] == 1


def test_tct_judges_networks_and_linear_models_by_the_validation_loss():
    """One round of stage 1, and two of stage 2."""
    seen = []

    def loss(arrays):
        seen.append(TCTModel.ARRAYS[0] in arrays)
        return judge(arrays)

    options = {"num_features": 20, "local_steps": 5, "learning_rate": 1e-3, "normalise": False}
    options |= {**JUDGED, "screening": JUDGED["screening"].copy(validation_loss=loss)}

    def tct():
        return TCT(network=network(), bootstrap=SeededFedAvg(), bootstrap_rounds=1, **options)

    clients = many(partial(TCTClient, sgd=BootstrapSGD(learning_rate=1e-3)))
    run_as_if_lost(tct, clients, with_arrays(far), "validation", rounds=3)
    assert seen[0] is False
    assert seen[-1] is True


def test_honest_jacobians_are_all_used():
    """Twice the bits of a run without a defence; t is chosen by the same losses."""
    clients = many(NTKFLClient)
    strategy = ntk_fl()
    assert bits(start(strategy, Grid(clients), 2)) == bits(
        start(ntk_fl(Screening()), Grid(clients), 2)
    )
    assert told(strategy) == [6, 6]


def test_a_minority_s_losses_do_not_choose_t():
    """A client that claims a loss of 0 without a step and 50 elsewhere has its way by means."""

    def lie(reply):
        reply.content["metrics"]["losses"] = [0.0, 50.0, 50.0]
        return reply

    chosen = []
    for defence in ("none", "leave-one-out"):
        strategy = ntk_fl(LOOSE.copy(rule=defence), selection="clients")
        start(strategy, Grid(many(NTKFLClient), changes={2: lie}, changed_kind="query"))
        chosen.append(told(strategy, "t")[0] > 0)
    assert chosen == [False, True]


def ntk_dfl(screening):
    line = Topology("line")
    return NTKDFL(learning_rate=0.1, steps=(20.0,), topology=line, screening=screening)


@cache
def gossip_models(defence, lie=None):
    """Clients' models after a round of NTK-DFL in which client 2 may lie."""
    strategy = ntk_dfl(LOOSE.copy(rule=defence))
    start(strategy, Grid(many(NTKDFLClient), changes={2: lie} if lie else {}))
    return strategy.models


@pytest.mark.parametrize("what", ["weights", "labels"])
def test_neighbours_in_ntk_dfl_are_judged_by_the_client_s_own_examples(what):
    """One number of 1e9, or false labels: the honest models stay near those of an honest run."""

    def lie(reply):
        for record in reply.content.array_records if reply.has_content() else ():
            arrays = arrays_of(reply.content[record])
            if "targets" in arrays and what == "labels":
                reply.content[record] = as_record(shift(arrays))
            elif "0.weight" in arrays and what == "weights":
                arrays["0.weight"] = arrays["0.weight"].copy()
                arrays["0.weight"][0, 0] = 1e9
                reply.content[record] = as_record(arrays)
        return reply

    honest = gossip_models("none")
    away = [
        max(distance(gossip_models(defence, lie)[k], honest[k]) for k in (0, 1, 3, 4, 5))
        for defence in ("none", "leave-one-out")
    ]
    assert away[1] < away[0] / 2


def test_the_mean_of_neighbours_models_is_without_one_that_is_far_away():
    """Weights that are 20 times as large are below the outlier factor of 100."""
    lie = with_arrays(lambda weights: {n: np.asarray(20 * a, a.dtype) for n, a in weights.items()})
    means, models = [], []
    for rule in ("none", "leave-one-out"):
        strategy = ntk_dfl(Screening(rule))
        means.append(
            start(strategy, Grid(many(NTKDFLClient), changes={2: lie}, changed_kind=MODEL))
        )
        models.append(set(strategy.models))
    assert models == [set(range(6)), {0, 1, 3, 4, 5}]
    assert distance(*means) > 0

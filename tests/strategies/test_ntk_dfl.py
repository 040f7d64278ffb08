"""NTK-DFL against its equations, computed on one machine, and against clients that fail."""

from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Array
from torch import nn

from fedntk.clients import NTKDFLClient, NTKFLClient
from fedntk.ntk import jacobian, loss_value
from fedntk.ntk.evolution.gradient_flow import GradientFlow
from fedntk.strategies import NTKDFL, NTKFL, Topology

from .federation import Contract, Grid, app, arrays_of, bits, examples, failed, kept_by, told
from .test_gossip import COMPLETE, OPTIONS, agree, learn, net

STEPS = (2.0, 5.0, 10.0)
MSE = {"loss": "mse", **OPTIONS}
FIRST = {name: t.numpy() for name, t in net().state_dict().items()}


def make(**options):
    return NTKDFL(**{"learning_rate": 0.1, "steps": STEPS, "topology": COMPLETE, **options})


def contract(loss, topology, **options):
    """Two steps, in closed form for MSE, else with few products of the solver."""
    options |= {"topology": Topology(topology, degree=2), "steps": STEPS[:2], "tolerance": 0.1}
    kind = partial(make, loss=loss, **options)
    return Contract(kind, app(NTKDFLClient, loss=loss), one_exchange=False, sends_arrays=False)


CONTRACT = {
    "NTKDFL, one evolution a cluster": contract("mse", "clustered", evolve_once=True),
    "NTKDFL, line, class prior, compressed": contract(
        "cross-entropy", "line", class_prior=True, selection="own", sparsity=0.5, bits=6
    ),
}


def model(weights):
    made = net().eval()
    made.load_state_dict({name: torch.tensor(a) for name, a in weights.items()})
    return made


def clients(loss="mse", kind=NTKDFLClient):
    return app(lambda _, x, y, **more: kind(net(), x.double(), y, loss=loss, **more))


def mean_of(models, shares=None):
    return {n: np.average([arrays[n] for arrays in models], 0, shares) for n in models[0]}


def candidates(held, parts, steps=STEPS, *, prior=False, **options):
    """Weights at each t of an evolution on one machine, eq. (2) to (5), and the outputs' offset."""
    x, y = (torch.cat(of) for of in zip(*parts, strict=True))
    network, targets = model(held), nn.functional.one_hot(y, 3).double()
    shares = (targets.sum(0) + 1 / 3) / (len(y) + 1)
    offset = (3 * shares).log() if prior else 0.0
    with torch.no_grad():
        outputs = network(x.double()) + offset
    rows = jacobian(network, x.double())
    flow = GradientFlow(**{"learning_rate": 0.1, "loss": "mse", "steps": steps, **options})
    updates = [rows.vjp(residuals) for residuals in flow(rows, outputs, targets).residuals]
    moved = [{n: held[n] + change.numpy() for n, change in update.items()} for update in updates]
    return [held | arrays for arrays in moved], offset


def batches_of(client, number, count):
    x, y = examples(client)
    if count == 1:
        return [(x, y)]
    order = np.random.default_rng([0, client, number, *b"batches"]).permutation(len(y))
    parts = [torch.from_numpy(np.sort(part)) for part in np.array_split(order, count)]
    return [(x[part], y[part]) for part in parts]


@pytest.mark.parametrize(
    ("options", "exchanges", "bound"),
    [
        ({"learning_rate_decay": 0.5}, 4 + 3, 1e-9),
        ({"loss": "cross-entropy", "class_prior": True}, 4 + 3, 1e-4),
        ({"average_first": False}, 3 + 2, 1e-9),
        ({"batches": 2}, 6 + 5, 1e-9),
        ({"kernel": "corrected"}, 4 + 3, 1e-9),
        ({"residuals": "sum"}, 4 + 3, 1e-9),
    ],
    ids=str,
)
def test_rounds_are_those_of_the_algorithms_on_one_machine(options, exchanges, bound):
    """Algorithms 2 to 4: MSE in closed form, cross-entropy to the solver's tolerance of 1e-4."""
    given, count = MSE | options, [5 + k for k in range(6)]
    topology = Topology("regular", degree=3, seed=4)
    strategy = make(topology=topology, tolerance=1e-4, collect_both=True, **given)
    after = learn(strategy, grid := Grid(clients(given["loss"])), 2)
    assert [kind for kind, _ in grid.exchanges].count("train") == exchanges
    held = dict.fromkeys(range(6), FIRST)
    flow = {name: given[name] for name in ("kernel", "residuals", "loss") if name in given}
    for number in (1, 2):
        near = {k: [k, *j] for k, j in topology.neighbours(number, range(6)).items()}
        if strategy.average_first:
            held = {
                k: mean_of([held[j] for j in near[k]], [count[j] for j in near[k]]) for k in near
            }
        averaged = dict(held)
        flow["learning_rate"] = 0.1 * np.exp(-strategy.learning_rate_decay * (number - 1))
        for batch in range(strategy.batches):
            for k in range(6):
                parts = [batches_of(j, number, strategy.batches)[batch] for j in near[k]]
                held[k] = candidates(held[k], parts, prior=strategy.class_prior, **flow)[0][-1]
        for k in range(6):
            agree(kept_by(strategy, k, number), held[k], bound)
    for k, model in strategy.models_at["averaged"].items():
        agree(model, averaged[k], bound)
    agree(after, mean_of(list(held.values())), bound)


def test_on_the_complete_graph_it_is_ntk_fl_of_all_clients():
    after = learn(strategy := make(**MSE), Grid(clients()), 2)
    rule = {"steps": STEPS[-1:], "selection": "linearised", "allow_no_step": False}
    central = NTKFL(learning_rate=0.1, **rule, **MSE)
    agree(after, learn(central, Grid(clients(kind=NTKFLClient)), 2), 1e-9)
    assert told(strategy, "inter-client-deviation") == pytest.approx([0, 0], abs=1e-12)


@pytest.mark.parametrize(("options", "degree"), [({"batches": 2}, 2), ({"same_weights": False}, 3)])
def test_one_evolution_a_cluster_gives_what_all_its_members_would_find(options, degree):
    """Of equal clusters, and of four and two; sums are in another order."""
    topology, kept, averaged = Topology("clustered", degree=degree, seed=5), [], []
    for once in (False, True):
        strategy = make(evolve_once=once, topology=topology, collect_both=True, **options, **MSE)
        learn(strategy, grid := Grid(clients()), 2)
        assert told(strategy) == [6, 6]
        kept.append([kept_by(strategy, k, 2) for k in range(6)])
        averaged.append(strategy.models_at["averaged"])
    assert [kind for kind, _ in grid.exchanges].count("train") == 1 + 2 * (2 + 2 * strategy.batches)
    for k in range(6):
        agree(kept[1][k], kept[0][k], 1e-9)
        agree(averaged[1][k], averaged[0][k], 1e-9)
    for hub, members in topology.hubs(2, topology.neighbours(2, range(6))).items():
        assert all(bits(kept[1][k]) == bits(kept[1][hub]) for k in members)


@pytest.mark.parametrize(
    ("selection", "loss", "prior", "grid"),
    [
        ("own", "mse", False, (1.0, 5.0, 3000.0)),
        ("true-loss", "mse", False, (1.0, 5.0, 3000.0)),
        ("true-loss", "cross-entropy", True, tuple(np.geomspace(5, 100, 40).tolist())),
    ],
)
def test_t_is_that_of_the_lowest_true_loss(selection, loss, prior, grid):
    """Cross-entropy, solved to 1e-4 twice: 1e-6 apart. The prior decides for some clients."""
    topology, chosen = Topology("ring", seed=1), set()
    options = {"loss": loss, "learning_rate": 0.3, "tolerance": 1e-4}
    given = {"selection": selection, "class_prior": prior, "steps": grid, **options, **OPTIONS}
    learn(strategy := make(topology=topology, **given), Grid(clients(loss)))
    for k, near in topology.neighbours(1, range(6)).items():
        parts = [examples(j) for j in (k, *near)]
        moved, offset = candidates(FIRST, parts, grid, prior=prior, **options)
        x, y = (torch.cat(of) for of in zip(*parts[: 1 if selection == "own" else 3], strict=True))
        targets = nn.functional.one_hot(y, 3).double()
        with torch.no_grad():
            outputs = [model(held)(x.double()) + offset for held in moved]
        best = np.argmin([loss_value(scores, targets, loss) for scores in outputs])
        chosen.add(grid[best])
        agree(kept_by(strategy, k, 1), moved[best], 1e-6)
    assert max(chosen) < grid[-1]  # which "last" would have taken


def test_inputs_out_of_proportion_have_no_say_in_which_t_is_taken():
    """Losses on two clients' inputs overflow, or are huge; their rows still count in kernels."""
    strategy = make(selection="true-loss", **OPTIONS)

    def sends(value):
        def change(reply):
            if strategy.progress.steps[strategy.progress.position].name == "jacobians":
                for record in reply.content.array_records.values():
                    record["inputs"] = Array(np.full_like(record["inputs"].numpy(), value))
            return reply

        return change

    learn(strategy, Grid(clients("cross-entropy"), changes={2: sends(1e200), 4: sends(1e10)}))
    names = ("t", "parcels-rejected", "neighbours-heard")
    assert [told(strategy, name) for name in names] == [[STEPS[-1]], [10], [5]]


def test_a_client_that_fails_in_a_step_is_out_for_the_round_and_goes_on_with_its_old_weights():
    """Clients 1 to 4 in one exchange each of round 1; their neighbours go on without them."""
    strategy = make(**MSE)

    def fails(step):
        return lambda r: (
            failed(r) if (strategy.server_round, strategy.progress.position) == (1, step) else r
        )

    learn(strategy, Grid(clients(), changes={k: fails(k - 1) for k in (1, 2, 3, 4)}), 2)
    assert told(strategy) == [2, 6]
    assert strategy.trained.last == dict.fromkeys(range(6), 2)
    for k in (0, 5):  # the others sent no Jacobian, but for client 4, which failed after that
        parts = [examples(j) for j in (0, 4, 5)]
        agree(kept_by(strategy, k, 1), candidates(FIRST, parts)[0][-1], 1e-9)


@pytest.mark.parametrize("collect", [True, False])
def test_a_client_that_joins_begins_with_the_global_arrays(collect):
    """Those are the mean model by then; without `collect` the first weights. Client 5 is late."""
    given = MSE | {"min_available_nodes": 5, "collect": collect, "same_weights": not collect}
    strategy, grid, after = make(**given), Grid(clients()), dict(FIRST)
    late = dict([grid.contexts.popitem()])

    def evaluate(server_round, arrays):
        if server_round == 1:
            grid.contexts.update(late)
            after.update(arrays_of(arrays) if collect else {})

    learn(strategy, grid, 2, evaluate_fn=evaluate)
    assert strategy.trained.last == dict.fromkeys(range(6), 2)
    held = [*(kept_by(strategy, k, 1) for k in range(5)), after]
    average = kept_by(strategy, "5-weights-within-round", 2)
    agree(average, mean_of(held, range(5, 11)), 1e-12)
    assert (bits(kept_by(strategy, 0, 0)) == bits(kept_by(strategy, 1, 0))) == (not collect)

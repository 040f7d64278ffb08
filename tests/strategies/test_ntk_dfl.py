"""NTK-DFL against its equations, computed on one machine, and against clients that fail."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from torch import Tensor, nn

from fedntk.clients import NTKDFLClient, NTKFLClient, cache_dir
from fedntk.ntk import jacobian, loss_value
from fedntk.ntk.evolution import GradientFlow
from fedntk.strategies import NTKDFL, NTKFL, Topology

from .federation import (
    Contract,
    Grid,
    app,
    arrays_of,
    as_record,
    bits,
    examples,
    failed,
    kept_by,
    size,
)

STEPS = (2.0, 5.0, 10.0)
ALL = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
MSE: dict[str, Any] = {"loss": "mse", **ALL}
Arrays = dict[str, np.ndarray]


def strategy(**options: Any) -> NTKDFL:
    topology = options.pop("topology", Topology("regular", degree=3))
    return NTKDFL(**{"learning_rate": 0.1, "steps": STEPS, "topology": topology, **options})


def contract(loss: Any, topology: Any, **given: Any) -> Contract:
    """Two steps, in closed form for MSE, else with few products of the solver."""
    own = {"topology": Topology(topology, degree=2), "steps": STEPS[:2], "tolerance": 0.1, **given}
    return Contract(
        lambda **options: strategy(loss=loss, **own, **options),
        app(NTKDFLClient, loss=loss),
        one_exchange=False,
        sends_arrays=False,
    )


CONTRACT = {
    "NTKDFL, one evolution a cluster": contract("mse", "clustered", evolve_once=True),
    "NTKDFL, line, class prior, compressed": contract(
        "cross-entropy", "line", class_prior=True, selection="own", sparsity=0.5, bits=6
    ),
}


def net(weights: Arrays | None = None) -> nn.Module:
    """Without BatchNorm, in float64: what is computed here and there agrees to 1e-9."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        made = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    if weights is not None:
        made.load_state_dict({name: torch.tensor(a) for name, a in weights.items()})
    return made


def weights() -> Arrays:
    """What all begin with."""
    return {name: t.numpy() for name, t in net().state_dict().items()}


def clients(kind: Any = NTKDFLClient, **options: Any) -> Any:
    def make(_: nn.Module, x: Tensor, y: Tensor, **more: Any) -> Any:
        return kind(net(), x.double(), y, **more, **options)

    return app(make)


def run(strategy: Any, grid: Grid, rounds: int = 1) -> Arrays:
    return arrays_of(strategy.start(grid, as_record(weights()), num_rounds=rounds).arrays)


def agree(a: Any, b: Any, rtol: float = 1e-7, atol: float | None = None) -> None:
    low = rtol / 100 if atol is None else atol
    for name in b:
        np.testing.assert_allclose(a[name], b[name], rtol=rtol, atol=low, err_msg=name)


def mean_of(models: Sequence[Arrays], shares: Sequence[float] | None = None) -> Arrays:
    return {n: np.average([own[n] for own in models], axis=0, weights=shares) for n in models[0]}


def candidates(
    held: Arrays,
    parts: Sequence[tuple[Tensor, Tensor]],
    steps: Sequence[float],
    *,
    prior: bool = False,
    **options: Any,
) -> tuple[list[Arrays], Tensor | float]:
    """Weights at each t of an evolution on one machine, eq. (2) to (5), and the outputs' offset."""
    x, y = (torch.cat(of) for of in zip(*parts, strict=True))
    network, targets = net(held), nn.functional.one_hot(y, 3).double()
    shares = (targets.sum(0) + 1 / 3) / (len(y) + 1)
    offset = (3 * shares).log() if prior else 0.0
    with torch.no_grad():
        outputs = network(x.double()) + offset
    rows = jacobian(network, x.double())
    flow = GradientFlow(**{"learning_rate": 0.1, "steps": steps, **options})
    updates = [rows.vjp(residuals) for residuals in flow(rows, outputs, targets).residuals]
    return [{n: held[n] + own[n].numpy() for n in held} for own in updates], offset


def batches_of(client: int, number: int, count: int) -> list[tuple[Tensor, Tensor]]:
    x, y = examples(client)
    order = np.random.default_rng([0, client, number, *b"batches"]).permutation(len(y))
    each = [torch.from_numpy(np.sort(part)) for part in np.array_split(order, count)]
    return [(x[own], y[own]) for own in (each if count > 1 else [torch.arange(len(y))])]


@pytest.mark.parametrize(
    ("options", "exchanges", "bound"),
    [
        ({"loss": "mse", "learning_rate_decay": 0.5}, 4 + 3, 1e-9),
        ({"class_prior": True}, 4 + 3, 1e-4),
        ({"loss": "mse", "average": False}, 3 + 2, 1e-9),
        ({"loss": "mse", "batches": 2}, 6 + 5, 1e-9),
        ({"loss": "mse", "kernel": "corrected"}, 4 + 3, 1e-9),
        ({"loss": "mse", "residuals": "sum"}, 4 + 3, 1e-9),
    ],
    ids=str,
)
def test_rounds_are_those_of_the_algorithms_on_one_machine(options, exchanges, bound):
    """Averages, Jacobians of the neighbourhood, evolution to the last t: algorithms 2 to 4.

    MSE is solved in closed form in float64; cross-entropy to the solver's tolerance of 1e-4. First
    weights take one exchange more. The corrected kernel is put right at all steps, though the last
    is taken.
    """
    loss, count = options.get("loss", "cross-entropy"), [5 + k for k in range(6)]
    topology = Topology("regular", degree=3, seed=4)
    own = strategy(topology=topology, tolerance=1e-4, collect_both=True, **options, **ALL)
    found = run(own, grid := Grid(clients(loss=loss)), rounds=2)
    assert [kind for kind, _ in grid.exchanges].count("train") == exchanges
    held, batches = dict.fromkeys(range(6), weights()), options.get("batches", 1)
    flow = {name: options[name] for name in ("kernel", "residuals") if name in options}
    flow |= {"loss": loss, "prior": options.get("class_prior", False)}
    for number in (1, 2):
        near = {k: [k, *j] for k, j in topology.neighbours(number, range(6)).items()}
        if options.get("average", True):
            held = {
                k: mean_of([held[j] for j in near[k]], [count[j] for j in near[k]]) for k in near
            }
        averaged = dict(held)
        rate = 0.1 * np.exp(-options.get("learning_rate_decay", 0) * (number - 1))
        for batch in range(batches):
            for k in range(6):
                parts = [batches_of(j, number, batches)[batch] for j in near[k]]
                held[k] = candidates(held[k], parts, STEPS, learning_rate=rate, **flow)[0][-1]
        for k in range(6):
            agree(kept_by(own, k, number), held[k], bound, bound)
    for k, model in own.models_at["averaged"].items():
        agree(model, averaged[k], bound, bound)
    agree(found, mean_of(list(held.values())), bound, bound)


def test_compressed_rows_are_fewer_bytes_and_near_the_exact_ones():
    """Dropping the smaller half of each factor changes less than all of it, 16 bits far less."""
    found, sizes = [weights()], []
    for options in ({}, {"bits": 16}, {"sparsity": 0.5, "bits": 6}):
        own = strategy(topology=Topology("ring"), **options, **MSE)
        found.append(run(own, grid := Grid(clients(loss="mse"))))
        sizes.append(sum(size(m) for way, m in grid.seen if way == "up"))
    assert sizes[0] > sizes[1] > sizes[2]
    flat = np.stack([np.concatenate([a.ravel() for a in own.values()]) for own in found])
    change, _, fine, coarse = np.linalg.norm(flat - flat[1], axis=1)
    assert 0 < fine < 0.01 * change < coarse < change


def test_on_the_complete_graph_it_is_ntk_fl_of_all_clients():
    """All clients have the same average, kernel and weights: those of one server with all rows."""
    own = strategy(topology=Topology("complete"), **MSE)
    found = run(own, Grid(clients(loss="mse")), rounds=2)
    rule: dict[str, Any] = {"steps": STEPS[-1:], "selection": "linearised", "allow_no_step": False}
    central = NTKFL(learning_rate=0.1, **rule, **MSE)
    agree(found, run(central, Grid(clients(NTKFLClient, loss="mse")), rounds=2))
    assert own.train_metrics[2]["inter-client-deviation"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("options", "degree"), [({"batches": 2}, 2), ({"same_weights": False}, 3)])
def test_one_evolution_a_cluster_gives_what_all_its_members_would_find(options, degree):
    """MSE in float64: the members' own evolutions differ only by the order of their examples.

    Clusters of three and, as six clients do not divide by four, of four and two.
    """
    topology, found, averaged = Topology("clustered", degree=degree, seed=5), [], []
    given = {"topology": topology, "collect_both": True, **options, **MSE}
    for once in (False, True):
        own = strategy(evolve_once=once, **given)
        run(own, grid := Grid(clients(loss="mse")), rounds=2)
        metrics = own.train_metrics[2]
        assert (metrics["replies-accepted"], metrics["t"]) == (6, STEPS[-1])
        assert metrics["spectral-gap"] == pytest.approx(0, abs=1e-9)  # clusters are apart
        found.append([kept_by(own, k, 2) for k in range(6)])
        averaged.append(own.models_at["averaged"])
    assert [kind for kind, _ in grid.exchanges].count("train") == 1 + 2 * (2 + 2 * own.batches)
    for k in range(6):
        agree(found[1][k], found[0][k], 1e-8)
        agree(averaged[1][k], averaged[0][k], 1e-8)
    for hub, members in topology.hubs(2, topology.neighbours(2, range(6))).items():
        assert all(bits(found[1][k]) == bits(found[1][hub]) for k in members)


@pytest.mark.parametrize("steps", [("average", "adopt"), ("jacobians", "evolve")])
def test_a_hub_that_fails_leaves_its_cluster_as_it_was_and_the_others_go_on(steps):
    """Its members have nothing to adopt; whatever the step, round 2 has all six again."""
    topology = Topology("clustered", degree=2, seed=5)
    hubs = topology.hubs(1, topology.neighbours(1, range(6)))
    own = strategy(topology=topology, evolve_once=True, **MSE)

    def fails(step: str) -> Any:
        return lambda r: failed(r) if (own._step.name, own.server_round) == (step, 1) else r

    changes = {hub: fails(step) for hub, step in zip(hubs, steps, strict=True)}
    run(own, Grid(clients(loss="mse"), changes=changes), rounds=2)
    out = sum(1 if step == "adopt" else 3 for step in steps)
    accepted = [own.train_metrics[number]["replies-accepted"] for number in (1, 2)]
    assert accepted == [6 - out, 6]


@pytest.mark.parametrize(
    ("selection", "loss", "prior", "grid"),
    [
        ("own", "mse", False, (1.0, 5.0, 3000.0)),
        ("true-loss", "mse", False, (1.0, 5.0, 3000.0)),
        ("true-loss", "cross-entropy", True, tuple(np.geomspace(5, 100, 40).tolist())),
    ],
)
def test_t_is_that_of_the_lowest_true_loss(selection, loss, prior, grid):
    """Over the client's own examples, or the neighbourhood's; with a prior, of outputs with it.

    Of 40 t some clients would take another without the offset, or with neighbours that count the
    same. Cross-entropy, solved to 1e-4 twice: 1e-6 apart.
    """
    topology, chosen = Topology("ring", seed=1), set()
    options: dict[str, Any] = {"loss": loss, "learning_rate": 0.3, "tolerance": 1e-4}
    given = {"selection": selection, "class_prior": prior, "steps": grid, **options, **ALL}
    run(own := strategy(topology=topology, **given), Grid(clients(loss=loss)))
    for k, near in topology.neighbours(1, range(6)).items():
        parts = [examples(j) for j in (k, *near)]
        found, offset = candidates(weights(), parts, grid, prior=prior, **options)
        x, y = (torch.cat(of) for of in zip(*parts[: 1 if selection == "own" else 3], strict=True))
        targets = nn.functional.one_hot(y, 3).double()
        with torch.no_grad():
            outputs = [net(held)(x.double()) + offset for held in found]
        best = np.argmin([loss_value(scores, targets, loss) for scores in outputs])
        chosen.add(grid[best])
        agree(kept_by(own, k, 1), found[best], 1e-6, 1e-6)
    assert max(chosen) < grid[-1]  # which "last" would have taken


# ------------------------------------------------------------------------ the relay


def test_inputs_out_of_proportion_have_no_say_in_which_t_is_taken():
    """Losses on two clients' inputs overflow, or are huge: as if they had sent no rows to judge by.

    The others take the t that they would take without them; their rows still count in kernels.
    """
    own = strategy(topology=Topology("complete"), selection="true-loss", **ALL)

    def sends(value: float) -> Any:
        def change(reply: Message) -> Message:
            for record in (
                reply.content.array_records.values() if own._step[0] == "jacobians" else ()
            ):
                record["inputs"] = Array(np.full_like(record["inputs"].numpy(), value))
            return reply

        return change

    run(own, Grid(clients(), changes={2: sends(1e200), 4: sends(1e10)}))
    metrics = own.train_metrics[1]
    found = [metrics[name] for name in ("t", "parcels-rejected", "neighbours-heard")]
    assert found == [STEPS[-1], 10, 5]


def test_a_client_that_fails_in_a_step_is_out_for_the_round_and_goes_on_with_its_old_weights():
    """Clients 1 to 4 in one exchange each of round 1; their neighbours go on without them."""
    counts = {k: iter(range(100)) for k in (1, 2, 3, 4)}

    def fails(client: int) -> Any:
        return lambda reply: failed(reply) if next(counts[client]) == client - 1 else reply

    own = strategy(topology=Topology("complete"), **MSE)
    run(own, Grid(clients(loss="mse"), changes={k: fails(k) for k in counts}), 2)
    assert [own.train_metrics[number]["replies-accepted"] for number in (1, 2)] == [2, 6]
    assert own.trained == dict.fromkeys(range(6), 2)
    for k in (0, 5):  # the others sent no Jacobian, but for client 4, which failed after that
        parts = [examples(j) for j in (0, 4, 5)]
        agree(kept_by(own, k, 1), candidates(weights(), parts, STEPS[-1:], loss="mse")[0][-1])


@pytest.mark.parametrize("collect", [True, False])
def test_a_client_that_joins_begins_with_the_global_arrays(collect):
    """Those are the mean model by then; without `collect` the first weights.

    On the complete graph they count in everybody's average, also if the others began apart. Client
    5 misses round 1.
    """
    given = MSE | {"min_available_nodes": 5, "collect": collect, "same_weights": not collect}
    own = strategy(topology=Topology("complete"), **given)
    grid, after = Grid(clients(loss="mse")), weights()
    *_, node = grid.contexts
    late = {node: grid.contexts.pop(node)}

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 1:
            grid.contexts.update(late)
            after.update(arrays_of(arrays) if collect else {})

    own.start(grid, as_record(weights()), num_rounds=2, evaluate_fn=evaluate)
    assert own.trained == dict.fromkeys(range(6), 2)
    held = [*(kept_by(own, k, 1) for k in range(5)), after]
    average = kept_by(own, "5-weights-within-round", 2)
    agree(average, mean_of(held, range(5, 11)), 1e-12, 1e-12)
    assert (bits(kept_by(own, 0, 0)) == bits(kept_by(own, 1, 0))) == (not collect)


def test_nodes_that_claim_one_partition_keep_their_weights_apart():
    """The second goes by a placeholder id below 0, and by a run of its own."""
    own, grid = strategy(**MSE), Grid(clients(loss="mse"))
    list(grid.contexts.values())[1].node_config["partition-id"] = 0
    run(own, grid)
    number = -1 - min(own.trained)
    assert own.state_dict()["trained"] == {str(k): 1 for k in (0, 2, 3, 4, 5)}
    folders = (cache_dir() / "personal").glob(f"run-{own.run_key}*-client-0")
    assert {f.name.removeprefix(f"run-{own.run_key}-") for f in folders} == {
        f"{number}-client-0", "client-0"
    }  # fmt: skip

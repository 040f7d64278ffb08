"""NTK-DFL against its equations, computed on one machine, and against clients that fail."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
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
EVERYONE = range(6)
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


def run_mse(rounds: int = 1, changes: Any = None, **options: Any) -> NTKDFL:
    own = strategy(**{**MSE, "topology": Topology("complete"), **options})
    run(own, Grid(clients(loss="mse"), changes=changes), rounds)
    return own


def agree(a: Any, b: Any, bound: float = 1e-7) -> None:
    for name in b:
        np.testing.assert_allclose(a[name], b[name], rtol=bound, atol=bound / 100, err_msg=name)


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


def evolved(held: Arrays, members: Sequence[int], **options: Any) -> Arrays:
    """Weights at the last t, from all examples of some clients."""
    steps = options.pop("steps", STEPS[-1:])
    parts = [examples(k) for k in members]
    return candidates(held, parts, steps, **{"loss": "mse", **options})[0][-1]


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
    ],
    ids=str,
)
def test_rounds_are_those_of_the_algorithms_on_one_machine(options, exchanges, bound):
    """Averages, Jacobians of the neighbourhood, evolution to the last t: algorithms 2 to 4.

    MSE is solved in closed form in float64; cross-entropy to the solver's tolerance of 1e-4. First
    weights take one exchange more.
    """
    loss, count = options.get("loss", "cross-entropy"), [5 + k for k in range(6)]
    topology = Topology("regular", degree=3, seed=4)
    own, grid = (
        strategy(topology=topology, tolerance=1e-4, **options, **ALL),
        Grid(clients(loss=loss)),
    )
    found = run(own, grid, rounds=2)
    assert [kind for kind, _ in grid.exchanges].count("train") == exchanges
    held = dict.fromkeys(range(6), weights())
    batches, prior = options.get("batches", 1), options.get("class_prior", False)
    for number in (1, 2):
        near = {k: [k, *j] for k, j in topology.neighbours(number, range(6)).items()}
        if options.get("average", True):
            held = {
                k: {
                    name: sum(count[j] * held[j][name] for j in near[k])
                    / sum(count[j] for j in near[k])
                    for name in held[k]
                }
                for k in range(6)
            }
        rate = 0.1 * np.exp(-options.get("learning_rate_decay", 0) * (number - 1))
        for batch in range(batches):
            for k in range(6):
                parts = [batches_of(j, number, batches)[batch] for j in near[k]]
                held[k] = candidates(
                    held[k], parts, STEPS[-1:], loss=loss, prior=prior, learning_rate=rate
                )[0][-1]
        for k in range(6):
            for name, array in kept_by(own, k, number).items():
                np.testing.assert_allclose(array, held[k][name], rtol=bound, atol=bound)
    for name, array in found.items():
        mean = sum(held[k][name] for k in range(6)) / 6
        np.testing.assert_allclose(array, mean, rtol=bound, atol=bound)


@pytest.mark.parametrize("option", [{"kernel": "corrected"}, {"residuals": "sum"}])
def test_kernel_and_residuals_are_as_set(option):
    """The corrected kernel is put right at all steps, though the last is taken; the sum of eq. (5).

    Both move weights elsewhere than the mean kernel and the integral.
    """
    found = kept_by(run_mse(**option), 0, 1)
    agree(found, evolved(weights(), EVERYONE, steps=STEPS, **option), 1e-9)
    plain = evolved(weights(), EVERYONE)
    assert not np.allclose(found["0.weight"], plain["0.weight"], rtol=1e-5)


def test_compressed_rows_are_fewer_bytes_and_near_the_exact_ones():
    """Sixteen bits: weights are off by little; 6 bits of half the numbers: by more, not at random.

    A round's change of the weights is the scale; rounding to 2^-15 of a tensor's range is far below
    a hundredth of it, and dropping the smaller half of each factor below all of it.
    """
    found, sizes = [weights()], []
    for options in ({}, {"bits": 16}, {"sparsity": 0.5, "bits": 6}):
        own, grid = strategy(topology=Topology("ring"), **options, **MSE), Grid(clients(loss="mse"))
        found.append(run(own, grid))
        sizes.append(sum(size(m) for way, m in grid.seen if way == "up"))
        metrics = own.train_metrics[1]
        assert (metrics["neighbours-heard"], metrics["parcels-rejected"]) == (2, 0)
    assert sizes[0] > sizes[1] > sizes[2]
    flat = [np.concatenate([a.ravel() for a in own.values()]) for own in found]
    change, fine, coarse = (
        float(np.linalg.norm(flat[a] - flat[b])) for a, b in ((0, 1), (2, 1), (3, 1))
    )
    assert 0 < fine < 0.01 * change < coarse < change


def test_on_the_complete_graph_it_is_ntk_fl_of_all_clients():
    """All clients have the same average, kernel and weights: those of one server with all rows."""
    own = strategy(topology=Topology("complete"), **MSE)
    found = run(own, Grid(clients(loss="mse")), rounds=2)
    rule: dict[str, Any] = {"selection": "linearised", "allow_no_step": False}
    central = NTKFL(learning_rate=0.1, steps=STEPS[-1:], **rule, **MSE)
    agree(found, run(central, Grid(clients(NTKFLClient, loss="mse")), rounds=2))
    assert own.train_metrics[2]["inter-client-deviation"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("options", "degree"), [({"batches": 2}, 2), ({"same_weights": False}, 3)])
def test_one_evolution_a_cluster_gives_what_all_its_members_would_find(
    options, degree, monkeypatch
):
    """MSE in float64: the members' own evolutions differ only by the order of their examples.

    Clusters of three and, as six clients do not divide by four, of four and two. The gap is that of
    averages: 0, as clusters are apart.
    """
    made: list[Any] = []
    rows = NTKDFLClient._rows
    monkeypatch.setattr(
        NTKDFLClient, "_rows", lambda *args: (made.append(args[0].seed), rows(*args))[1]
    )
    topology, found, averaged = Topology("clustered", degree=degree, seed=5), [], []
    batches = options.get("batches", 1)
    for once in (False, True):
        made.clear()
        given = {"topology": topology, "evolve_once": once, "collect_both": True, **options}
        own, grid = strategy(**MSE, **given), Grid(clients(loss="mse"))
        run(own, grid, rounds=2)
        metrics = own.train_metrics[2]
        assert (metrics["replies-accepted"], metrics["t"]) == (6, STEPS[-1])
        assert metrics["spectral-gap"] == pytest.approx(0, abs=1e-9)
        found.append([kept_by(own, k, 2) for k in range(6)])
        averaged.append(own.models_at["averaged"])
    # each client's Jacobian is made once
    assert sorted(made) == sorted(2 * batches * [*set(made)])
    assert [kind for kind, _ in grid.exchanges].count("train") == 1 + 2 * (2 + 2 * batches)
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


def test_static_clusters_stay_as_they_are_while_a_member_is_missing():
    """Its cluster has a gap; all others keep their members, and their hub is one of them."""
    own = strategy(topology=Topology("clustered", degree=2, dynamic=False), evolve_once=True, **ALL)
    whole = own.topology.neighbours(1, range(6))
    own.graph(1, range(6))
    for missing in range(6):
        stars = own.graph(2, [k for k in range(6) if k != missing])
        assert len(own._hubs) == 2
        for hub in own._hubs:
            assert {hub, *stars[hub]} == {hub, *whole[hub]} - {missing}


def test_a_member_that_fails_is_missing_only_in_its_hubs_kernel():
    """All had a part in the average of the one cluster: its gap is 1."""
    topology = Topology("clustered", degree=5, seed=5)
    ((first, *_),) = topology.hubs(1, topology.neighbours(1, range(6))).values()
    own = strategy(topology=topology, evolve_once=True, **MSE)

    def change(reply: Message) -> Message:
        return failed(reply) if own._step.name == "jacobians" else reply

    run(own, Grid(clients(loss="mse"), changes={first: change}))
    heard = [k for k in range(6) if k != first]
    assert own.train_metrics[1]["neighbours-heard"] == pytest.approx(len(heard) - 1)
    assert own.train_metrics[1]["spectral-gap"] == pytest.approx(1)
    for k in heard:
        agree(kept_by(own, k, 1), evolved(weights(), heard))


@pytest.mark.parametrize(
    ("selection", "loss", "prior", "grid"),
    [
        ("own", "mse", False, (1.0, 5.0, 3000.0)),
        ("true-loss", "cross-entropy", True, tuple(np.geomspace(5, 100, 40).tolist())),
    ],
)
def test_t_is_that_of_the_lowest_true_loss(selection, loss, prior, grid):
    """Over the client's own examples, or the neighbourhood's; with a prior, of outputs with it.

    Of 40 t some clients would take another without the offset, or with neighbours that count the
    same: neither could be left out. Cross-entropy, solved to 1e-4 twice: 1e-6 apart.
    """
    topology, chosen = Topology("ring", seed=1), set()
    own = strategy(
        topology=topology, selection=selection, loss=loss, class_prior=prior, steps=grid,
        learning_rate=0.3, tolerance=1e-4, **ALL,
    )  # fmt: skip
    run(own, Grid(clients(loss=loss)))
    others = {"no offset": 0, "clients alike": 0}
    for k, near in topology.neighbours(1, range(6)).items():
        parts = [examples(j) for j in (k, *near)]
        options: dict[str, Any] = {"loss": loss, "prior": prior, "learning_rate": 0.3}
        found, offset = candidates(weights(), parts, grid, tolerance=1e-4, **options)
        judging = parts[:1] if selection == "own" else parts
        losses: dict[str, list[float]] = {"as it is": [], **{name: [] for name in others}}
        for held in found:
            each, bare = [], []
            for x, y in judging:
                targets = nn.functional.one_hot(y, 3).double()
                with torch.no_grad():
                    scores = net(held)(x.double())
                each.append(loss_value(scores + offset, targets, loss))
                bare.append(loss_value(scores, targets, loss))
            sizes = [len(y) for _, y in judging]
            losses["as it is"].append(np.average(each, weights=sizes))
            losses["no offset"].append(np.average(bare, weights=sizes))
            losses["clients alike"].append(np.mean(each))
        best = int(np.argmin(losses["as it is"]))
        chosen.add(grid[best])
        for name in others:
            others[name] += int(np.argmin(losses[name])) != best
        for name, array in kept_by(own, k, 1).items():
            np.testing.assert_allclose(array, found[best][name], rtol=1e-6, atol=1e-6)
    assert max(chosen) < grid[-1]  # which "last" would have taken
    assert min(others.values()) > 0 or not prior


# ------------------------------------------------------------------------ the relay


def sent_in(own: NTKDFL, step: str, change: Any) -> Any:
    """Change the arrays of each parcel that a client sends in one step of round 1."""

    def apply(reply: Message) -> Message:
        if (own._step.name, own.server_round) == (step, 1):
            for name, record in reply.content.array_records.items():
                reply.content[name] = as_record(change(arrays_of(record)))
        return reply

    return apply


def test_inputs_out_of_proportion_have_no_say_in_which_t_is_taken():
    """Losses on two clients' inputs overflow, or are huge: as if they had sent no rows to judge by.

    The others take the t that they would take without them; their rows still count in kernels.
    """
    own = strategy(topology=Topology("complete"), selection="true-loss", **ALL)

    def sends(value: float) -> Any:
        change = lambda a: {**a, "inputs": np.full_like(a["inputs"], value)}  # noqa: E731
        return sent_in(own, "jacobians", change)

    run(own, Grid(clients(), changes={2: sends(1e200), 4: sends(1e10)}))
    metrics = own.train_metrics[1]
    assert metrics["t"] == STEPS[-1]
    assert (metrics["parcels-rejected"], metrics["neighbours-heard"]) == (10, 5)


def test_a_client_that_fails_in_a_step_is_out_for_the_round_and_goes_on_with_its_old_weights():
    """Clients 1 to 4 in one exchange each of round 1; their neighbours go on without them."""
    counts = {k: iter(range(100)) for k in (1, 2, 3, 4)}

    def fails(client: int) -> Any:
        return lambda reply: failed(reply) if next(counts[client]) == client - 1 else reply

    own = run_mse(2, {k: fails(k) for k in counts})
    metrics = own.train_metrics[1]
    assert (metrics["replies-accepted"], metrics["rejected-error"]) == (2, 4)
    assert own.trained == dict.fromkeys(range(6), 2)
    assert own.train_metrics[2]["replies-accepted"] == 6
    for k in (0, 5):  # the others sent no Jacobian, but for client 4, which failed after that
        agree(kept_by(own, k, 1), evolved(weights(), [0, 4, 5]))


def test_a_neighbours_garbage_is_dropped_and_counted_by_those_who_get_it():
    """Of clients 1 to 4, each in another step of round 1.

    Client 2 hears no Jacobian, as nobody knows its average; of client 3 nobody hears one.
    """
    own = strategy(topology=Topology("complete"), **MSE)

    def nan(arrays: Arrays) -> Arrays:
        return {k: np.full_like(a, np.nan) if a.dtype.kind == "f" else a for k, a in arrays.items()}

    steps = ("weights", "average", "jacobians", "evolve")
    changes = {k: sent_in(own, step, nan) for k, step in enumerate(steps, 1)}
    found = run(own, Grid(clients(loss="mse"), changes=changes), rounds=2)
    assert all(np.isfinite(array).all() for array in found.values())
    first, second = own.train_metrics[1], own.train_metrics[2]
    assert first["replies-accepted"] == second["replies-accepted"] == 6
    heard = [4, 4, 0, 5, 4, 4]
    assert first["neighbours-heard"] == pytest.approx(np.average(heard, weights=range(5, 11)))
    assert (first["parcels-rejected"], second["parcels-rejected"]) == (5 + 5 + 4, 5)


@pytest.mark.parametrize("collect", [True, False])
def test_a_client_that_joins_begins_with_the_global_arrays(collect):
    """Those are the mean model by then; without `collect` the first weights.

    On the complete graph they count in everybody's average, also if the others began apart. Client
    5 misses round 1.
    """
    own = strategy(
        topology=Topology("complete"), loss="mse", min_available_nodes=5, fraction_evaluate=0.0,
        collect=collect, same_weights=not collect,
    )  # fmt: skip
    grid, after = Grid(clients(loss="mse")), weights()
    late = {node: grid.contexts.pop(node) for node in list(grid.contexts)[5:]}

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 1:
            grid.contexts.update(late)
            after.update(arrays_of(arrays) if collect else {})

    own.start(grid, as_record(weights()), num_rounds=2, evaluate_fn=evaluate)
    assert own.trained == dict.fromkeys(range(6), 2)
    begun = [bits(kept_by(own, k, 0)) for k in range(2)]
    assert (begun[0] == begun[1]) == (not collect)
    held = [*(kept_by(own, k, 1) for k in range(5)), after]
    average = kept_by(own, "5-weights-within-round", 2)
    for name in weights():
        mean = np.average([each[name] for each in held], axis=0, weights=range(5, 11))
        np.testing.assert_allclose(average[name], mean, rtol=1e-12, atol=1e-12)


def test_nodes_that_claim_one_partition_keep_their_weights_apart():
    """The second goes by a placeholder id, and by a run of its own; a checkpoint leaves it out."""
    own, grid = strategy(**MSE), Grid(clients(loss="mse"))
    list(grid.contexts.values())[1].node_config["partition-id"] = 0
    run(own, grid)
    placeholder = min(own.trained)
    assert placeholder < 0
    assert own.state_dict()["trained"] == {str(k): 1 for k in (0, 2, 3, 4, 5)}
    folders = sorted((cache_dir() / "personal").glob(f"run-{own.run_key}*-client-0"))
    assert [path.name for path in folders] == [
        f"run-{own.run_key}-{-1 - placeholder}-client-0",
        f"run-{own.run_key}-client-0",
    ]

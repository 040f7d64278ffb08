"""NTK-DFL against its equations, computed on one machine, and against clients that fail."""

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from torch import nn

from fedntk.clients import NTKDFLClient, NTKFLClient, cache_dir
from fedntk.ntk import jacobian, loss_value
from fedntk.ntk.evolution import GradientFlow
from fedntk.strategies import NTKDFL, NTKFL, NoUsableReply, Topology
from fedntk.strategies.gossip.relay import deviation

from .federation import Contract, Grid, app, arrays_of, as_record, bits, examples, failed, kept_by

STEPS = (2.0, 5.0, 10.0)
FLOW = {"learning_rate": 0.1, "steps": STEPS, "tolerance": 1e-4}
CLIENTS = app(NTKDFLClient)
ALL = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
MSE: dict[str, Any] = {"loss": "mse", **ALL}
EVERYONE = list(range(6))


def strategy(**options: Any) -> NTKDFL:
    topology = options.pop("topology", Topology("regular", degree=3))
    return NTKDFL(**{**FLOW, "topology": topology, **options})


CONTRACT = {
    "NTKDFL": Contract(strategy, CLIENTS, one_exchange=False, sends_arrays=False),
    "NTKDFL, one evolution a cluster": Contract(
        lambda **o: strategy(topology=Topology("clustered", degree=2), evolve_once=True, **o),
        CLIENTS,
        one_exchange=False,
        sends_arrays=False,
    ),
    "NTKDFL, class prior, compressed": Contract(
        lambda **o: strategy(class_prior=True, selection="own", sparsity=0.5, bits=6, **o),
        CLIENTS,
        one_exchange=False,
        sends_arrays=False,
    ),
    "NTKDFL, two batches, ring": Contract(
        lambda **o: strategy(topology=Topology("ring"), batches=2, selection="own", **o),
        CLIENTS,
        one_exchange=False,
        sends_arrays=False,
    ),
}


def net() -> nn.Module:
    """Without BatchNorm, in float64: what is computed here and there agrees to 1e-9."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def clients(**options: Any) -> Any:
    def make(_: nn.Module, x: torch.Tensor, y: torch.Tensor, **more: Any) -> NTKDFLClient:
        return NTKDFLClient(net(), x.double(), y, **more, **options)

    return app(make)


def weights() -> dict[str, np.ndarray]:
    """What all begin with."""
    return {name: t.numpy() for name, t in net().state_dict().items()}


def run(strategy: Any, grid: Grid, rounds: int = 1) -> dict[str, np.ndarray]:
    return arrays_of(strategy.start(grid, as_record(weights()), num_rounds=rounds).arrays)


def run_mse(rounds: int = 1, changes: Any = None, **options: Any) -> NTKDFL:
    own = strategy(**{**MSE, "topology": Topology("complete"), **options})
    run(own, Grid(clients(loss="mse"), changes=changes), rounds)
    return own


def agree(a: Any, b: Any, bound: float = 1e-7) -> None:
    for name in b:
        np.testing.assert_allclose(a[name], b[name], rtol=bound, atol=bound / 100, err_msg=name)


def evolved(
    weights: dict[str, np.ndarray],
    members: list[int],
    t: float,
    loss: str,
    *,
    prior: bool = False,
    of: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """One evolution on one machine, of all examples of some clients or those `of` them: eq. 2-5."""
    network = net()
    network.load_state_dict({name: torch.tensor(a) for name, a in weights.items()})
    chosen = [of(k) if of else examples(k) for k in members]
    x, y = (torch.cat(parts) for parts in zip(*chosen, strict=True))
    x = x.double()
    rows = jacobian(network, x)
    with torch.no_grad():
        outputs = network(x)
    targets = nn.functional.one_hot(y, 3).double()
    if prior:
        counts = targets.sum(0)
        outputs = outputs + (3 * (counts + 1 / 3) / (len(y) + 1)).log()
    options = {"loss": loss, "learning_rate": 0.1, "steps": [t], **options}
    residuals = GradientFlow(**options)(rows, outputs, targets).residuals[-1]
    update = rows.vjp(residuals)
    return {name: weights[name] + update[name].numpy() for name in weights}


@pytest.mark.parametrize(
    ("kind", "loss", "prior", "bound"),
    [
        ("regular", "mse", False, 1e-9),
        ("line", "cross-entropy", False, 1e-4),
        ("regular", "cross-entropy", True, 1e-4),
    ],
)
def test_rounds_are_those_of_the_algorithms_on_one_machine(kind, loss, prior, bound):
    """Averages, Jacobians of the neighbourhood, evolution to the last t: algorithms 2 to 4.

    MSE is solved in closed form in float64; cross-entropy to the solver's tolerance of 1e-4.
    """
    topology = Topology(kind, degree=3, seed=4)
    own = strategy(topology=topology, loss=loss, class_prior=prior, **ALL)
    found = run(own, Grid(clients(loss=loss)), rounds=2)
    held, count = dict.fromkeys(range(6), weights()), [5 + k for k in range(6)]
    for number in (1, 2):
        near = {k: [k, *j] for k, j in topology.neighbours(number, range(6)).items()}
        average = {
            k: {
                name: sum(count[j] * held[j][name] for j in near[k])
                / sum(count[j] for j in near[k])
                for name in held[k]
            }
            for k in range(6)
        }
        held = {k: evolved(average[k], near[k], STEPS[-1], loss, prior=prior) for k in range(6)}
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
    agree(found, evolved(weights(), EVERYONE, STEPS[-1], "mse", steps=STEPS, **option), 1e-9)
    plain = evolved(weights(), EVERYONE, STEPS[-1], "mse")
    assert not np.allclose(found["0.weight"], plain["0.weight"], rtol=1e-5)


def test_compressed_rows_are_fewer_bytes_and_near_the_exact_ones():
    """Sixteen bits: weights are off by little; 6 bits of half the numbers: by more, not at random.

    A round's change of the weights is the scale; rounding to 2^-15 of a tensor's range is far below
    a hundredth of it, and dropping the smaller half of each factor below all of it.
    """
    found, sizes = [], []
    for options in ({}, {"bits": 16}, {"sparsity": 0.5, "bits": 6}):
        own = strategy(loss="mse", topology=Topology("ring"), **options, **ALL)
        sizes.append(0)

        def counted(reply: Message, own: NTKDFL = own) -> Message:
            if own._step.name == "jacobians":
                records = reply.content.array_records.values()
                sizes[-1] += sum(len(array.data) for each in records for array in each.values())
            return reply

        grid = Grid(clients(loss="mse"), changes=dict.fromkeys(range(6), counted))
        found.append(run(own, grid))
        assert own.train_metrics[1]["neighbours-heard"] == 2
        assert own.train_metrics[1]["parcels-rejected"] == 0
    assert sizes[0] > sizes[1] > sizes[2]
    start_ = weights()

    def distance(a: Any, b: Any) -> float:
        return float(np.sqrt(sum(((a[name] - b[name]) ** 2).sum() for name in a)))

    change = distance(found[0], start_)
    assert 0 < distance(found[1], found[0]) < 0.01 * change
    assert 0.01 * change < distance(found[2], found[0]) < change


def test_on_the_complete_graph_it_is_ntk_fl_of_all_clients():
    """All clients have the same average, kernel and weights: those of one server with all rows."""
    own = strategy(topology=Topology("complete"), **MSE)
    found = run(own, Grid(clients(loss="mse")), rounds=2)

    def make(_: nn.Module, x: torch.Tensor, y: torch.Tensor, **more: Any) -> NTKFLClient:
        return NTKFLClient(net(), x.double(), y, loss="mse", **more)

    rule: dict[str, Any] = {"selection": "linearised", "allow_no_step": False}
    central = NTKFL(learning_rate=0.1, steps=STEPS[-1:], **rule, **MSE)
    agree(found, run(central, Grid(app(make)), rounds=2))
    assert own.train_metrics[2]["inter-client-deviation"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "degree"), [({}, 2), ({"batches": 2}, 2), ({"same_weights": False}, 3)]
)
def test_one_evolution_a_cluster_gives_what_all_its_members_would_find(
    options, degree, monkeypatch
):
    """MSE in float64: the members' own evolutions differ only by the order of their examples.

    Clusters of three and, as six clients do not divide by four, of four and two. Before their
    evolution all of a cluster have one model, whoever averages: 1e-12. The gap is that of averages:
    0, as clusters are apart.
    """
    made = []
    rows = NTKDFLClient._rows
    monkeypatch.setattr(
        NTKDFLClient, "_rows", lambda *args: (made.append(args[0].seed), rows(*args))[1]
    )
    topology, found, averaged = Topology("clustered", degree=degree, seed=5), [], []
    for once in (True, False):
        made.clear()
        given = {"topology": topology, "evolve_once": once, "collect_both": True, **options}
        own, grid = strategy(**MSE, **given), Grid(clients(loss="mse"))
        run(own, grid, rounds=2)
        assert own.train_metrics[2]["replies-accepted"] == 6
        assert own.train_metrics[2]["spectral-gap"] == pytest.approx(0, abs=1e-9)
        found.append([kept_by(own, k, 2) for k in range(6)])
        averaged.append(own.models_at["averaged"])
        batches = options.get("batches", 1)
        if once:  # each client's Jacobian, once
            assert sorted(made) == sorted(2 * batches * [*set(made)])
            kinds = [kind for kind, _ in grid.exchanges]
            assert kinds.count("train") == 1 + 2 * (2 + 2 * batches)
            assert own.train_metrics[2]["t"] == STEPS[-1]
    for k in range(6):
        agree(found[0][k], found[1][k], 1e-8)
        agree(averaged[0][k], averaged[1][k], 1e-8 if own.server_round > 1 else 1e-12)
    for hub, members in topology.hubs(2, topology.neighbours(2, range(6))).items():
        assert all(bits(found[0][k]) == bits(found[0][hub]) for k in members)


@pytest.mark.parametrize("steps", [("average", "adopt"), ("jacobians", "evolve")])
def test_a_hub_that_fails_leaves_its_cluster_as_it_was_and_the_others_go_on(steps):
    """Its members have nothing to adopt; whatever the step, round 2 has all six again."""
    topology = Topology("clustered", degree=2, seed=5)
    hubs = list(topology.hubs(1, topology.neighbours(1, range(6))))
    own = strategy(topology=topology, evolve_once=True, **MSE)

    def fails(step: str) -> Any:
        return lambda r: failed(r) if (own._step.name, own.server_round) == (step, 1) else r

    changes = {hub: fails(step) for hub, step in zip(hubs, steps, strict=True)}
    run(own, Grid(clients(loss="mse"), changes=changes), rounds=2)
    out = sum(1 if step == "adopt" else 3 for step in steps)
    assert own.train_metrics[1]["replies-accepted"] == 6 - out
    assert own.train_metrics[2]["replies-accepted"] == 6


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
    (members,) = topology.hubs(1, topology.neighbours(1, range(6))).values()
    own = strategy(topology=topology, evolve_once=True, **MSE)

    def change(reply: Message) -> Message:
        return failed(reply) if own._step.name == "jacobians" else reply

    run(own, Grid(clients(loss="mse"), changes={members[0]: change}))
    heard = [k for k in range(6) if k != members[0]]
    assert own.train_metrics[1]["neighbours-heard"] == pytest.approx(len(heard) - 1)
    assert own.train_metrics[1]["spectral-gap"] == pytest.approx(1)
    for k in heard:
        agree(kept_by(own, k, 1), evolved(weights(), heard, STEPS[-1], "mse"))


def test_without_averaging_clients_evolve_from_their_own_weights():
    """The ablation: no exchange of averages, and rows at the neighbours' own weights."""
    topology = Topology("ring", seed=2)
    own, grid = strategy(topology=topology, average=False, loss="mse", **ALL), None
    grid = Grid(clients(loss="mse"))
    run(own, grid, rounds=2)
    assert [kind for kind, _ in grid.exchanges].count("train") == 3 + 2  # weights, once
    weights = {k: {n: t.numpy() for n, t in net().state_dict().items()} for k in range(6)}
    for number in (1, 2):
        near = {k: [k, *j] for k, j in topology.neighbours(number, range(6)).items()}
        weights = {k: evolved(weights[k], near[k], STEPS[-1], "mse") for k in range(6)}
        for k in range(6):
            for name, array in kept_by(own, k, number).items():
                np.testing.assert_allclose(array, weights[k][name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("selection", ["true-loss", "own"])
def test_t_is_that_of_the_lowest_true_loss(selection):
    """Over the neighbourhood's examples, or the client's own; the grid ends far beyond it."""
    grid, chosen = (1.0, 5.0, 3000.0), set()
    topology = Topology("ring", seed=1)
    own = run_mse(topology=topology, selection=selection, steps=grid, learning_rate=0.3)
    for k, others in topology.neighbours(1, range(6)).items():
        near = [k, *others]
        candidates = [evolved(weights(), near, t, "mse", learning_rate=0.3) for t in grid]
        members = near if selection == "true-loss" else [k]
        x, y = (torch.cat(parts) for parts in zip(*map(examples, members), strict=True))
        targets, losses = nn.functional.one_hot(y, 3).double(), []
        for candidate in candidates:
            network = net()
            network.load_state_dict({n: torch.tensor(a) for n, a in candidate.items()})
            with torch.no_grad():
                losses.append(loss_value(network(x.double()), targets, "mse"))
        best = int(np.argmin(losses))
        chosen.add(grid[best])
        agree(kept_by(own, k, 1), candidates[best], 1e-6)
    assert max(chosen) < grid[-1]  # which "last" would have taken


def test_with_a_prior_t_is_judged_with_it_and_each_example_counts_once():
    """Of 80 t, by hand: outputs evolve with the offset, and the network's loss has it, too.

    That some clients would take another t without the offset, or with neighbours that count the
    same, shows that neither could be left out. Cross-entropy, both solved to 1e-4: 1e-6 apart.
    """
    grid = tuple(np.geomspace(5, 100, 80).tolist())
    topology = Topology("ring", seed=1)
    own = strategy(
        topology=topology, selection="true-loss", steps=grid, learning_rate=0.3, class_prior=True,
        **ALL,
    )  # fmt: skip
    run(own, Grid(clients()), rounds=1)
    others = {"no offset": 0, "clients alike": 0}
    for k, near in topology.neighbours(1, range(6)).items():
        parts = [examples(j) for j in (k, *near)]
        x, y = (torch.cat(own_part) for own_part in zip(*parts, strict=True))
        network, targets = net(), nn.functional.one_hot(y, 3).double()
        offset = (3 * (targets.sum(0) + 1 / 3) / (len(y) + 1)).log()
        rows = jacobian(network, x.double())
        with torch.no_grad():
            outputs = network(x.double()) + offset
        flow = GradientFlow(loss="cross-entropy", learning_rate=0.3, steps=grid, tolerance=1e-4)
        losses: dict[str, list[float]] = {"as it is": [], **{name: [] for name in others}}
        found = []
        for residuals in flow(rows, outputs, targets).residuals:
            update = rows.vjp(residuals)
            moved = net()
            moved.load_state_dict({n: p + update[n] for n, p in net().state_dict().items()})
            found.append({name: t.numpy() for name, t in moved.state_dict().items()})
            with torch.no_grad():
                scores = moved(x.double())
            each = nn.functional.cross_entropy(scores + offset, y, reduction="none")
            losses["as it is"].append(float(each.mean()))
            losses["no offset"].append(float(nn.functional.cross_entropy(scores, y)))
            means = [own_part.mean() for own_part in each.split([len(p[1]) for p in parts])]
            losses["clients alike"].append(float(sum(means)))
        best = int(np.argmin(losses["as it is"]))
        for name in others:
            others[name] += int(np.argmin(losses[name])) != best
        for name, array in kept_by(own, k, 1).items():
            np.testing.assert_allclose(array, found[best][name], rtol=1e-6, atol=1e-6)
    assert min(others.values()) > 0


def test_two_batches_are_two_evolutions_of_half_the_examples_each():
    """The second begins where the first ended; three exchanges a round become five."""
    topology = Topology("complete")
    own, grid = strategy(batches=2, loss="mse", topology=topology, **ALL), Grid(clients(loss="mse"))
    run(own, grid, rounds=2)
    kinds = [kind for kind, _ in grid.exchanges]
    assert kinds.count("train") == 1 + 5 + 5
    weights = {name: t.numpy() for name, t in net().state_dict().items()}
    for server_round in (1, 2):

        def halves(client: int, number: int = server_round) -> list[torch.Tensor]:
            seed = [0, client, number, *b"batches"]
            order = np.random.default_rng(seed).permutation(len(examples(client)[1]))
            return [torch.from_numpy(np.sort(part)) for part in np.array_split(order, 2)]

        for half in range(2):

            def of(client: int, half: int = half) -> tuple[torch.Tensor, torch.Tensor]:
                x, y = examples(client)
                return x[halves(client)[half]], y[halves(client)[half]]

            weights = evolved(weights, list(range(6)), STEPS[-1], "mse", of=of)
    for name, array in kept_by(own, 0, 2).items():
        np.testing.assert_allclose(array, weights[name], rtol=1e-7, atol=1e-9)


def test_the_rate_falls_from_round_to_round_as_set():
    own = strategy(learning_rate_decay=0.5)
    rates = [own.flow_in(number).learning_rate for number in (1, 2, 3)]
    assert rates == pytest.approx([0.1, 0.1 * np.exp(-0.5), 0.1 * np.exp(-1.0)])
    falling, small = run_mse(2, learning_rate_decay=0.5), run_mse(2)
    assert bits(kept_by(falling, 0, 1)) == bits(kept_by(small, 0, 1))
    assert bits(kept_by(falling, 0, 2)) != bits(kept_by(small, 0, 2))


# ------------------------------------------------------------------------ the relay


def test_inputs_out_of_proportion_have_no_say_in_which_t_is_taken():
    """Losses on two clients' inputs overflow, or are huge: as if they had sent no rows to judge by.

    The others take the t that they would take without them; their rows still count in kernels.
    """
    own = strategy(topology=Topology("complete"), selection="true-loss", **ALL)

    def sends(value: float) -> Any:
        def change(reply: Message) -> Message:
            for record in reply.content.array_records if own._step.name == "jacobians" else ():
                arrays = dict(reply.content[record].items())
                arrays["inputs"] = Array(np.full_like(arrays["inputs"].numpy(), value))
                reply.content[record] = ArrayRecord(arrays)
            return reply

        return change

    run(own, Grid(clients(), changes={2: sends(1e200), 4: sends(1e10)}))
    assert own.train_metrics[1]["t"] == STEPS[-1]
    assert own.train_metrics[1]["parcels-rejected"] == 10
    assert own.train_metrics[1]["neighbours-heard"] == 5


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
        agree(kept_by(own, k, 1), evolved(weights(), [0, 4, 5], STEPS[-1], "mse"))


def test_parcels_for_who_is_no_neighbour_are_refused():
    own = strategy(topology=Topology("ring", seed=3), **ALL)
    near = Topology("ring", seed=3).neighbours(1, range(6))
    stranger = next(k for k in range(6) if k not in near[2] and k != 2)

    def change(reply: Message) -> Message:
        if own.server_round == 1 and "to-neighbours" in reply.content.array_records:
            reply.content[f"to-{stranger}"] = reply.content["to-neighbours"]
        return reply

    run(own, Grid(clients(), changes={2: change}), rounds=1)
    assert own.train_metrics[1]["rejected-arrays"] == 1


def test_a_neighbours_garbage_is_dropped_and_counted_by_those_who_get_it():
    """Of clients 1 to 4, each in another step of round 1.

    Client 2 hears no Jacobian, as nobody knows its average; of client 3 nobody hears one.
    """
    own = strategy(topology=Topology("complete"), **ALL)

    def sends(step: str) -> Any:
        def change(reply: Message) -> Message:
            if own._step.name == step and own.server_round == 1:
                for name, record in reply.content.array_records.items():
                    broken = {k: np.full_like(a, np.nan) if a.dtype.kind == "f" else a
                              for k, a in arrays_of(record).items()}  # fmt: skip
                    reply.content[name] = as_record(broken)
            return reply

        return change

    steps = ("weights", "average", "jacobians", "evolve")
    changes = {k: sends(step) for k, step in enumerate(steps, 1)}
    found = run(own, Grid(clients(), changes=changes), rounds=2)
    assert all(np.isfinite(array).all() for array in found.values())
    first, second = own.train_metrics[1], own.train_metrics[2]
    assert first["replies-accepted"] == second["replies-accepted"] == 6
    heard = [4, 4, 0, 5, 4, 4]
    assert first["neighbours-heard"] == pytest.approx(np.average(heard, weights=range(5, 11)))
    assert (first["parcels-rejected"], second["parcels-rejected"]) == (5 + 5 + 4, 5)


def test_a_client_that_lost_its_weights_takes_its_neighbours_average():
    """On the complete graph it is then where all are."""
    own = strategy(topology=Topology("complete"), **MSE)

    def forget(_: Any) -> None:
        if own.server_round == 2 and own._step.name == "average":
            shutil.rmtree(cache_dir() / "personal" / f"run-{own.run_key}-client-2", True)

    run(own, Grid(clients(loss="mse"), on_send=forget), rounds=2)
    assert own.train_metrics[2]["replies-accepted"] == 6
    agree(kept_by(own, 2, 2), kept_by(own, 0, 2))


@pytest.mark.parametrize("collect", [True, False])
def test_a_client_that_joins_begins_with_the_global_arrays(collect):
    """Those are the mean model by then; without `collect` the first weights.

    On the complete graph they count in everybody's average, also if the others began apart.
    """
    own = strategy(
        topology=Topology("complete"), min_available_nodes=5, fraction_evaluate=0.0,
        collect=collect, same_weights=not collect, collect_both=True,
    )  # fmt: skip
    after = joined_late(own)
    assert own.trained == dict.fromkeys(range(6), 2)
    begun = [bits(kept_by(own, k, 0)) for k in range(5)]
    assert (begun[0] == begun[1]) == (not collect)
    held = [*(kept_by(own, k, 1) for k in range(5)), after if collect else weights()]
    average = kept_by(own, "5-within-round", 2)
    for name in weights():
        mean = np.average([each[name] for each in held], axis=0, weights=range(5, 11))
        np.testing.assert_allclose(average[f"weights {name}"], mean, rtol=1e-12, atol=1e-12)


def joined_late(own: NTKDFL) -> dict[str, np.ndarray]:
    """Run two rounds, of which client 5 misses the first; return the arrays after that one."""
    after = {}
    grid = Grid(clients())
    late = dict(list(grid.contexts.items())[5:])
    for node in late:
        del grid.contexts[node]

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 1:
            grid.contexts.update(late)
            after.update({name: array.numpy() for name, array in arrays.items()})

    own.start(grid, as_record(weights()), num_rounds=2, evaluate_fn=evaluate)
    return after


def test_all_that_fail_leave_the_model_and_end_the_run_with_a_reason():
    with pytest.raises(NoUsableReply, match="in 1 rounds no client's reply could be used"):
        run(strategy(**ALL), Grid(clients(), changes=dict.fromkeys(range(6), failed)))


def test_deviation_is_eq_12_and_grows_with_the_root_of_the_number_of_clients():
    rng = np.random.default_rng(0)
    models = [{"a": rng.normal(size=(2, 3)), "b": rng.normal(size=4)} for _ in range(5)]
    flat = np.stack([np.concatenate([m["a"].ravel(), m["b"]]) for m in models])
    expected = np.sqrt(((flat - flat.mean(0)) ** 2).sum(0)).mean()
    assert deviation(models) == pytest.approx(expected)
    assert deviation(models * 4) == pytest.approx(2 * expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": ()}, "steps: expected at least one time"),
        ({"loss": "mse", "class_prior": True}, "class_prior: expected the loss cross-entropy"),
        ({"bits": 17}, "bits: expected 1 ... 16"),
        ({"evolve_once": True}, "evolve_once: expected clusters whose members average"),
        (
            {"evolve_once": True, "average": False, "topology": Topology("clustered")},
            "evolve_once: expected clusters whose members average",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        strategy(**options)


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

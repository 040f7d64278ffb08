"""DisPFL: what travels, how masks change, and DFedAvg where nothing is sparse."""

import shutil
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fedntk.clients import DFedAvgClient, DisPFLClient, SGDClient, cache_dir
from fedntk.clients.gossip.dispfl_masks import layer_densities
from fedntk.strategies import DFedAvg, DisPFL, NoUsableReply, Topology

from .federation import Contract, Grid, app, bits, failed, with_arrays
from .test_dfedavg import GRAPH, OPTIONS, agree, in_double, net, run, weights_of

CLIENTS = app(DisPFLClient, learning_rate=0.1, batch_size=4, local_epochs=2)
MASKED = ("0.weight", "3.weight")  # of the network's arrays, those of two axes


def strategy(**options: Any) -> DisPFL:
    given = {"topology": Topology("regular", degree=3), "annealing_rounds": 4}
    return DisPFL(**{**given, **options})


CONTRACT = {
    "DisPFL": Contract(strategy, CLIENTS, sends_arrays=False, one_exchange=False, personal=True),
    "DisPFL, own masks": Contract(
        lambda **o: strategy(sparsity=0.3, same_masks=False, mixing="examples", **o),
        CLIENTS,
        sends_arrays=False,
        one_exchange=False,
        personal=True,
    ),
}


def masks_of(of: DisPFL, client: int, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The mask that a client's weights were trained in, and the next one."""
    kept = weights_of(of, client, number, "-masks")
    sent = {name: kept[f"sent {name}"] for name in MASKED}
    return sent, {name: kept[f"next {name}"] for name in MASKED}


@pytest.mark.parametrize("mixing", ["equal", "examples"])
def test_with_no_sparsity_clients_train_as_in_dfedavg(mixing):
    """Which averages at the end of a round, and DisPFL at the beginning: what is trained is alike.

    In the first round all weights are equal, and so is their average. Float64: 1e-12.
    """
    topology = Topology("own", graph=GRAPH)
    dense = DisPFL(sparsity=0.0, topology=topology, mixing=mixing, **OPTIONS)
    expected = DFedAvg(topology=topology, mixing=mixing, **OPTIONS)
    run(dense, Grid(in_double(DisPFLClient)), 3)
    run(expected, Grid(in_double(DFedAvgClient)), 3)
    for client in range(6):
        trained = weights_of(expected, client, 3, "-within-round")
        own = weights_of(dense, client, 3)
        agree(own, {name: trained[name] for name in own})


def test_masks_have_the_densities_and_weights_stay_in_them():
    own = DisPFL(topology=Topology("ring"), same_masks=False, annealing_rounds=10, **OPTIONS)
    run(own, Grid(in_double(DisPFLClient, momentum=0.9, weight_decay=1e-3)), 3)
    shapes = {name: tuple(p.shape) for name, p in net().named_parameters()}
    densities = layer_densities(shapes, 0.5)
    first = masks_of(own, 0, 1)[0]
    assert any((first[name] != masks_of(own, 1, 1)[0][name]).any() for name in MASKED)
    for client in range(6):
        for number in (1, 2, 3):
            weights = weights_of(own, client, number)
            for masks in masks_of(own, client, number):
                for name in MASKED:
                    wanted = round(densities[name] * masks[name].size)
                    assert masks[name].sum() == wanted < masks[name].size
            sent, _ = masks_of(own, client, number)
            for name in MASKED:
                assert (weights[name][~sent[name]] == 0).all()
                assert (weights[name][sent[name]] != 0).any()


def test_the_next_mask_is_that_of_the_next_round_and_the_cosine_ends_the_search():
    """T = 2: half of alpha's 0.5 in round 2, nothing from round 3 on."""
    own = DisPFL(topology=Topology("ring"), annealing_rounds=2, **OPTIONS)
    assert [own.annealed(k) for k in (1, 2, 3, 4)] == pytest.approx([0.5, 0.25, 0.0, 0.0])
    run(own, Grid(in_double(DisPFLClient)), 4)
    changed = []
    for number in (1, 2, 3, 4):
        sent, following = masks_of(own, 3, number)
        changed.append(sum((sent[n] != following[n]).sum() for n in MASKED))
        if number < 4:
            for name in MASKED:
                np.testing.assert_array_equal(masks_of(own, 3, number + 1)[0][name],
                                              following[name])  # fmt: skip
    assert changed[0] > 0
    assert changed[2:] == [0, 0]
    assert own.train_metrics[1]["mask-changed"] > 0
    assert own.train_metrics[4]["mask-changed"] == 0


def test_an_average_is_over_those_that_have_the_coordinate():
    """Without epochs or search, on the complete graph: by hand, from what round 1 kept."""
    own = DisPFL(
        topology=Topology("complete"), prune_share=0.0, same_masks=False, same_weights=False,
        **OPTIONS,
    )  # fmt: skip
    run(own, Grid(in_double(DisPFLClient, local_epochs=0)), 2)
    found = [weights_of(own, k, 1) for k in range(6)]
    masks = [masks_of(own, k, 1)[0] for k in range(6)]
    after = [weights_of(own, k, 2) for k in range(6)]
    for name in MASKED:
        holders = sum(mask[name].astype(int) for mask in masks)
        assert set(np.unique(holders)) - {0, 6}  # some have it, and some have not
        mean = sum(w[name] for w in found) / np.maximum(holders, 1)
        for k in range(6):
            np.testing.assert_allclose(after[k][name], mean * masks[k][name], atol=1e-12)


def test_half_the_numbers_travel():
    """Up: the numbers in the masks, all others, a bit for each number that has a mask, a count."""
    sizes: list[list[int]] = []

    class Weighing(Grid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            for reply in replies:
                if "to-neighbours" in reply.content:
                    record = reply.content["to-neighbours"]
                    sizes.append([array.numpy().nbytes for array in record.values()])
            return replies

    run(DisPFL(topology=Topology("ring"), **OPTIONS), Weighing(in_double(DisPFLClient)), 2)
    state = net().state_dict()
    masked = sum(state[name].numel() for name in MASKED)
    others = sum(tensor.numel() for name, tensor in state.items() if name not in MASKED)
    parameters = sum(p.numel() for p in net().parameters())
    kept = 0.5 * parameters - (parameters - masked)  # what masks have, of all parameters' half
    expected = 8 * (kept + others) + -(-masked // 8) + 8
    assert len(sizes) == 18
    assert all(abs(sum(size) - expected) <= 8 for size in sizes)  # two arrays' halves are rounded


HOSTILE = {
    "NaN": lambda a: {**a, "0.weight": np.full_like(a["0.weight"], np.nan)},
    "fewer numbers than the mask": lambda a: {**a, "0.weight": a["0.weight"][:-1]},
    "another mask": lambda a: {**a, "sparse-masks": ~a["sparse-masks"]},
    "a mask of numbers": lambda a: {**a, "sparse-masks": a["sparse-masks"].astype(np.float32)},
    "a longer mask": lambda a: {**a, "sparse-masks": np.append(a["sparse-masks"], np.uint8(0))},
    "no mask": lambda a: {k: v for k, v in a.items() if k != "sparse-masks"},
    "complex": lambda a: {**a, "3.weight": a["3.weight"].astype(np.complex128)},
    "no examples": lambda a: {**a, "num-examples": np.array(0)},
}


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_what_a_hostile_neighbour_sends_is_dropped_and_counted(kind):
    attacked = DisPFL(topology=Topology("own", graph=GRAPH), **OPTIONS)
    change = with_arrays(HOSTILE[kind], "to-neighbours")
    run(attacked, Grid(in_double(DisPFLClient), changes={2: change}), 2)
    edges = [e for e in GRAPH if 2 not in e]
    without = DisPFL(topology=Topology("own", graph=edges), **OPTIONS)
    run(without, Grid(in_double(DisPFLClient)), 2)
    for client in (0, 1, 3, 4, 5):
        assert bits(weights_of(attacked, client, 2)) == bits(weights_of(without, client, 2))
    assert [attacked.train_metrics[k]["parcels-rejected"] for k in (1, 2)] == [3, 3]
    assert attacked.train_metrics[2]["replies-accepted"] == 6


@pytest.mark.parametrize("lost", ["client-5", "client-5-masks"])
def test_one_that_lost_its_weights_or_masks_begins_with_its_neighbours_average(lost):
    own = DisPFL(topology=Topology("complete"), **OPTIONS)

    def forget(reply: Message) -> Message:
        if own.server_round == 1 and "mask-density" in reply.content["metrics"]:
            shutil.rmtree(cache_dir() / "personal" / f"run-{own.run_key}-{lost}")
        return reply

    run(own, Grid(in_double(DisPFLClient), changes={5: forget}), 2)
    assert own.train_metrics[1]["restarted"] == 0
    assert own.train_metrics[2]["restarted"] == pytest.approx(10 / sum(range(5, 11)))
    assert own.trained == dict.fromkeys(range(6), 2)
    sent, _ = masks_of(own, 5, 2)
    for name in MASKED:  # the first mask again, which all had
        np.testing.assert_array_equal(sent[name], masks_of(own, 0, 1)[0][name])


def test_masks_that_count_stay_however_many_rounds_fail():
    own = DisPFL(topology=Topology("complete"), collect=False, **OPTIONS)

    def change(reply: Message) -> Message:
        stepped = "mask-density" in reply.content["metrics"]
        return failed(reply) if stepped and 2 <= own.server_round <= 24 else reply

    run(own, Grid(in_double(DisPFLClient, local_epochs=0), changes={2: change}), 25)
    assert own.train_metrics[24]["replies-accepted"] == 5
    assert own.train_metrics[25]["replies-accepted"] == 6
    assert own.train_metrics[25]["restarted"] == 0


def test_the_global_model_is_the_mean_over_those_that_have_a_number():
    own = DisPFL(topology=Topology("ring"), same_masks=False, **OPTIONS)
    mean = run(own, Grid(in_double(DisPFLClient)), 2)
    each = [weights_of(own, k, 2) for k in range(6)]
    for name in MASKED:
        holders = np.maximum(sum((w[name] != 0).astype(int) for w in each), 1)
        np.testing.assert_allclose(mean[name], sum(w[name] for w in each) / holders, atol=1e-12)


def test_a_client_that_failed_goes_on_from_the_round_before():
    own = DisPFL(topology=Topology("complete"), **OPTIONS)

    def change(reply: Message) -> Message:
        return failed(reply) if own.server_round == 2 else reply

    run(own, Grid(in_double(DisPFLClient), changes={2: change}), 3)
    assert [own.train_metrics[k]["replies-accepted"] for k in (1, 2, 3)] == [6, 5, 6]
    first = masks_of(own, 2, 1)[1]
    for name in MASKED:
        np.testing.assert_array_equal(masks_of(own, 2, 3)[0][name], first[name])


def test_arguments_out_of_range_are_refused():
    for name, value in (("sparsity", 1.0), ("prune_share", 1.1), ("annealing_rounds", 0)):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            DisPFL(**{name: value})


def test_another_client_is_told_what_to_use():
    with pytest.raises(NoUsableReply, match="client_fn return a DisPFLClient"):
        run(DisPFL(**OPTIONS), Grid(app(SGDClient)))

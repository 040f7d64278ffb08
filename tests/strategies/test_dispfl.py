"""DisPFL: what travels, how masks change, and DFedAvg where nothing is sparse."""

import shutil
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fedntk.clients import DFedAvgClient, DisPFLClient, cache_dir
from fedntk.clients.gossip.dispfl_masks import layer_densities
from fedntk.strategies import DFedAvg, DisPFL, Topology

from .federation import Contract, Grid, app, failed, kept_by, with_arrays
from .test_dfedavg import (
    GRAPH,
    OPTIONS,
    agree,
    check_as_if_not_heard,
    in_double,
    nan,
    net,
    run,
    within,
)

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
    kept = kept_by(of, client, number)
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
    run(dense, Grid(in_double(DisPFLClient)), 2)
    run(expected, Grid(in_double(DFedAvgClient)), 2)
    for client in range(6):
        trained = within(expected, client, 2)
        own = kept_by(dense, client, 2)
        agree({name: own[name] for name in trained}, trained)


def test_masks_have_the_densities_change_as_the_cosine_has_it_and_weights_stay_in_them():
    """T = 2: half of alpha's 0.5 in round 2, nothing from round 3 on.

    The next mask is that of the next round. The global model is the mean over those that have a
    number.
    """
    own = DisPFL(topology=Topology("ring"), same_masks=False, annealing_rounds=2, **OPTIONS)
    assert [own.pruned_share(k) for k in (1, 2, 3, 4)] == pytest.approx([0.5, 0.25, 0.0, 0.0])
    mean = run(own, Grid(in_double(DisPFLClient, momentum=0.9, weight_decay=1e-3)), 3)
    each = [kept_by(own, k, 3) for k in range(6)]
    densities = layer_densities({n: tuple(p.shape) for n, p in net().named_parameters()}, 0.5)
    assert any((masks_of(own, 0, 1)[0][n] != masks_of(own, 1, 1)[0][n]).any() for n in MASKED)
    for name in MASKED:
        holders = np.maximum(sum((w[name] != 0).astype(int) for w in each), 1)
        np.testing.assert_allclose(mean[name], sum(w[name] for w in each) / holders, atol=1e-12)
        for client in range(6):
            for number in (1, 2, 3):
                sent, following = (masks[name] for masks in masks_of(own, client, number))
                wanted = round(densities[name] * sent.size)
                assert sent.sum() == following.sum() == wanted < sent.size
                weights = kept_by(own, client, number)[name]
                assert (weights[~sent] == 0).all()
                assert (weights[sent] != 0).any()
                if number < 3:
                    now = masks_of(own, client, number + 1)[0][name]
                    np.testing.assert_array_equal(now, following)
                else:
                    np.testing.assert_array_equal(sent, following)
    changed = [own.train_metrics[number]["mask-changed"] for number in (1, 2, 3)]
    assert changed[0] > 0
    assert changed[2] == 0


def test_an_average_is_over_those_that_have_the_coordinate():
    """Without epochs or search, on the complete graph: by hand, from what round 1 kept."""
    own = DisPFL(
        topology=Topology("complete"), prune_share=0.0, same_masks=False, same_weights=False,
        **OPTIONS,
    )  # fmt: skip
    run(own, Grid(in_double(DisPFLClient, local_epochs=0)), 2)
    found = [kept_by(own, k, 1) for k in range(6)]
    masks = [masks_of(own, k, 1)[0] for k in range(6)]
    after = [kept_by(own, k, 2) for k in range(6)]
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


def test_what_hostile_neighbours_send_is_dropped_and_counted():
    """NaN, and another mask than that of the numbers; in round 2 in its one exchange."""
    other = with_arrays(lambda a: {**a, "sparse-masks": ~a["sparse-masks"]})
    kinds = [with_arrays(nan), other]
    check_as_if_not_heard(DisPFL, in_double(DisPFLClient), kinds, rounds=2)


def test_one_that_lost_its_weights_and_masks_begins_with_its_neighbours_average():
    own = DisPFL(topology=Topology("complete"), **OPTIONS)

    def forget(reply: Message) -> Message:
        if own.server_round == 1 and "mask-density" in reply.content["metrics"]:
            shutil.rmtree(cache_dir() / "personal" / f"run-{own.run_key}-client-5")
        return reply

    run(own, Grid(in_double(DisPFLClient), changes={5: forget}), 2)
    assert own.train_metrics[1]["restarted"] == 0
    assert own.train_metrics[2]["restarted"] == pytest.approx(10 / sum(range(5, 11)))
    assert own.trained == dict.fromkeys(range(6), 2)
    sent, _ = masks_of(own, 5, 2)
    for name in MASKED:  # the first mask again, which all had
        np.testing.assert_array_equal(sent[name], masks_of(own, 0, 1)[0][name])


def test_a_client_that_failed_goes_on_from_the_round_before():
    own = DisPFL(topology=Topology("complete"), **OPTIONS)

    def change(reply: Message) -> Message:
        return failed(reply) if own.server_round == 2 else reply

    run(own, Grid(in_double(DisPFLClient), changes={2: change}), 3)
    assert [own.train_metrics[k]["replies-accepted"] for k in (1, 2, 3)] == [6, 5, 6]
    first = masks_of(own, 2, 1)[1]
    for name in MASKED:
        np.testing.assert_array_equal(masks_of(own, 2, 3)[0][name], first[name])

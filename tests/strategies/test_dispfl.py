"""DisPFL: what travels, how masks change, and DFedAvg where nothing is sparse."""

import shutil
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fedntk.clients import DFedAvgClient, DisPFLClient, cache_dir
from fedntk.clients.gossip.dispfl_masks import layer_densities
from fedntk.strategies import DFedAvg, DisPFL, Topology

from .federation import Grid, failed, kept_by, size
from .test_dfedavg import GRAPH, OPTIONS, agree, contract, in_double, net, run, within

MASKED = ("0.weight", "3.weight")  # of the network's arrays, those of two axes

OWN: dict[str, Any] = {"sparsity": 0.3, "same_masks": False, "mixing": "examples"}
CONTRACT = {
    name: contract(DisPFL, DisPFLClient, personal=True, annealing_rounds=4, **options)
    for name, options in (("DisPFL", {}), ("DisPFL, own masks", OWN))
}


def masks_of(of: DisPFL, client: int, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The mask that a client's weights were trained in, and the next one."""
    kept = kept_by(of, client, number)
    sent = {name: kept[f"sent {name}"] for name in MASKED}
    return sent, {name: kept[f"next {name}"] for name in MASKED}


def test_with_no_sparsity_clients_train_as_in_dfedavg():
    """Which averages at the end of a round, and DisPFL at the beginning: what is trained is alike.

    In the first round all weights are equal, and so is their average. Float64: 1e-12.
    """
    options: dict[str, Any] = {"topology": Topology("own", graph=GRAPH), "mixing": "examples"}
    dense, expected = DisPFL(sparsity=0.0, **options, **OPTIONS), DFedAvg(**options, **OPTIONS)
    run(dense, Grid(in_double(DisPFLClient)), 2)
    run(expected, Grid(in_double(DFedAvgClient)), 2)
    for client in range(6):
        trained, own = within(expected, client, 2), kept_by(dense, client, 2)
        agree({name: own[name] for name in trained}, trained)


def test_masks_have_the_densities_change_as_the_cosine_has_it_and_weights_stay_in_them():
    """T = 2: half of alpha's 0.5 in round 2, nothing from round 3 on.

    The next mask is that of the next round. The global model is the mean over those that have a
    number. Half the numbers travel: those in the masks, all others, a bit for each number that has
    a mask, and a count.
    """
    own = DisPFL(topology=Topology("ring"), same_masks=False, annealing_rounds=2, **OPTIONS)
    assert [own.pruned_share(k) for k in (1, 2, 3, 4)] == pytest.approx([0.5, 0.25, 0.0, 0.0])
    grid = Grid(in_double(DisPFLClient, momentum=0.9, weight_decay=1e-3))
    mean = run(own, grid, 3)
    each = [kept_by(own, k, 3) for k in range(6)]
    parameters = {n: tuple(p.shape) for n, p in net().named_parameters()}
    densities = layer_densities(parameters, 0.5)
    assert any((masks_of(own, 0, 1)[0][n] != masks_of(own, 1, 1)[0][n]).any() for n in MASKED)
    for name in MASKED:
        holders = np.maximum(sum((w[name] != 0).astype(int) for w in each), 1)
        np.testing.assert_allclose(mean[name], sum(w[name] for w in each) / holders, atol=1e-12)
        wanted = round(densities[name] * mean[name].size)
        for client in range(6):
            for number in (1, 2, 3):
                sent, following = (masks[name] for masks in masks_of(own, client, number))
                assert sent.sum() == following.sum() == wanted < sent.size
                weights = kept_by(own, client, number)[name]
                assert (weights[~sent] == 0).all()
                assert (weights[sent] != 0).any()
                after = masks_of(own, client, number + 1)[0][name] if number < 3 else sent
                np.testing.assert_array_equal(after, following)
    changed = [own.train_metrics[number]["mask-changed"] for number in (1, 2, 3)]
    assert changed[0] > 0 == changed[2]
    sizes = [size(m) for way, m in grid.seen if way == "up" and "to-neighbours" in m.content]
    masked, total = (sum(int(np.prod(parameters[n])) for n in of) for of in (MASKED, parameters))
    whole = sum(tensor.numel() for name, tensor in net().state_dict().items() if name not in MASKED)
    exact = 8 * (0.5 * total - (total - masked) + whole) + -(-masked // 8) + 8
    headers = 128 * (len(net().state_dict()) + 2)  # of numpy's format, one for each array
    assert len(sizes) == 6 * 4
    assert all(abs(found - headers - exact) <= 8 for found in sizes)  # two halves are rounded


def test_an_average_is_over_those_that_have_the_coordinate():
    """Without epochs or search, on the complete graph: by hand, from what round 1 kept."""
    own = DisPFL(
        topology=Topology("complete"), prune_share=0.0, same_masks=False, same_weights=False,
        **OPTIONS,
    )  # fmt: skip
    run(own, Grid(in_double(DisPFLClient, local_epochs=0)), 2)
    found, after = ([kept_by(own, k, number) for k in range(6)] for number in (1, 2))
    masks = [masks_of(own, k, 1)[0] for k in range(6)]
    for name in MASKED:
        holders = sum(mask[name].astype(int) for mask in masks)
        assert set(np.unique(holders)) - {0, 6}  # some have it, and some have not
        mean = sum(w[name] for w in found) / np.maximum(holders, 1)
        for k in range(6):
            np.testing.assert_allclose(after[k][name], mean * masks[k][name], atol=1e-12)


def test_one_that_lost_its_mask_begins_with_the_first_and_one_that_failed_goes_on_with_its_own():
    """Client 5 loses its folder after round 1, and client 2 fails in round 2."""
    own = DisPFL(topology=Topology("complete"), **OPTIONS)

    def forget(reply: Message) -> Message:
        if own.server_round == 1 and "mask-density" in reply.content["metrics"]:
            shutil.rmtree(cache_dir() / "personal" / f"run-{own.run_key}-client-5")
        return reply

    def fail(reply: Message) -> Message:
        return failed(reply) if own.server_round == 2 else reply

    run(own, Grid(in_double(DisPFLClient), changes={5: forget, 2: fail}), 3)
    assert [own.train_metrics[k]["replies-accepted"] for k in (1, 2, 3)] == [6, 5, 6]
    for name in MASKED:  # the first mask is one that all had
        first, next_ = masks_of(own, 0, 1)[0][name], masks_of(own, 2, 1)[1][name]
        np.testing.assert_array_equal(masks_of(own, 5, 2)[0][name], first)
        np.testing.assert_array_equal(masks_of(own, 2, 3)[0][name], next_)

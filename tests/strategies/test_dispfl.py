"""DisPFL: what travels, how masks change, and DFedAvg if nothing is sparse."""

import numpy as np

from fedntk.clients import DFedAvgClient, DisPFLClient
from fedntk.clients.gossip.dispfl import layer_densities
from fedntk.strategies import DFedAvg, DisPFL, Topology

from .federation import Grid, arrays_of, kept_by, told
from .test_dfedavg import COMPLETE, GRAPH, OPTIONS, agree, contract, in_double, net, run, within

MASKED = ("0.weight", "3.weight")  # of the network's arrays, those of two axes

OWN = {"sparsity": 0.3, "same_masks": False, "mixing": "examples"}
CONTRACT = {"DisPFL": contract(DisPFL, DisPFLClient, personal=True, annealing_rounds=4, **OWN)}


def masks_of(of, client, number, name):
    kept = kept_by(of, client, number)
    return kept[f"sent {name}"], kept[f"next {name}"]


def test_with_no_sparsity_clients_train_as_in_dfedavg():
    """DFedAvg averages at the end of a round, DisPFL at the beginning: what is trained is alike."""
    options = {"topology": Topology("own", graph=GRAPH), "mixing": "examples"}
    dense, expected = DisPFL(sparsity=0.0, **options, **OPTIONS), DFedAvg(**options, **OPTIONS)
    run(dense, Grid(in_double(DisPFLClient)), 2)
    run(expected, Grid(in_double(DFedAvgClient)), 2)
    for client in range(6):
        trained, own = within(expected, client, 2), kept_by(dense, client, 2)
        agree({name: own[name] for name in trained}, trained)


def test_masks_keep_their_densities_and_change_as_the_cosine_has_it_and_weights_stay_in_them():
    """T = 2: nothing changes in round 3. The model is the mean over those that have a number."""
    own = DisPFL(topology=Topology("ring"), same_masks=False, annealing_rounds=2, **OPTIONS)
    grid = Grid(in_double(DisPFLClient, {"momentum": 0.9, "weight_decay": 1e-3}))
    mean, each = run(own, grid, 3), [kept_by(own, k, 3) for k in range(6)]
    densities = layer_densities({n: tuple(p.shape) for n, p in net().named_parameters()}, 0.5)
    up = [m.content for way, m in grid.seen if way == "up" and "to-neighbours" in m.content]
    sent = [arrays_of(content["to-neighbours"]) for content in up]
    assert len(sent) == 6 * 4
    assert any((masks_of(own, 0, 1, n)[0] != masks_of(own, 1, 1, n)[0]).any() for n in MASKED)
    for name in MASKED:
        holders = np.maximum(sum((w[name] != 0).astype(int) for w in each), 1)
        np.testing.assert_allclose(mean[name], sum(w[name] for w in each) / holders, atol=1e-12)
        wanted = round(densities[name] * mean[name].size)
        assert {parcel[name].shape for parcel in sent} == {(wanted,)}
        for client in range(6):
            for number in (1, 2, 3):
                mask, following = masks_of(own, client, number, name)
                assert mask.sum() == following.sum() == wanted < mask.size
                weights = kept_by(own, client, number)[name]
                assert (weights[~mask] == 0).all()
                assert (weights[mask] != 0).any()
                after = masks_of(own, client, number + 1, name)[0] if number < 3 else mask
                np.testing.assert_array_equal(after, following)
    assert np.not_equal(*masks_of(own, 0, 1, MASKED[0])).any()
    changed = told(own, "mask-changed")
    assert changed[0] > changed[1] > changed[2] == 0


def test_an_average_is_over_those_that_have_the_coordinate():
    """Without epochs or search, on the complete graph: by hand, from what round 1 kept."""
    options = {"prune_share": 0.0, "same_masks": False, "same_weights": False, **OPTIONS}
    own = DisPFL(topology=COMPLETE, **options)
    run(own, Grid(in_double(DisPFLClient, {"epochs": 0})), 2)
    found, after = ([kept_by(own, k, number) for k in range(6)] for number in (1, 2))
    for name in MASKED:
        masks = [masks_of(own, k, 1, name)[0] for k in range(6)]
        holders = sum(mask.astype(int) for mask in masks)
        assert set(np.unique(holders)) - {0, 6}  # some have it, and others lack it
        mean = sum(w[name] for w in found) / np.maximum(holders, 1)
        for k in range(6):
            np.testing.assert_allclose(after[k][name], mean * masks[k], atol=1e-12)

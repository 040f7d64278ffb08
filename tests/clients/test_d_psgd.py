"""DPSGDClient by itself: what it adds to an average."""

import numpy as np
import pytest

from fedntk.clients import DFedAvgClient, DPSGDClient, LocalSGD, NamedArrays
from fedntk.clients.gossip.relay import Message, WeightsParcel
from fedntk.clients.gossip.relay_memory import RelayMemory
from fedntk.ntk.payloads.gossip_options import GossipOptions

from ..strategies.federation import examples, network


@pytest.mark.parametrize(("lost", "heard"), [(False, True), (False, False), (True, True)])
def test_dpsgd_adds_what_training_moved_to_the_average(lost, heard):
    """The neighbour's weights are 1 larger, so the average is 0.5 larger. In float64: 1e-12."""
    weights = {n: t.numpy().copy() for n, t in network().double().state_dict().items()}
    larger = {name: array + array.dtype.type(1) for name, array in weights.items()}
    told = {"server-round": 1 + lost, "personal-run": f"moved-{lost}-{heard}", "neighbours": [8],
            "personal-round": int(lost), "step": "step", **GossipOptions().to_config()}  # fmt: skip
    x, y = examples(3)
    parcel = {"from-8": WeightsParcel(larger, len(x)).to_arrays()} if heard else {}
    own = DPSGDClient(network().double(), x, y, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
    sent, _, metrics = own.fit(NamedArrays({"arrays": weights, **parcel}), told)
    single = DFedAvgClient(network().double(), x, y, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
    memory = RelayMemory(None, single.model, single.seed, told, same_weights=True)
    trained, _ = single.train_from(weights, Message(told, {}, GossipOptions(), memory))
    expected = {name: array + 0.5 * heard for name, array in trained.items()}
    if heard:
        expected |= {n: (trained[n] + larger[n]) / 2 for n, _ in network().named_buffers()}
    expected["1.num_batches_tracked"] = np.rint(expected["1.num_batches_tracked"])
    for name, array in (larger if lost else expected).items():
        found = sent.records["to-neighbours"][name]
        np.testing.assert_allclose(found, array, rtol=0, atol=1e-12, err_msg=name)
    assert [metrics[kind] for kind in ("neighbours-heard", "restarted")] == [heard, lost]

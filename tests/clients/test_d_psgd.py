"""DPSGDClient by itself: what it adds to an average."""

import numpy as np
import pytest

from fedntk.clients import DFedAvgClient, DPSGDClient, NamedArrays
from fedntk.clients.gossip.relay import Message, WeightsParcel
from fedntk.ntk.payloads.gossip_options import GossipOptions

from ..strategies.federation import examples, network

SGD = {"learning_rate": 0.1, "batch_size": 4, "seed": (0, 3)}


@pytest.mark.parametrize(("lost", "heard"), [(False, True), (False, False), (True, True)])
def test_what_training_moved_is_added_to_the_average(lost, heard):
    """A neighbour of as many examples has weights that are 1 larger: the average is 0.5 larger.

    Statistics are half of the client's new ones and half of the neighbour's. Without a neighbour it
    is local training; a client that lost its weights takes the neighbour's. In float64: 1e-12.
    """
    weights = {n: t.numpy().copy() for n, t in network().double().state_dict().items()}
    larger = {name: array + array.dtype.type(1) for name, array in weights.items()}
    told = {"server-round": 1, "personal-run": f"moved-{lost}-{heard}", "client-id": "3",
            "step": "step", "neighbours": [8], **GossipOptions().to_config()}  # fmt: skip
    told |= {"server-round": 2, "personal-round": 1} if lost else {}
    x, y = examples(3)
    parcel = WeightsParcel(larger, len(x)).to_arrays()
    records = {"arrays": weights} | ({"from-8": parcel} if heard else {})
    own = DPSGDClient(network().double(), x, y, **SGD)
    sent, _, metrics = own.fit(NamedArrays(records), told)
    alone = DFedAvgClient(network().double(), x, y, **SGD)
    trained, _ = alone.train_from(weights, Message(told, {}, GossipOptions()))
    new, buffers = sent.records["to-neighbours"], dict(network().named_buffers())
    for name, array in weights.items():
        expected = trained[name] + 0.5 * heard
        if name in buffers and heard:
            expected = (trained[name] + larger[name]) / 2
        expected = larger[name] if lost else np.asarray(expected)
        expected = expected if array.dtype.kind == "f" else np.rint(expected)
        np.testing.assert_allclose(new[name], expected, rtol=0, atol=1e-12, err_msg=name)
    found = (metrics["neighbours-heard"], metrics["parcels-rejected"], metrics["restarted"])
    assert found == (int(heard), 0, int(lost))

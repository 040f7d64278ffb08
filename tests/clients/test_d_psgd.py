"""DPSGDClient by itself: what it adds to an average."""

import numpy as np

from fedntk.clients import DFedAvgClient, DPSGDClient, NamedArrays
from fedntk.clients.gossip.relay import Message, WeightsParcel
from fedntk.ntk.payloads.gossip_options import GossipOptions

from ..strategies.federation import examples, network

SGD = {"learning_rate": 0.1, "batch_size": 4, "seed": (0, 3)}


def test_what_training_moved_is_added_to_the_average():
    """A neighbour of as many examples has weights that are 1 larger: the average is 0.5 larger.

    Weights of size 1 in float32: 1e-6. Statistics are half of the client's new ones and half of the
    neighbour's.
    """
    weights = {name: tensor.numpy().copy() for name, tensor in network().state_dict().items()}
    larger = {name: array + array.dtype.type(1) for name, array in weights.items()}
    told = {"server-round": 1, "personal-run": "moved", "client-id": "3", "step": "step",
            "neighbours": [8], **GossipOptions().to_config()}  # fmt: skip
    message = Message(told, {}, GossipOptions())
    x, y = examples(3)
    parcel = WeightsParcel(larger, len(x)).to_arrays()
    own = DPSGDClient(network(), x, y, **SGD)
    sent, _, metrics = own.fit(NamedArrays({"arrays": weights, "from-8": parcel}), told)
    trained, _ = DFedAvgClient(network(), x, y, **SGD).train_from(weights, message)
    new = sent.records["to-neighbours"]
    for name, _ in network().named_parameters():
        np.testing.assert_allclose(new[name], trained[name] + 0.5, rtol=0, atol=1e-6)
    mean = "1.running_mean"
    np.testing.assert_allclose(new[mean], (trained[mean] + larger[mean]) / 2, atol=1e-6)
    assert (metrics["neighbours-heard"], metrics["parcels-rejected"]) == (1, 0)

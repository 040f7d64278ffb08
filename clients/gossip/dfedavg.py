"""Client of DFedAvg and DFedAvgM: local epochs of SGD, then an average with its neighbours.

Source: Sun, Li and Wang, *Decentralized Federated Averaging*, IEEE Transactions on Pattern Analysis
and Machine Intelligence 45, 2023 (arXiv 2104.11375).
"""

from fedntk.ntk.payloads.gossip_options import ALL, DFedAvgOptions

from .gossip import GossipClient
from .relay import HEARD, RESTARTED, Answer, Message

AVERAGED = "holds-an-average"  # beside metrics within a round: whether a neighbour has a part


def train_and_send(client: GossipClient, message: Message) -> Answer:
    """Train from x_i, and send z_i to the neighbours."""
    weights, lost = message.memory.current()
    trained, metrics = client.train_from(weights, message)
    metrics |= {RESTARTED: int(lost)}
    message.memory.keep_within("weights", trained)
    message.memory.keep_within("metrics", {**metrics, AVERAGED: 0})
    message.memory.keep_before(trained)
    sent = {} if lost and message.neighbours else {ALL: client.parcel(trained)}
    return sent, metrics


def average(client: GossipClient, message: Message) -> Answer:
    """Average what was trained, or averaged in the step before, with the neighbours'."""
    weights, metrics = message.memory.weights_within(), message.memory.metrics_within()
    averaged = metrics.pop(AVERAGED)
    others = client.read_weights(message, weights)
    with_own = bool(averaged) or not metrics[RESTARTED]
    mean = client.mix(weights, others, message, with_own=with_own)
    if message.batch == message.options.gossip_steps - 1:
        message.memory.keep(mean)
        return {}, metrics | {HEARD: len(others)}
    message.memory.keep_within("weights", mean)
    message.memory.keep_within("metrics", {**metrics, AVERAGED: int(averaged or bool(others))})
    return {ALL: client.parcel(mean)}, metrics | {HEARD: len(others)}


class DFedAvgClient(GossipClient):
    """Answers the steps of DFedAvg: ``train`` and ``average``.

    A client that lost its weights trains from the first ones again. It sends nothing in that round,
    and takes over the average of its neighbours. With momentum above 0 it is DFedAvgM.
    """

    strategy = "DFedAvg"
    options_kind = DFedAvgOptions
    step_train = train_and_send
    step_average = average

"""Client of DFedAvg and DFedAvgM: local epochs of SGD, then an average with its neighbours.

Source: Sun, Li and Wang, *Decentralized Federated Averaging*, IEEE Transactions on Pattern Analysis
and Machine Intelligence 45, 2023 (arXiv 2104.11375).
"""

from fedntk.ntk.payloads.gossip_options import ALL, DFedAvgOptions

from .gossip import GossipClient
from .relay import HEARD, RESTARTED, Answer, Message

AVERAGED = "holds-an-average"  # beside metrics within a round: whether a neighbour has a part


class DFedAvgClient(GossipClient):
    """Answers the steps of DFedAvg: ``train`` and ``average``.

    A client that lost its weights trains from the first ones again. It sends nothing in that round,
    and takes over the average of its neighbours. With momentum above 0 it is DFedAvgM.
    """

    strategy = "DFedAvg"
    options_kind = DFedAvgOptions

    def step_train(self, message: Message) -> Answer:
        """Train from x_i, and send z_i to the neighbours."""
        own, lost = self.current(message.config)
        trained, metrics = self.train_from(own, message)
        metrics |= {RESTARTED: int(lost)}
        self.keep_within(message.config, "weights", trained)
        self.keep_within(message.config, "metrics", {**metrics, AVERAGED: 0})
        self.keep_before(trained, message.config)
        sent = {} if lost and message.neighbours else {ALL: self.parcel(trained)}
        return sent, metrics

    def step_average(self, message: Message) -> Answer:
        """Average what was trained, or averaged in the step before, with the neighbours'."""
        own, metrics = self.weights_within(message), self.metrics_within(message)
        averaged = metrics.pop(AVERAGED)
        others = self.read_weights(message, own)
        average = self.mix(own, others, message, with_own=bool(averaged) or not metrics[RESTARTED])
        last = message.batch == message.options.gossip_steps - 1
        if last:
            self.keep(average, message.config)
        else:
            kept = {**metrics, AVERAGED: int(averaged or bool(others))}
            self.keep_within(message.config, "weights", average)
            self.keep_within(message.config, "metrics", kept)
        metrics |= {HEARD: len(others)}
        return {} if last else {ALL: self.parcel(average)}, metrics

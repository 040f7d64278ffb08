"""The base of decentralised strategies with clients that train by SGD and average."""

from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from numpy.typing import NDArray

from fedntk.ntk.payloads.gossip_options import GossipOptions

from .relay import RelayStrategy, Step
from .topology import mixing_matrix


class GossipStrategy(GossipOptions, RelayStrategy):
    """Rounds of local SGD and averages with neighbours; the order of the two is the method's.

    As it stands a round is one exchange: clients get what the neighbours sent at the end of the
    round before. If some did not take part then, there is one more, ``weights``.
    """

    def plan(self, *, first: bool) -> Sequence[Step]:
        """Return the exchange, after one of the weights if these are not there yet."""
        return [Step("weights"), Step("step")] if first else [Step("step")]

    def averages_of(self, examples: Mapping[int, int]) -> NDArray[np.float64] | None:
        """Return the mixing matrix W."""
        return mixing_matrix(self.neighbours, examples, self.mixing)

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Add how many neighbours each neighbour has, if the mixing matrix needs it."""
        content = super().content_for(client, stage, arrays, config)
        if stage == MessageType.TRAIN and self.mixing == "metropolis":
            own = content.config_records[self.configrecord_key]
            others = self.neighbours.get(client, ())
            own["degrees"] = [len(self.neighbours[other]) for other in others]
        return content

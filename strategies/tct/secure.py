"""TCT's sums over features under secure aggregation: the server sees only the total."""

from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from ..core.feature_sums import Sums
from ..core.secure_sums import SecureSums
from .convex_strategy import ConvexStrategy
from .statistics import PooledStatistics

EVERYONE = -1  # in the place of a client's id


class SecureStatistics(PooledStatistics):
    """The exchange of sums, masked so that the server can open only their total."""

    name = "secure-statistics"
    step = "masked"  # the exchange that needs the network; others come before and after it

    def __init__(self, tct: ConvexStrategy) -> None:
        super().__init__(tct)
        self.secure = SecureSums(tct)

    def content_for(self, client: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """Return the current exchange as the task, and what of the protocol goes to this client."""
        if (step := self.secure.step) == self.step:
            content = super().content_for(client, arrays, config)
        else:
            content = self.tct.task_message(step, (), arrays, config)
        if (record := self.secure.record_for(client)) is not None:
            content["secure-sum"] = record
        return content

    def collect(self, replies: Iterable[Message]) -> tuple[Mapping[int, Sums], MetricRecord]:
        """Return one sum, over the clients in it, and the round's metrics."""
        tct, key = self.tct, self.tct.network_key(self.tct.global_arrays)
        total, last, rejected = tct.complete_sum(self.secure, replies, key, self.fixed_point)
        for reply in last:
            tct.sent.mark(reply.client, *self.needs)
        sums = {} if total is None else {EVERYONE: total}
        return sums, tct.round_metrics(last, rejected)

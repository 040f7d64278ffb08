"""Clients' rows go and come after the model is solved, and signed records say so.

Beyond the papers: a total of whole numbers, less a client's old sums and with its new ones, is that
of a run that never had the old rows, to the bit, and so is the model. The client half is
:class:`~fedntk.clients.CountedRows`; what travels is :class:`~fedntk.ntk.payloads.row_change`.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.options import Declared, argument, state
from fedntk.ntk.payloads.row_change import BESIDE, MANY, WORDS, RowChange
from fedntk.ntk.support.arrays import require_array
from fedntk.trust.signed_records import AFTER, BEFORE, ROUND, append_record, load_signing_key

from ..core.array_archive import checksum
from ..core.averaging import named_arrays
from ..core.registry import ClientRounds
from ..core.replies import Reply
from ..core.round import Round
from ..core.sampling import Sample
from ..core.secure import SumPlan, WordFormat
from ..core.sums import FeatureSums, Sums
from ..core.uploads import Uploads


class RowChanges(Declared):
    """Each round asks all clients how their sums changed, and solves again if they did.

    A client says what changed since the round that counted it last; the first time, all its rows
    come. One whose reply is lost, or dropped, says so in the next round. What the total would not
    be a sum of rows with, is dropped: counts below 0, or a Gram matrix that is not positive
    semidefinite. Valid-looking false changes are not detected.

    Each new model has a line in ``changes-<run>.jsonl``: round, time, rows that went, came and are
    there, and SHA-256 digests of the models before and after, signed by Ed25519.
    :func:`~fedntk.trust.verify_records` checks it.

    Attributes
    ----------
    counted : ClientRounds
        Clients, and the rounds in which their rows were last counted.
    rows : dict of int to int
        Client -> number of its rows, unless sums are masked.
    """

    folder: str | Path = argument(
        "folder of the records, and of the key that signs them if none is given", kw_only=False
    )
    signing_key: Ed25519PrivateKey | None = argument(
        "signs the records; by default drawn once, in the folder", default=None
    )
    counted: ClientRounds = state(ClientRounds)
    rows: dict[int, int] = state(dict)
    words: NDArray[np.uint64] = state(lambda: np.zeros(0, np.uint64))  # of the total
    num_rows: int = state(int)  # in the total
    sums: FeatureSums = state(lambda: None, saved=False, reset=False)
    max_examples: int = state(int, saved=False, reset=False)

    def attach(self, sums: FeatureSums, max_examples: int) -> None:
        """Say what changes, and how many rows a client may have."""
        self.sums, self.max_examples = sums, max_examples

    @property
    def path(self) -> Path:
        """The file of this run's records."""
        return Path(self.folder) / f"changes-{self.sums.run_key}.jsonl"

    def to_ask(self, r: Round) -> Sample:
        """Return all clients of whom it is clear which rows were counted.

        Left out are nodes that say no partition while others do, and second nodes of a partition:
        they would go by other numbers after a restart, and be counted again.
        """
        sample, registry = r.everyone(sent_alike=False), r.registry
        nodes = [node for node in sample.nodes if registry.client(node) >= 0]
        saying = [node for node in nodes if registry.reports(node)]
        return sample._replace(nodes=tuple(saying or nodes))

    def parse(self, reply: Reply) -> RowChange:
        """Check a client's change by itself; of one that was never counted, that it is of rows."""
        (words,) = reply.ordered_arrays(WORDS)
        shape = (self.sums.num_words() + BESIDE,)
        require_array(WORDS, words, shape=shape, dtype=np.uint64)
        change = RowChange.from_words(words, self.max_examples)
        rows = self.rows.get(reply.client, 0) + change.added - change.deleted
        if not 0 <= rows <= self.max_examples:
            raise BadReply("num-examples", f"the client would have {rows} rows")
        if reply.client not in self.counted:
            self.sums.from_words(change.words, change.added)
        return change

    def plan(self, plan: SumPlan[Sums], clients: int) -> SumPlan[RowChange]:
        """Return what a secure sum of changes is of, from the plan of the sums themselves."""

        def words_of(_: int) -> WordFormat:
            words = plan.words_of(MANY)
            return words._replace(size=words.size + BESIDE)

        def read(words: NDArray[Any], _: int) -> RowChange:
            change = RowChange.from_words(words, self.max_examples * clients)
            self.total_with(change).require_positive()
            return change

        return SumPlan(plan.task, words_of, read, config=self.counted.config, records=plan.records)

    def total_with(self, change: RowChange) -> Sums:
        """Return the total after a change; BadReply if no rows have such sums, pair by pair."""
        words = change.words + self.words if len(self.words) else change.words
        return self.sums.from_words(words, self.num_rows + change.added - change.deleted)

    def fault_of(self, changes: Iterable[RowChange], *, strict: bool = True) -> BadReply | None:
        """Return why the total cannot be one of rows after some changes, if it cannot.

        If `strict`, its Gram matrix is factorised, to see that it is positive semidefinite.
        """
        try:
            total = self.total_with(reduce(add, changes))
            if strict:
                total.require_positive()
        except BadReply as bad:
            return bad
        return None

    def screen(
        self, uploads: Uploads[RowChange], earlier: Sequence[RowChange], *, strict: bool
    ) -> Uploads[RowChange]:
        """Drop the changes that the total cannot have, after `earlier` ones of the round."""
        if not uploads or self.fault_of([*earlier, *uploads.values], strict=strict) is None:
            return uploads
        verdicts, good = list[BadReply | None](), [*earlier]
        for change in uploads.values:  # by client
            verdicts.append(self.fault_of([*good, change], strict=strict))
            if verdicts[-1] is None:
                good.append(change)
        return uploads.judge(verdicts)

    def commit(
        self, change: RowChange, uploads: Uploads[RowChange | None], server_round: int
    ) -> None:
        """Count a round's changes."""
        self.words = change.words + self.words if len(self.words) else change.words
        self.num_rows += change.added - change.deleted
        self.counted.set(uploads.clients, server_round)
        for upload in uploads:
            if (one := upload.value) is not None:
                before = self.rows.get(upload.client, 0)
                self.rows[upload.client] = before + one.added - one.deleted

    def record(
        self, change: RowChange, server_round: int, before: ArrayRecord, after: ArrayRecord
    ) -> None:
        """Sign what changed, and write it down."""
        key = self.signing_key or load_signing_key(Path(self.folder) / "signing-key")
        content = {
            ROUND: server_round,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": self.sums.run_key,
            "deleted": change.deleted,
            "added": change.added,
            "rows": self.num_rows,
            BEFORE: model_digest(before),
            AFTER: model_digest(after),
        }
        append_record(self.path, content, key)


def model_digest(arrays: ArrayRecord) -> str:
    """Return the SHA-256 of a model's arrays, in their order."""
    return checksum(*named_arrays(arrays).values())

"""Clients' rows go and come after the model is solved, and signed records say so.

Beyond the papers: a total of whole numbers, less a client's old sums and with its new ones, is that
of a run that never had the old rows, to the bit, and so is the model. The client half is
:class:`~fedntk.clients.CountedRows`; what travels is :class:`~fedntk.ntk.payloads.row_change`.
"""

import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import reduce
from logging import getLogger
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.options import Declared, argument, state
from fedntk.ntk.payloads.row_change import BESIDE, COUNTED, MANY, NEW, WORDS, RowChange
from fedntk.ntk.support.arrays import require_array
from fedntk.trust import verify_records
from fedntk.trust.signed_records import AFTER, BEFORE, ROUND, RUN, append_record, load_signing_key

from ..core.array_archive import checksum
from ..core.averaging import named_arrays
from ..core.replies import Reply
from ..core.round import Round
from ..core.sampling import Sample
from ..core.secure import SumPlan, WordFormat
from ..core.sums import FeatureSums, Sums
from ..core.uploads import Uploads

logger = getLogger("flwr")


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
    counted : dict of int to str
        Client -> name of its sums that count, for its folder: round, and what was drawn for it.
    rows : dict of int to int
        Client -> number of its rows, unless sums are masked.
    """

    folder: str | Path = argument(
        "folder of the records, and of the key that signs them if none is given", kw_only=False
    )
    signing_key: Ed25519PrivateKey | None = argument(
        "signs the records; by default drawn once, in the folder", default=None
    )
    counted: dict[int, str] = state(dict)
    rows: dict[int, int] = state(dict)
    words: NDArray[np.uint64] = state(lambda: np.zeros(0, np.uint64))  # of the total
    num_rows: int = state(int)  # in the total
    name: str = state(str, saved=False)  # of the sums that clients are asked for
    sums: FeatureSums = state(lambda: None, saved=False, reset=False)
    max_examples: int = state(int, saved=False, reset=False)

    def attach(self, sums: FeatureSums, max_examples: int) -> None:
        """Say what changes, and how many rows a client may have."""
        self.sums, self.max_examples = sums, max_examples

    @property
    def path(self) -> Path:
        """The file of this run's records."""
        return Path(self.folder) / f"changes-{self.sums.run_key}.jsonl"

    def to_ask(self, r: Round, *, masked: bool) -> Sample:
        """Return the clients whose counted rows are certain.

        Left out are nodes that say no partition, and second nodes of a partition: they would go by
        other numbers after a restart, and be counted again. With masks, so are clients that were
        not in the first total: if the others change nothing, a later one is one client's sums.
        """
        sample, registry = r.everyone(sent_alike=False), r.registry
        registry.expect(silent := [n for n in sample.nodes if not registry.reports(n)])
        nodes = [n for n in sample.nodes if n not in silent and registry.client(n) >= 0]
        if not nodes:
            said = "nodes must say which partition they have; set partition-id in the node config"
            if not self.counted:
                raise ValueError(f"changes: {said}")
            logger.warning("changes: %s", said)
        if masked and self.counted:
            new = [n for n in nodes if registry.client(n) not in self.counted]
            if new:
                logger.warning(
                    "changes: clients %s are not asked, as masks would not hide their sums; only "
                    "those of the first total may change",
                    sorted(map(registry.client, new)),
                )
            nodes = [n for n in nodes if n not in new]
        return sample._replace(nodes=tuple(nodes))

    def require_records(self) -> None:
        """Refuse, before clients work, records that no new one can follow; load the key."""
        key = self._key().public_key().public_bytes_raw().hex()
        if self.path.exists():
            verify_records(self.path, key)

    def draw_name(self, server_round: int) -> None:
        """Name the sums that clients are asked for next, as no other server or message does."""
        self.name = f"{server_round:08}-{secrets.token_hex(8)}"

    def config(self, client: int) -> dict[str, str]:
        """Return what a client is told: which of its sums count, and the name of new ones."""
        return {COUNTED: self.counted.get(client, ""), NEW: self.name}

    def parse(self, reply: Reply) -> RowChange:
        """Check a client's change by itself; of one that was never counted, that it is of rows."""
        (words,) = reply.ordered_arrays(WORDS)
        shape = (self.sums.num_words() + BESIDE,)
        require_array(WORDS, words, shape=shape, dtype=np.uint64)
        change = RowChange.from_words(words, self.max_examples)
        there = self.rows.get(reply.client, 0)
        rows = there + change.added - change.deleted
        if change.deleted > there or rows > self.max_examples:
            raise BadReply("num-examples", f"{change.deleted} of {there} rows go, {rows} are left")
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

        return SumPlan(plan.task, words_of, read, config=self.config, records=plan.records)

    def total_with(self, change: RowChange) -> Sums:
        """Return the total after a change; BadReply if no rows have such sums, pair by pair."""
        if change.deleted > self.num_rows:
            raise BadReply("num-examples", f"{change.deleted} of {self.num_rows} rows go")
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

    def commit(self, change: RowChange, uploads: Uploads[RowChange | None]) -> None:
        """Count a round's changes."""
        self.words = change.words + self.words if len(self.words) else change.words
        self.num_rows += change.added - change.deleted
        self.counted |= dict.fromkeys(uploads.clients, self.name)
        for upload in uploads:
            if (one := upload.value) is not None:
                before = self.rows.get(upload.client, 0)
                self.rows[upload.client] = before + one.added - one.deleted

    def record(
        self, change: RowChange, server_round: int, before: ArrayRecord, after: ArrayRecord
    ) -> None:
        """Sign what changed, and write it down."""
        content = {
            ROUND: server_round,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            RUN: self.sums.run_key,
            "deleted": change.deleted,
            "added": change.added,
            "rows": self.num_rows,
            BEFORE: model_digest(before),
            AFTER: model_digest(after),
        }
        append_record(self.path, content, self._key())

    def _key(self) -> Ed25519PrivateKey:
        return self.signing_key or load_signing_key(Path(self.folder) / "signing-key")


def model_digest(arrays: ArrayRecord) -> str:
    """Return the SHA-256 of a model's arrays, in their order."""
    return checksum(*named_arrays(arrays).values())

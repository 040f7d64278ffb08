"""One exchange of sums over features: the last layer by ridge regression, and nothing is trained.

Beyond He et al., CVPR 2025 (AFL): the sums Z^T Z and Z^T Y that solve the joint problem

    min over W of  ||Z W - Y||^2 + rho ||W||^2,  Y one-hot minus 1/C, with a bias,

are added up as whole numbers, so that the model has the same bits for every split of the examples
and every order of the replies; rho is chosen on examples that the clients hold out, whose sums
travel beside the others'; sums may be masked, so that the server opens only the total; and, kept on
its disk, they can be taken out again, one client at a time. Features are a property of the network:
see :class:`~fedntk.ntk.features.scattering.Scattering`, :func:`~fedntk.ntk.with_fourier_features`.
"""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedntk.ntk import Normaliser
from fedntk.ntk.convex.ledger import ClientLedger, ValidationExamples
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.convex.private_sums import SumNoise
from fedntk.ntk.features.fixed_point import MOST_BITS
from fedntk.ntk.noise import Noise
from fedntk.ntk.options import argument, option, part, state
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, SumStep, require_whole_weights
from fedntk.ntk.payloads.row_change import RowChange
from fedntk.ntk.payloads.sum_task import NoiseOptions, SumTask, weights_of_classes
from fedntk.trust.secure_sum import FEWEST

from ..core.asynchrony import Asynchrony
from ..core.averaging import record_of
from ..core.channel import Fold, Rounds
from ..core.kept_sums import KeptSums, require_storage
from ..core.ledger import Ledger, client_ledger
from ..core.replies import Reply, accuracy_of, result_of, screen_accuracies, screen_own_sizes
from ..core.round import Round
from ..core.sampling import Sample
from ..core.secure import SecureAggregation
from ..core.sums import FeatureSums, Sums, SumsProblem, add_up, subtract
from ..core.uploads import Update, Uploads
from .closed_form import ClosedFormStrategy, Layer
from .noisy_sums import NoiseShares, NoisySums
from .row_changes import RowChanges

AT_ONCE = 2**26  # bytes of replies in memory, if they can be added as they come


class OneExchange(ClosedFormStrategy):
    """Solve for the last layer from one exchange of sums.

    Clients are :class:`~fedntk.clients.ClosedFormClient`. With ``sums.bits`` of 2 ... 8 a reply is
    added to the total when it comes, so that the server holds few of them at a time; without, sums
    are float64, and features of over 100 times the median client's size are dropped.

    With `noise` the model is differentially private, as :mod:`fedntk.ntk.convex.private_sums`
    derives: it follows from one release of the sums with noise, and it has no bias. Each reply
    counts as one example.

    Attributes
    ----------
    ridge_used : float
        Ridge of the newest solution.
    total, total_sent : dict of str to ndarray
        Sums over all counted clients, if `asynchrony`; those that clients are sent, if `personal`.

    Examples
    --------
    >>> from torch import nn
    >>> from fedntk.ntk import with_fourier_features
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> strategy = OneExchange(network=with_fourier_features(network, 50, seed=0))
    >>> strategy.shape
    (3, 50)
    """

    nested_parts = ("storage", "ledger")
    takes_real_targets = True

    real_targets: bool = argument(
        "whether clients have real targets, standardised, not classes", default=False
    )
    personal: bool = option(
        "whether clients evaluate models of their own, in which their examples count more, by a "
        "weight that each chooses on what it holds out; they are sent the sums over all clients",
        default=False,
    )
    class_weights: tuple[float, ...] = weights_of_classes()
    sums: FeatureSums = part("sums over features, and how they are solved", default=FeatureSums)
    noise: NoisySums | None = part("differential privacy by noise in the sums", default=None)
    secure: SecureAggregation | None = part(
        "clients mask their sums, which are the same to the bit as without masks", default=None
    )
    storage: KeptSums | None = part(
        "each client's sums are kept, so that `without` can take a client out again", default=None
    )
    ledger: Ledger | None = part("clients that harm the model are removed", default=None)
    asynchrony: Asynchrony | None = part("replies count in whichever round they come", default=None)
    changes: RowChanges | None = part(
        "clients delete and add rows in later rounds, and the model is solved anew", default=None
    )

    ridge_used: float = state(float)
    total: dict[str, NDArray[Any]] = state(dict)
    total_sent: dict[str, NDArray[Any]] = state(dict)
    _left: bool = state(bool)  # whether clients were taken out of `total` since the last solution

    def check(self) -> None:
        """Refuse what does not go with a client's own model, masks, or sums in any order."""
        if self.real_targets and (self.personal or self.ledger is not None or self.class_weights):
            raise ValueError(
                "real_targets: personal, ledger and class_weights are of classes; leave them out"
            )
        if self.real_targets and self.changes is not None:
            raise ValueError("real_targets: rows of classes can change; expected changes = None")
        if self.sums.is_exact:
            require_whole_weights(self.class_weights)
        if self.class_weights and self.ledger is not None:
            raise ValueError("class_weights: the ledger judges rows that count once; leave one out")
        whole = f"sums.bits = 2 ... {MOST_BITS}, got {self.sums.bits}"
        if self.secure is not None and not self.sums.is_exact:
            raise ValueError(f"secure: masks are added to whole numbers; expected {whole}")
        if self.secure is not None and self.storage is not None:
            raise ValueError("secure: the server has no client's sums to keep; leave out storage")
        if self.ledger is not None and self.storage is None:
            raise ValueError("ledger: expected storage, as each client's sums are needed")
        if self.personal and self.secure is not None:
            raise ValueError("personal: such models would show masked sums; expected secure = None")
        if self.personal and not self.sums.validation_share:
            raise ValueError("personal: expected a sums.validation_share above 0, got 0")
        if self.changes is not None:
            if not self.sums.is_exact:
                raise ValueError(f"changes: sums that are taken out to the bit need {whole}")
            for name in ("storage", "ledger", "asynchrony"):
                if getattr(self, name) is not None:
                    raise ValueError(f"changes: a client deletes all its rows; leave out {name}")
        if self.asynchrony is None:
            return
        if not self.sums.is_exact:
            raise ValueError(f"asynchrony: sums in any order need {whole}")
        if self.secure is not None:
            said = "masks cancel only if all answer in one round; expected secure = None"
            raise ValueError(f"asynchrony: {said}")
        if not self.round_deadline:
            raise ValueError("asynchrony: expected a round_deadline in seconds, such as 60, got 0")
        if self.ledger is not None:
            raise ValueError(
                "asynchrony: clients are judged when all have answered; expected ledger = None"
            )

    @classmethod
    def mechanism_of(cls, options: Any) -> type[Noise] | None:
        """Return what adds noise."""
        return None if options.noise is None else SumNoise

    def prepare_method(self) -> None:
        """Say what the sums are of."""
        problem = SumsProblem(
            self.network,
            self.feature_map,
            num_classes=self.shape[0],
            max_examples=self.max_examples,
            equations=self.normal_equations,
            weights=lambda: self.example_weights,
            noisy=self.noise is not None and self.secure is not None,
            real_targets=self.real_targets,
        )
        needed_by = "" if self.ledger is None else f"ledger.alpha = {self.ledger.alpha}"
        projected = self.key_server is not None
        self.sums.attach(problem, projected=projected, needed_by=needed_by)
        if self.storage is not None:
            self.storage.attach(self.sums)
        if self.changes is not None:
            self.changes.attach(self.sums, self.max_examples)
        if self.asynchrony is not None:  # a new node's answer is not waited for longer than others
            self.channel.query_timeout = min(self.query_timeout, self.round_deadline)

    def normal_equations(
        self, sums: FeatureStatistics, normaliser: Normaliser | None
    ) -> tuple[Normaliser, NormalEquations]:
        """Return the problem of the features as they are."""
        identity = Normaliser.identity(self.width)
        targets = self.shape[0] if self.real_targets else 0
        how: Any = {"bias": bool(self.bias), "free_bias": self.real_targets}
        return identity, NormalEquations.of(sums, identity, num_targets=targets, **how)

    def require_memory(self) -> None:
        """Refuse a layer that the server lacks the memory to solve for."""
        held = math.inf
        if self.sums.is_exact and self.secure is None:  # replies are added as they come
            held = max(self.sums.upload_bytes(), AT_ONCE)
        cure = "use fewer features, or bits = 8, with which replies are added as they come"
        factor = 1 if self.changes is None else 4  # words of 64 bits, and those of the total
        self.sums.require_memory(factor * self.min_available_nodes, held=factor * held, cure=cure)
        if self.noise is not None:
            num_classes, width = self.shape
            quorum = 0
            if self.secure is not None:
                fewest = math.ceil(self.secure.threshold * self.min_available_nodes)
                quorum = max(FEWEST, fewest)
            SumNoise.of(self.noise, width, num_classes, quorum)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count sums with noise as released: a run that was cut off may have sent the model out."""
        super().load_state_dict(state)
        if self.noise is not None:
            self.noise.released = True

    def evaluates_in(self, server_round: int) -> bool:
        """Whether a round is evaluated; before the first exchange the last layer is random."""
        return server_round > 0 and super().evaluates_in(server_round)

    # ------------------------------------------------------------------------ rounds

    def train_round(self, r: Round) -> Rounds[Update]:
        """Ask all clients for their sums, add them up, and solve."""
        if self.changes is not None:
            return (yield from self._change(r, self.changes))
        if self.solved and self.asynchrony is None:
            return Update(None)
        if self.asynchrony is None:  # forget what earlier rounds asked for in vain
            if self.noise is not None:
                self.noise.require_unreleased()
            if self.storage is not None:
                self.storage.summed = ()
            if self.ledger is not None:
                self.ledger.removed = ()
        if not self.total:
            self.sums.steps = self.choose_steps(r.arrays)
        total: Sums | None
        uploads: Uploads[Any]
        shares, metrics = None, dict[str, float]()
        if self.secure is not None:  # the sum over the clients that stay to the end
            plan = self.sums.secure_plan(r.arrays, self.task, records=self._step_records)
            total, uploads, quorum = yield from self.secure.sum(r, plan, self.enough, r.everyone())
            shares = NoiseShares(len(uploads), quorum)
            if self.noise is not None and total is not None:
                self.noise.released = True
        else:
            total, uploads = yield from self._add_up(r)
        if self.asynchrony is not None:
            metrics["clients"] = len(self.asynchrony.counted)
        if self.ledger is not None and self.storage is not None and total is not None:
            total = self.ledger.without_harmful(self.storage, r.arrays)
            if total is not None:
                metrics["clients-removed"] = len(self.ledger.removed)
                if not self.enough(len(self.storage.summed), sampled=uploads.sampled):
                    total = None
        self.solved = False
        if total is None:
            return Update(uploads, None, metrics)
        joint = total
        arrays = result_of(lambda: self.with_layer(r.arrays, self.solve(joint, r.arrays, shares)))
        if arrays is None:
            return Update(uploads, None, metrics)
        self.solved = True
        if self.noise is None:
            metrics["ridge"] = self.ridge_used
        else:
            metrics["epsilon"] = self.noise.epsilon_reached
            metrics["delta"] = self.noise.delta
        return Update(uploads, arrays, metrics)

    def evaluate_round(self, r: Round) -> Rounds[Uploads[Any]]:
        """Have clients evaluate the network, or models of their own; they are told of noise."""
        config, records = self.feature_map.to_config(), dict[str, ArrayRecord]()
        if self.total_sent or self.noise is not None:
            config = self.task()
        if self.total_sent:
            records = {wire.TOTAL: record_of(self.total_sent), **self._step_records()}
        uploads = yield from r.ask(accuracy_of, config=config, records=lambda _: records)
        return self.screening.drop(uploads, screen_accuracies)

    def choose_steps(self, arrays: ArrayRecord) -> NDArray[np.float32]:
        """Choose the steps of whole numbers: 1 for rows that clients scale to the radius."""
        if self.noise is not None:
            return np.ones(self.width, np.float32)
        return self.sums.choose_steps(arrays)

    # ------------------------------------------------------------------------ asking

    def told_options(self) -> dict[str, Any]:
        """Return the options of sums and of noise, under the names that clients know."""
        noise = NoiseOptions() if self.noise is None else self.noise
        return {**self.sums.to_config(), **noise.to_config()}

    def task(self, step: Literal["statistics", SumStep] = "statistics") -> dict[str, Any]:
        """Return what messages tell in a step of a secure sum, or in the one exchange."""
        changes, key = self.changes is not None, self.sums.run_key
        weights = self.class_weights
        task = SumTask(
            step=step, run_key=key, ridge=self.ridge_used, changes=changes, class_weights=weights
        )
        return {**self.feature_map.to_config(), **task.to_config(), **self.told_options()}

    def _step_records(self, client: int = 0) -> dict[str, ArrayRecord]:
        steps = self.sums.steps
        return {wire.STEPS: record_of({"step": steps})} if len(steps) else {}

    def parse(self, reply: Reply) -> Sums:
        """Check a client's sums; with noise to come, of rows within the radius."""
        if self.noise is None:
            return self.sums.parse(reply.arrays(), reply.num_examples)
        self.noise.check_reply(reply)
        sums = self.sums.parse(reply.arrays())
        self.noise.check_rows(sums.everyone, self.max_examples)
        return sums

    # ---------------------------------------------------------------------- adding up

    def _add_up(self, r: Round) -> Rounds[tuple[Sums | None, Uploads[Any]]]:
        """Add up what clients send, whole numbers as they come; in any order with what came."""
        late, total = self.asynchrony, list[Sums]()
        if self.total:
            total.append(self.sums.parse(self.total, checked=True))

        def add(uploads: Uploads[Sums]) -> Uploads[None]:
            if late is not None:
                uploads = late.count_once(uploads, r)
            if self.storage is not None:
                self.storage.keep(dict(zip(uploads.clients, uploads.values, strict=True)))
            if uploads:
                total[:] = [add_up([*total, *uploads.values])]
            return uploads.without_values()

        at_once = max(1, AT_ONCE // self.sums.upload_bytes())
        uploads: Uploads[Any] = yield from r.ask(
            self.parse,
            clients=r.everyone() if late is None else late.to_ask(r),
            config=self.task(),
            records=self._step_records,
            late=late,
            fold=Fold(at_once, add) if self.sums.is_exact else None,
        )
        if not self.sums.is_exact:
            uploads = add(self.screening.drop(uploads, screen_own_sizes))
        if late is None:
            return total[0] if self.enough(uploads) else None, uploads
        if not uploads and not self._left:
            return None, uploads
        self.total = self.sums.to_arrays(total[0]) if total else {}
        self._left = False
        enough = self.enough(len(late.counted))
        return total[0] if enough and total else None, uploads

    # ------------------------------------------------------------------------ changes

    def _change(self, r: Round, changes: RowChanges) -> Rounds[Update]:
        """Ask all clients how their sums changed, and solve anew if they did."""
        if not len(self.sums.steps):
            self.sums.steps = self.choose_steps(r.arrays)
        changes.require_records()
        clients = changes.to_ask(r, masked=self.secure is not None)
        if not clients.nodes:
            return Update(None)
        change, uploads = yield from self._add_up_changes(r, changes, clients)
        if change is None:
            return Update(uploads)
        counted: dict[str, float] = {"rows-deleted": change.deleted, "rows-added": change.added}
        if not (change.words.any() or change.deleted or change.added):
            changes.commit(change, uploads)
            return Update(uploads, None, counted)
        joint, metrics = change, dict[str, float]()
        arrays = result_of(
            lambda: self.with_layer(r.arrays, self.solve(changes.total_with(joint), r.arrays))
        )
        if arrays is not None:
            changes.commit(change, uploads)
            changes.record(change, r.number, r.arrays, arrays)
            self.solved = True
            metrics = {**counted, "ridge": self.ridge_used}
        return Update(uploads.without_values(), arrays, metrics)

    def _add_up_changes(
        self, r: Round, changes: RowChanges, everyone: Sample
    ) -> Rounds[tuple[RowChange | None, Uploads[Any]]]:
        if self.secure is not None:
            changes.draw_name(r.number)
            of_sums = self.sums.secure_plan(r.arrays, self.task, records=self._step_records)
            plan = changes.plan(of_sums, len(everyone.nodes))
            change, uploads, _ = yield from self.secure.sum(r, plan, self.enough, everyone)
            return change, uploads
        total = list[RowChange]()

        def take(uploads: Uploads[RowChange], *, strict: bool) -> Uploads[RowChange]:
            uploads = changes.screen(uploads, total, strict=strict)
            if uploads:
                total[:] = [reduce(operator.add, [*total, *uploads.values])]
            return uploads.with_values(value.without_words() for value in uploads.values)

        for strict in (False, True):  # again only to find out whose change is at fault
            total.clear()
            changes.draw_name(r.number)
            uploads = yield from r.ask(
                changes.parse,
                clients=everyone,
                config=lambda client: {**self.task(), **changes.config(client)},
                records=self._step_records,
                fold=Fold(
                    max(1, AT_ONCE // (2 * self.sums.upload_bytes())), partial(take, strict=strict)
                ),
            )
            if not total or changes.fault_of(total) is None:
                break
        return (total[0] if total and self.enough(uploads) else None), uploads

    # ------------------------------------------------------------------------ solution

    def last_layer(self, sums: Sequence[Sums]) -> Layer:
        """Return the layer of some clients' sums, with the network of the newest round."""
        return self.solve(add_up(sums), self.global_arrays)

    def solve(self, total: Sums, arrays: ArrayRecord, shares: NoiseShares | None = None) -> Layer:
        """Return weights (C, p) and biases (C,) of the joint solution."""
        self.total_sent = self.sums.to_arrays(total) if self.personal else {}
        if self.noise is not None:
            return self.noise.solve(total.everyone, shares), np.zeros(self.shape[0])
        _, linear, self.ridge_used = self.sums.solve(total, arrays)
        bias = linear[self.width] if self.bias else np.zeros(self.shape[0])
        return linear[: self.width].T.astype(np.float64), bias.astype(np.float64)

    # -------------------------------------------------------------------- leaving

    def leave(self, clients: Collection[int]) -> None:
        """Take what some clients sent out of the sum, and ask them no more; needs `storage`.

        What a full disk did not keep stays in the sum. Call it between rounds of an asynchronous
        run, such as in ``evaluate_fn``; remove clients from ``asynchrony.left`` to let them back.
        After a run, and in others, there is `without`.
        """
        if self.asynchrony is None:
            raise ValueError("leave: expected asynchrony; after a run there is `without`")
        self.asynchrony.left |= set(clients)
        counted = self.asynchrony.counted & set(clients)
        if not counted:
            return
        storage = require_storage(self.storage)
        sums = storage.of(sorted(counted & set(storage.summed)))
        if not sums:
            return
        self.asynchrony.counted -= set(sums)
        total = subtract(self.sums.parse(self.total, checked=True), sums.values())
        self.total = self.sums.to_arrays(total) if self.asynchrony.counted else {}
        storage.drop(sums.clients)
        self._left = True

    def without(
        self, clients: Sequence[int], arrays: ArrayRecord, *, restored: Sequence[int] = ()
    ) -> ArrayRecord:
        """Return the arrays of the model that never had some clients' examples.

        It is solved anew from the kept sums of the others, with ``sums.auto_ridge`` with a ridge
        chosen anew, and has the bits of a run that never had these clients, on the same network and
        machine, if the server accepts the same replies. Steps of fixed-point numbers stay.

        Parameters
        ----------
        clients : sequence of int
            Ids: partitions, if nodes report them. With no id it is the same model again.
        arrays : ArrayRecord
            Result of :meth:`start`, of this object or of one whose state this one has loaded.
        restored : sequence of int
            Clients that come back, of those that the ledger has removed.
        """
        removed = () if self.ledger is None else self.ledger.removed
        if unknown := sorted(set(restored) - set(removed)):
            raise ValueError(f"restored: expected some of {removed}, got {unknown}")
        total = add_up(require_storage(self.storage).without(clients, restored).values())
        return self.with_layer(arrays, self.solve(total, arrays))

    def client_ledger(
        self, arrays: ArrayRecord, ridge: float
    ) -> tuple[ClientLedger, ValidationExamples]:
        """Return the ledger of models with this ridge, and the examples that judge harm."""
        return client_ledger(self.sums, arrays, ridge)

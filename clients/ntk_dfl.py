"""Client of NTK-DFL: averages with its neighbours, sends them Jacobians, and evolves.

Source: Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning in Heterogeneous
Settings via Neural Tangent Kernel*, ICML 2025, algorithms 2 to 4.

What a client gives away: to each neighbour the Jacobian of its examples, which of a first linear
layer holds the inputs exactly, and their labels: see :class:`~fedntk.clients.NTKFLClient`. They
pass through the relay's hands, which can read them unless parcels are sealed.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk import BadReply, JacobianUpload, jacobian, loss_value
from fedntk.ntk.arrays import require_array
from fedntk.ntk.evolution import Candidates, lowest_loss, mean_losses
from fedntk.ntk.payloads import EvolutionTask, screen_uploads

from .randomness import round_seed
from .relay import (
    ALL,
    TO,
    Answer,
    Arrays,
    Message,
    RelayClient,
    WeightsParcel,
    mean_weights,
)
from .weights import Scalar

__all__ = ["NTKDFLClient"]

INPUTS = "inputs"  # name of an array beside a Jacobian's
HEAD = ("outputs", "targets", "layout")  # names of the arrays before the blocks
AVERAGE = "-average"  # what is kept within a round, beside the weights


class _Rows(NamedTuple):
    """Jacobian, outputs and targets of one client's examples, and their inputs if they came."""

    upload: JacobianUpload
    inputs: Tensor | None


class NTKDFLClient(RelayClient):
    """Answers the steps of NTK-DFL: ``weights``, ``average``, ``jacobians`` and ``evolve``.

    Parameters
    ----------
    chunk_size : int, optional
        Examples differentiated at a time; :func:`~fedntk.ntk.jacobian` chooses by default.
    **options
        Of :class:`RelayClient` and :class:`ModelClient`: model, x, y, x_test, y_test, loss, device,
        sampling_rate (1 / m_2 of appendix E.3), cache, seed. The model is of float32 or float64.
        How weights evolve comes with the messages.
    """

    strategy = "NTKDFL"
    config_keys = RelayClient.config_keys
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64)

    def __init__(self, *args: Any, chunk_size: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chunk_size = chunk_size

    def require_agreement(self, config: Mapping[str, Any]) -> None:
        """Refuse to train for another strategy: see :meth:`ModelClient.require_agreement`."""
        super().require_agreement({k: v for k, v in config.items() if not EvolutionTask.owns(k)})

    def steps(self, message: Message) -> Mapping[str, Callable[[Message], Answer]]:
        """Return what the client does in each step, with the settings that the message brings.

        Raises
        ------
        ValueError
            If it brings no settings of an evolution.
        """
        task = EvolutionTask.from_config(message.config)
        return {
            "weights": lambda own: self._send_weights(own, task),
            "average": lambda own: self._average(own, task),
            "jacobians": lambda own: self._send_jacobians(own, task),
            "evolve": lambda own: self._evolve(own, task),
        }

    # ------------------------------------------------------------------ steps

    def _send_weights(self, message: Message, task: EvolutionTask) -> Answer:
        """Send w_i to all neighbours (algorithm 2, line 2)."""
        del task
        weights, lost = self.current(message.config)
        sent = WeightsParcel(weights, len(self._training)).to_arrays()
        return {ALL: sent}, len(self._training), {"restarted": int(lost)}

    def _average(self, message: Message, task: EvolutionTask) -> Answer:
        """Average with the neighbours' weights, and send the average (lines 3 to 5)."""
        del task
        own, lost = self.current(message.config)
        others = self.weights_heard(message, own)
        mine = [WeightsParcel(own, len(self._training))] * (not lost or not others)
        average = mean_weights([*mine, *(parcel for _, parcel in others)])
        self._keep_average(average, message)
        self.keep_before(average, message.config)
        sent = WeightsParcel(average, len(self._training)).to_arrays()
        return {ALL: sent}, len(self._training), {"restarted": int(lost)}

    def _send_jacobians(self, message: Message, task: EvolutionTask) -> Answer:
        """Send each neighbour the rows of the own examples at its weights (algorithm 3)."""
        own, _ = self.current(message.config)
        if not task.average and message.batch == 0:
            self._keep_average(own, message)
        others = self.opened(message, lambda arrays: WeightsParcel.from_arrays(arrays, own))
        x, targets = self._part(message, task)
        outgoing = {}
        for sender, parcel in others:
            arrays = _named(self._rows(parcel.weights, x, targets))
            if task.selection == "true-loss":
                arrays[INPUTS] = x.numpy()
            outgoing[f"{TO}{sender}"] = arrays
        return outgoing, len(x), {}

    def _evolve(self, message: Message, task: EvolutionTask) -> Answer:
        """Evolve from the average, choose t, and send the new weights (algorithm 4)."""
        average = self._kept_average(message)
        x, targets = self._part(message, task)
        own = _Rows(self._rows(average, x, targets), x)
        shapes = {name: array.shape for name, array in average.items()}
        heard = self.opened(message, lambda arrays: self._checked(arrays, shapes, own, task))
        uploads = [own.upload, *(each.upload for _, each in heard)]
        others = self.screened(heard, lambda factor: screen_uploads(uploads, factor), message)
        rows = [own, *(each for _, each in others)]
        whole = JacobianUpload.concatenate([each.upload for each in rows])
        candidates = Candidates.of(
            average,
            whole.jacobian.to(self.device),
            whole.outputs.to(self.device),
            whole.targets.to(self.device),
            task.flow,
        )
        best = self._chosen(candidates, rows, task)
        weights = average if best is None else candidates.weights_at(best)
        if not all(np.isfinite(array).all() for array in weights.values()):
            weights, best = average, None
        last = message.batch == task.batches - 1
        if last:
            self.keep(weights, message.config)
        else:
            self._keep_average(weights, message)
        sent = WeightsParcel(weights, len(self._training)).to_arrays()
        metrics: dict[str, Scalar] = {
            "train-loss": loss_value(own.upload.outputs, own.upload.targets, self.loss),
            "t": 0.0 if best is None else float(task.flow.steps[best]),
            "neighbours-heard": len(others),
        }
        return {ALL: sent}, len(self._training), metrics

    # --------------------------------------------------------------- the rows

    def _part(self, message: Message, task: EvolutionTask) -> tuple[Tensor, Tensor]:
        """Return the part of the round's examples that a batch stands for."""
        x, targets = self.training_examples(message.config)
        if task.batches == 1:
            return x, targets
        if len(x) < task.batches:
            raise ValueError(f"batches: expected at most the {len(x)} examples, got {task.batches}")
        generator = np.random.default_rng([*round_seed(self.seed, message.config), *b"batches"])
        parts = np.array_split(generator.permutation(len(x)), task.batches)
        chosen = torch.from_numpy(np.sort(parts[message.batch]))
        return x[chosen], targets[chosen]

    def _rows(self, weights: Arrays, x: Tensor, targets: Tensor) -> JacobianUpload:
        """Return Jacobian, outputs and targets at some weights: eq. (2)."""
        self.load_weights(weights)
        rows = jacobian(self.model, x.to(self.device), chunk_size=self.chunk_size)
        outputs = self.outputs(x)
        return JacobianUpload(rows, outputs, targets.to(outputs.dtype))

    def _checked(
        self, arrays: Arrays, shapes: Mapping[str, Any], own: _Rows, task: EvolutionTask
    ) -> _Rows:
        """Check a neighbour's rows, which must have the form of the own ones."""
        inputs = arrays.get(INPUTS)
        blocks = [f"block-{k:03}" for k in range(len(arrays.keys() - {INPUTS, *HEAD}))]
        if arrays.keys() - {INPUTS} != {*HEAD, *blocks}:
            raise BadReply("arrays", f"expected the arrays of an upload, got {sorted(arrays)[:5]}")
        upload = JacobianUpload.from_arrays(
            [arrays[name] for name in (*HEAD, *blocks)], parameters=shapes
        )
        if upload.jacobian.form != own.upload.jacobian.form:
            raise BadReply("layout", "its Jacobian has another form than one's own")
        if task.selection != "true-loss":
            return _Rows(upload, None)
        if inputs is None:
            raise BadReply("arrays", "expected the inputs, too, by which t is chosen")
        x = own.inputs
        assert x is not None  # noqa: S101 - made by ourselves
        shape = (upload.jacobian.num_examples, *x.shape[1:])
        require_array(INPUTS, inputs, shape=shape, dtype=x.numpy().dtype)
        return _Rows(upload, torch.from_numpy(np.require(inputs, requirements=["C", "W"])))

    def _chosen(self, candidates: Candidates, rows: list[_Rows], task: EvolutionTask) -> int | None:
        """Return the position of the t that is taken; None if no loss is finite."""
        if task.selection == "last":
            return len(candidates) - 1
        compared = rows if task.selection == "true-loss" else rows[:1]
        each = [list(candidates.weights_at(k).values()) for k in range(len(candidates))]
        losses = [
            np.array(self.candidate_losses(each, own.inputs, own.upload.targets))
            for own in compared
            if own.inputs is not None
        ]
        counts = [len(own.upload.targets) for own in compared if own.inputs is not None]
        return lowest_loss(mean_losses(losses, counts))

    # ------------------------------------------------------- within the round

    def _keep_average(self, average: Arrays, message: Message) -> None:
        number = int(message.config.get("server-round", 0))
        self.store(message.config, AVERAGE).save(number, average)

    def _kept_average(self, message: Message) -> Arrays:
        number = int(message.config.get("server-round", 0))
        kept = self.store(message.config, AVERAGE).load(number)
        if kept is None:
            raise ValueError(
                f"{self.store(message.config, AVERAGE).folder}: the average of this round is lost; "
                "the client goes on with the next round"
            )
        return {name: kept[name] for name in self.model.state_dict()}


def _named(upload: JacobianUpload) -> dict[str, NDArray[Any]]:
    """Name the arrays of an upload: outputs, targets, layout, and the blocks'."""
    arrays = upload.to_arrays()
    named = dict(zip(HEAD, arrays, strict=False))
    return named | {f"block-{k:03}": a for k, a in enumerate(arrays[len(HEAD) :])}

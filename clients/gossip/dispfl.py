"""Client of DisPFL: trains the weights of a mask of its own, and sends no others.

Source: Dai et al., *DisPFL: Towards Communication-Efficient Personalized Federated Learning via
Decentralized Sparse Training*, ICML 2022, and its authors' program: see the strategy for what is
theirs and what is this package's reading.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.averages import masked_mean
from fedntk.ntk.payloads import screen_sizes
from fedntk.ntk.support.arrays import require_array

from ..core.randomness import round_seed
from ..core.sgd_steps import Gradients, gradients_of
from ..core.weights import Scalar
from ..personal.personal_store import ROUND
from .dispfl_masks import Masks, first_masks, searched
from .gossip import GossipClient
from .relay import (
    ALL,
    COUNT,
    MOST_EXAMPLES,
    Answer,
    Arrays,
    Message,
    WeightsParcel,
    norm_of,
)

__all__ = ["DisPFLClient"]

MASKS = "sparse-masks"  # name of an array beside the weights
OF_MASKS = "-masks"  # what is kept beside the weights
SENT, NEXT = "sent ", "next "  # before the names there: of the weights' mask, and the next one


class SparseWeights(NamedTuple):
    """Weights that are zero outside of masks, and how many examples their client has."""

    weights: Arrays
    masks: Masks
    num_examples: int

    def to_arrays(self) -> Arrays:
        """Wire format: of an array with a mask the numbers in it; all masks, a bit a number."""
        sent = {
            name: array[self.masks[name]] if name in self.masks else array
            for name, array in self.weights.items()
        }
        return {
            **sent,
            MASKS: np.packbits(joined(self.masks)),
            COUNT: np.array(self.num_examples, np.int64),
        }

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, NDArray[Any]],
        expected: Arrays,
        masked: Sequence[str],
        max_examples: int = MOST_EXAMPLES,
    ) -> "SparseWeights":
        """Check what :meth:`to_arrays` made against a network's arrays.

        Parameters
        ----------
        arrays : dict of str to ndarray
            As received.
        expected : dict of str to ndarray
            Of a network of the same architecture.
        masked : sequence of str
            Names of those that have masks.
        max_examples : int
            Most examples that may be claimed.

        Raises
        ------
        BadReply
            If names, shapes or dtypes differ, numbers are not finite, there are as many numbers as
            the mask does not say, or no examples or too many.
        """
        if arrays.keys() != {*expected, COUNT, MASKS}:
            odd = sorted(arrays.keys() ^ {*expected, COUNT, MASKS})
            raise BadReply("arrays", f"names differ from the network's in {odd[:5]}")
        sizes = [expected[name].size for name in masked]
        length = -(-sum(sizes) // 8)
        require_array(MASKS, arrays[MASKS], shape=(length,), dtype=np.uint8)
        bits = np.unpackbits(arrays[MASKS], count=sum(sizes)).astype(bool)
        parts = np.split(bits, np.cumsum(sizes)[:-1]) if sizes else []
        masks = {n: p.reshape(expected[n].shape) for n, p in zip(masked, parts, strict=True)}
        whole: Arrays = {}
        for name, own in expected.items():
            if name in masks:
                shape = (int(masks[name].sum()),)
                if arrays[name].shape != shape:
                    raise BadReply("shape", f"{name}: {arrays[name].shape}, its mask has {shape}")
                whole[name] = np.zeros_like(own)
                if arrays[name].dtype != own.dtype:
                    raise BadReply("dtype", f"{name}: expected {own.dtype}")
                whole[name][masks[name]] = arrays[name]
            else:
                whole[name] = arrays[name]
        counted = {**whole, COUNT: arrays[COUNT]}
        parcel = WeightsParcel.from_arrays(counted, expected, max_examples)
        return cls(parcel.weights, masks, parcel.num_examples)


class DisPFLClient(GossipClient):
    """Answers the steps of DisPFL: ``weights`` and ``step``.

    Arrays of two axes or more that are trained have masks; biases, norms and buffers are whole. A
    client that lost its weights or masks begins with the first ones again: it sends nothing until
    it has averaged.

    Parameters
    ----------
    **options
        Of :class:`GossipClient`: model, x, y, x_test, y_test, local_epochs, batch_size (of the
        gradient by which masks regrow, too), learning_rate, momentum, weight_decay, loss, device,
        cache, seed. How sparse the masks are comes with the messages.
    """

    strategy = "DisPFL"
    config_keys: ClassVar[frozenset[str]] = GossipClient.config_keys | {
        "sparsity", "prune-share", "same-masks", "mask-seed",
    }  # fmt: skip

    def steps(self, message: Message) -> Mapping[str, Callable[[Message], Answer]]:
        """Return what the client does in each step."""
        del message
        return {"weights": self._send_weights, "step": self._step}

    def _send_weights(self, message: Message) -> Answer:
        """Send the weights and the mask that they have."""
        own, _, lost = self._state(message)
        sent = {} if lost and message.neighbours else {ALL: own.to_arrays()}
        return sent, len(self._training), {"restarted": int(lost)}

    def _step(self, message: Message) -> Answer:
        """Average over those that have a coordinate, train in the mask, and search for the next."""
        config = message.config
        own, mask, lost = self._state(message)
        masked, most = list(mask), message.max_examples
        heard = self.opened(
            message, lambda arrays: SparseWeights.from_arrays(arrays, own.weights, masked, most)
        )
        norms = [norm_of(own.weights), *(norm_of(parcel.weights) for _, parcel in heard)]
        others = self.screened(heard, lambda factor: screen_sizes(norms, factor), message)
        shares = self.shares([(j, parcel.num_examples) for j, parcel in others], message)
        parcels = [own, *(parcel for _, parcel in others)]
        if lost and others:
            parcels, shares = parcels[1:], shares[1:]
        begun = _in_mask(
            masked_mean([p.weights for p in parcels], [p.masks for p in parcels], shares), mask
        )
        self.keep_before(begun, config)
        trained, metrics = self.trained_from(begun, config, self._masked(mask))
        following = self._search(trained, mask, config)
        kept = {SENT + name: own for name, own in mask.items()}
        kept |= {NEXT + name: own for name, own in following.items()}
        needed = int(config.get(ROUND, 0))
        self.store(config, OF_MASKS).save(int(config.get("server-round", 0)), kept, needed=needed)
        self.keep(trained, config)
        sent = SparseWeights(trained, mask, len(self._training))
        told: dict[str, Scalar] = {
            "restarted": int(lost),
            "neighbours-heard": len(others),
            "mask-density": float(joined(mask).mean()),
            "mask-changed": float((joined(mask) != joined(following)).mean()),
        }
        return {ALL: sent.to_arrays()}, len(self._training), {**metrics, **told}

    # ------------------------------------------------------------------ state

    def _state(self, message: Message) -> tuple[SparseWeights, Masks, bool]:
        """Return the weights with their mask, the next mask, and whether one was lost."""
        config = message.config
        weights, lost = self.current(config)
        counted = int(config.get(ROUND, 0))
        kept = self.store(config, OF_MASKS).load(counted) if counted else None
        shapes = {name: tuple(p.shape) for name, p in self.trainable.items()}
        names = [name for name, shape in shapes.items() if len(shape) > 1]
        if kept is not None and not lost:
            masks, following = ({n: kept[way + n] for n in names} for way in (SENT, NEXT))
            return SparseWeights(weights, masks, len(self._training)), following, False
        if counted and not lost:  # the masks alone: these weights belong to none
            weights, lost = self.first_weights(config), True
        drawn = [int(config["mask-seed"])] if config.get("same-masks", True) else list(self.seed)
        generator = np.random.default_rng([*drawn, *b"first-masks"])
        masks = first_masks(shapes, 1 - float(config["sparsity"]), generator)
        own = SparseWeights(_in_mask(weights, masks), masks, len(self._training))
        return own, masks, lost

    # ------------------------------------------------------------------ masks

    def _masked(self, masks: Masks) -> Any:
        """Return what keeps SGD within masks: gradients, and so momenta, are zero elsewhere."""
        tensors = {name: torch.from_numpy(mask).to(self.device) for name, mask in masks.items()}

        def adjust(gradients: Gradients) -> Gradients:
            return {n: g * tensors[n] if n in tensors else g for n, g in gradients.items()}

        return adjust

    def _search(self, trained: Arrays, masks: Masks, config: Mapping[str, Any]) -> Masks:
        """Return the next masks: by the weights, and by the gradients of one batch at them."""
        share = float(config.get("prune-share", 0.0))
        if not share:
            return masks
        self.load_weights(trained)
        self.model.eval()
        x, targets = self.training_examples(dict(config))
        generator = np.random.default_rng([*round_seed(self.seed, config), *b"mask-search"])
        batch = torch.from_numpy(np.sort(generator.permutation(len(x))[: self.batch_size]))
        found = gradients_of(self._batch_loss(x, self._compact(targets), batch), self.trainable)
        slopes = {name: slope.cpu().numpy() for name, slope in found.items()}
        self.model.zero_grad()
        return {
            name: searched(mask, trained[name], slopes.get(name, np.zeros(mask.shape)), share)
            for name, mask in masks.items()
        }


def joined(masks: Masks) -> NDArray[np.bool_]:
    """Return the bits of all masks, one after another."""
    return np.concatenate([np.zeros(0, bool), *(mask.ravel() for mask in masks.values())])


def _in_mask(weights: Arrays, masks: Masks) -> Arrays:
    return {n: np.where(masks[n], w, w.dtype.type(0)) if n in masks else w
            for n, w in weights.items()}  # fmt: skip

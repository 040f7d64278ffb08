"""Clients' uploads of a small network, their sealed form, and how refusals are tested."""

import functools
import itertools
from collections.abc import Sequence

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor, nn

from fedntk.ntk import CompressedUpload, JacobianUpload, UploadLimits, jacobian, one_hot
from fedntk.trust import SealError, Shuffled, ShufflingServer, new_key, public_bytes, seal_upload

from .. import conftest

refused = functools.partial(conftest.refused, error=SealError)
RUN = "run-7"
ROUND = 3
CLIENTS = [new_key() for _ in range(40)]
ENROLLED = [public_bytes(key) for key in CLIENTS]
senders = itertools.cycle(CLIENTS)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


LIMITS = UploadLimits(
    {name: tuple(p.shape) for name, p in network().named_parameters()}, max_examples=60
)


def upload(seed: int, num_examples: int, *, structure: str = "factored") -> JacobianUpload:
    """Return a client's upload in float64; no two rows have equal outputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_examples, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (num_examples,), generator=generator)
    model = network()
    with torch.no_grad():
        outputs = model(x)
    return JacobianUpload(
        jacobian(model, x, structure=structure), outputs, one_hot(labels, 3, torch.float64)
    )


def sealed(
    part: JacobianUpload,
    server: ShufflingServer,
    *,
    run: str = RUN,
    server_round: int = ROUND,
    key: X25519PrivateKey | None = None,
) -> bytes:
    """Return the upload of the client with a key, by default of the next of the `CLIENTS`."""
    arrays, key = CompressedUpload.compress(part).to_arrays(), key or next(senders)
    return seal_upload(arrays, server.public_key, key, run, server_round).tobytes()


def shuffle(
    server: ShufflingServer,
    data: Sequence[bytes],
    limits: UploadLimits = LIMITS,
    server_round: int = ROUND,
) -> Shuffled:
    return server.shuffle(data, limits=limits, run=RUN, server_round=server_round)


def rows(part: JacobianUpload) -> list[bytes]:
    """Each example's Jacobian, outputs and targets as one byte string, sorted."""
    dense = part.jacobian.dense()
    parts: list[Tensor] = [part.outputs, part.targets, *(dense[name] for name in sorted(dense))]
    return sorted(
        b"".join(array[i].numpy().tobytes() for array in parts) for i in range(len(part.outputs))
    )

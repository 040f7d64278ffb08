"""The tangent kernel against neural-tangents' fastest way, in alternating turns.

    benchmarks/peers/make.sh                  # once: an environment of its own for the peer
    python benchmarks/kernel_peers.py [--threads 1,2]

Both get the same weights and examples, and compute Jacobian and kernel; neural-tangents (0.6.5,
structured derivatives) is compiled before. Seconds are medians over turns, the ratio is the median
of each turn's.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import ROOT, make, parse_options, use_checkout, write
from turns import Contestant, serve

CASES = {"mlp-100": (200, 400, 1000, 2000), "simple-cnn": (32, 100)}
TURNS = 11
MOST = 15.0  # seconds of all turns of the peer, about
TURN = 0.1  # seconds of a turn, about
TOLERANCE = 1e-4  # between two programs in float32


def work(network: str, arrays: dict[str, np.ndarray]) -> Callable[[], np.ndarray]:
    """Return what computes the kernel of ``x`` at the other arrays."""
    use_checkout()
    from fedntk.ntk import jacobian

    model, _ = make(network, 1, "cpu")
    x = torch.from_numpy(arrays.pop("x"))
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return lambda: jacobian(model, x).gram().numpy()


def measure(network: str, n: int, threads: int, folder: Path) -> dict[str, float | str | int]:
    peer = ROOT / "build/peers/bin/python"
    both = {
        "ours": Contestant([sys.executable, __file__, "--serve"], threads),
        "peer": Contestant([peer, ROOT / "benchmarks/peers/kernel_by_neural_tangents.py"], threads),
    }
    model, x = make(network, n, "cpu")
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    np.savez(folder / "case.npz", x=x.numpy(), **arrays)
    repeats, kernels, seconds = {}, {}, []
    for name, program in both.items():
        result = str(folder / f"{name}.npy")
        case = {"network": network, "arrays": str(folder / "case.npz"), "result": result}
        first = program.ask(**case, repeats=3)
        seconds.append(min(first))
        repeats[name] = max(1, round(TURN / min(first)))
        kernels[name] = np.load(result)
    difference = np.linalg.norm(kernels["ours"] - kernels["peer"]) / np.linalg.norm(kernels["peer"])
    if not difference < TOLERANCE:
        raise RuntimeError(f"{network}, n = {n}: the kernels differ by {difference}")
    turns = [
        {
            name: float(np.median(program.ask(repeats=repeats[name])))
            for name, program in both.items()
        }
        for _ in range(min(TURNS, max(3, int(MOST / seconds[-1]))))
    ]
    for program in both.values():
        program.close()
    ours, theirs = (float(np.median([turn[name] for turn in turns])) for name in both)
    ratio = float(np.median([turn["peer"] / turn["ours"] for turn in turns]))
    row = {"network": network, "n": n, "threads": threads, "ours": ours, "peer": theirs}
    return row | {"ratio": ratio, "difference": float(difference)}


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve(work)
        return
    options = parse_options(__doc__, threads=(1, 2))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for threads in options.threads:
            for network, sizes in CASES.items():
                for n in sizes:
                    rows.append(measure(network, n, threads, Path(folder)))
                    print(rows[-1], flush=True)
    write("kernel_peers", rows, {"peer": "neural-tangents 0.6.5"})


if __name__ == "__main__":
    main()

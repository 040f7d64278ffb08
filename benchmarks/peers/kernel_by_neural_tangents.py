"""For ../cases.py: the kernel by neural-tangents' structured derivatives, compiled before."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyperf
from jax import lax

Weights = dict[str, Any]


def mlp(w: Weights, x: Any) -> Any:
    """784-100-10."""
    return jax.nn.relu(x @ w["1.weight"] + w["1.bias"]) @ w["3.weight"] + w["3.bias"]


def simple_cnn(w: Weights, x: Any) -> Any:
    """Channels last, as suits XLA on a CPU."""
    for k in (0, 3):
        x = lax.conv_general_dilated(
            x, w[f"{k}.weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + w[f"{k}.bias"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(len(x), -1)
    return jax.nn.relu(x @ w["7.weight"] + w["7.bias"]) @ w["9.weight"] + w["9.bias"]


def work(network: str, arrays: dict[str, np.ndarray]) -> Callable[[], np.ndarray]:
    """Return what computes the kernel of ``x`` at the other arrays."""
    # its converter from TensorFlow, which the kernel does not use
    sys.modules["neural_tangents.experimental"] = types.ModuleType("experimental")
    import neural_tangents as nt

    x = arrays.pop("x")
    arrays = {name: a.T if a.ndim == 2 else a for name, a in arrays.items()}
    if network == "mlp-100":
        f, x = mlp, x.reshape(len(x), -1)
    else:
        f, x = simple_cnn, x.transpose(0, 2, 3, 1)
        for k in ("0.weight", "3.weight"):
            arrays[k] = arrays[k].transpose(2, 3, 1, 0)
        fc = arrays["7.weight"].reshape(64, 7, 7, -1)  # of a map with channels first
        arrays["7.weight"] = fc.transpose(1, 2, 0, 3).reshape(64 * 7 * 7, -1)
    kernel = jax.jit(
        nt.empirical_ntk_fn(
            f,
            trace_axes=(-1,),
            vmap_axes=0,
            implementation=nt.NtkImplementation.STRUCTURED_DERIVATIVES,
        )
    )
    weights = jax.device_put({name: np.ascontiguousarray(a) for name, a in arrays.items()})
    examples = jax.device_put(np.ascontiguousarray(x))
    return lambda: np.asarray(kernel(examples, None, weights))


def main() -> None:
    """Measure one case as a worker of ../speed.py."""
    runner = pyperf.Runner()
    for name in ("one", "way", "folder", "device", "data-dir", "pfllib"):
        runner.argparser.add_argument(f"--{name}")
    asked = runner.parse_args()
    folder, network = Path(asked.folder), asked.one.split(": ")[1].split(",")[0]
    with np.load(folder / f"{network}.npz") as arrays:
        compute = work(network, dict(arrays))
    np.save(folder / f"{asked.way}.npy", compute())
    (folder / f"{asked.way}.facts").write_text("{}", encoding="utf-8")
    runner.bench_func(asked.way, compute)


if __name__ == "__main__":
    main()

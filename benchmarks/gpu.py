"""The tests' table of cases and the benchmarks on a GPU: ``make gpu``.

    python benchmarks/gpu.py [--device cuda] [--data-dir FOLDER] [--cases mlp,cnn]

All of the mathematics is computed in float32 on the device and compared with float64 on the CPU,
TF32 switched on beforehand, since that must not matter. Then the benchmarks that take a device run
one after the other; those that need Fashion-MNIST are left out without FOLDER, in torchvision's
layout, and all of them with ``--cases``. Torch and numpy suffice, straight from a checkout; whole
runs of all methods are made as well where fedntk is installed with Flower.
"""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = ("kernel.py", "entk_features.py")
ON_DATA = ("solver.py", "ntk_fl_round.py")
RUNS = "gpu_runs.py"


def why_not(device: str) -> str:
    """Say what is missing; nothing if the device can be used."""
    try:
        import torch
    except ModuleNotFoundError:
        return f"{sys.executable} has no torch"
    return "" if device == "cpu" or torch.cuda.is_available() else "torch finds no GPU here"


def cases(device: str, names: list[str]) -> bool:
    import torch
    from common import ROOT, use_checkout

    use_checkout()
    sys.path.insert(0, str(ROOT))
    from tests.ntk import on_device

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return on_device.report(device, names)


def main() -> None:
    """Run all; the exit code says whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data-dir", help="in torchvision's layout")
    parser.add_argument("--cases", help="compare only these, and measure nothing")
    chosen = parser.parse_args()
    if reason := why_not(chosen.device):
        print(f"{reason}: nothing was run")
        return
    good = cases(chosen.device, chosen.cases.split(",") if chosen.cases else [])
    programs = [] if chosen.cases else [[name] for name in PROGRAMS]
    if not chosen.cases and chosen.data_dir:
        on_data = [*ON_DATA, *([RUNS] if importlib.util.find_spec("flwr") else [])]
        programs += [[name, "--data-dir", chosen.data_dir] for name in on_data]
    elif not chosen.cases:
        print(f"no --data-dir: {' and '.join(ON_DATA)} are left out")
    for name, *options in programs:
        command = [sys.executable, str(HERE / name), "--device", chosen.device, *options]
        good &= subprocess.run(command, check=False).returncode == 0  # noqa: S603
    print("all good" if good else "NOT all good: see above")
    sys.exit(not good)


if __name__ == "__main__":
    main()

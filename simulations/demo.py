"""NTK-FL against Flower's FedAvg on real digits, through ``flwr run`` on Ray: ``make demo``."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from .engine.runs import compare
from .report.figures import accuracy_curves
from .report.results import Run, load_results, read_runs

CONF = Path(__file__).parent / "conf"
TARGET = 0.9


def compare_on_digits(folder: Path) -> list[Run]:
    """Run both methods on the same split, network and first weights, one after the other."""
    configs = {"NTK-FL": CONF / "ntk_fl_digits.toml", "FedAvg": CONF / "fedavg_digits.toml"}
    compare(configs, out=folder, engine="ray", again=True)
    return read_runs([folder / name for name in configs])


def table(runs: list[Run], target: float = TARGET) -> Table:
    """Accuracy by round, rounds to the target, bytes up and seconds, one column a run."""
    result = Table(title="Test accuracy by communication round")
    result.add_column("round")
    for each in runs:
        result.add_column(str(each.summary["run"]), justify="right")
    curves = [each.curve() for each in runs]
    for number in curves[0].index:
        result.add_row(str(number), *(f"{100 * curve[number]:.1f} %" for curve in curves))
    result.add_section()
    reached = [each.summary["to-target"].get(str(target)) for each in runs]
    result.add_row(
        f"rounds to {100 * target:g} %",
        *("not reached" if r is None else str(r["round"]) for r in reached),
    )
    result.add_row("bytes up, MB", *(f"{each.summary['bytes-up'] / 1e6:.1f}" for each in runs))
    result.add_row("bytes down, MB", *(f"{each.summary['bytes-down'] / 1e6:.1f}" for each in runs))
    result.add_row(
        "seconds, Ray's start in them", *(f"{each.summary['seconds']:.1f}" for each in runs)
    )
    return result


def main() -> None:
    """Run the comparison; print its table and write its picture."""
    console = Console()
    console.print(
        "NTK-FL against Flower's FedAvg on scikit-learn's handwritten digits: 50 clients by "
        "Dirichlet(0.1), 10 a round, the same network and first weights. "
        "Each is a Flower run on Ray, whose workers take a while to start."
    )
    folder = Path("runs/demo").absolute()
    runs = compare_on_digits(folder)
    console.print(table(runs))
    picture = folder / "accuracy.png"
    accuracy_curves(
        load_results([each.folder for each in runs]),
        title="Digits, 50 clients, Dirichlet(0.1), 10 clients a round",
        target=TARGET,
    ).savefig(picture)
    console.print(f"Curves: {picture}\nAll metrics of each round: {folder}/*/seed-0/rounds.parquet")


if __name__ == "__main__":
    main()

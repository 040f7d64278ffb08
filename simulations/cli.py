"""The command ``fedntk``: run, compare, tune, report, assess, ledger, unlearn, delete, deploy.

Only a command that needs torch imports it, so that help comes at once.
"""

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer import Argument, Option

from fedntk import __version__

from .errors import CONTROL, ConfigError, RunFailed, command_line, naming

app = command_line(
    "fedntk",
    "Federated learning with Jacobians and tangent kernels: run, compare, tune, report, assess, "
    "ledger, unlearn, deploy.",
)

Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated."),
]
EngineOption = Annotated[
    str, Option(help="[b]local[/]: clients in this process. [b]ray[/]: flwr run on Ray.")
]
Workers = Annotated[int, Option(min=1, help="Local engine: clients that run at a time.")]
Again = Annotated[bool, Option("--again", help="Replace what is in the folder.")]
Quiet = Annotated[bool, Option("--quiet", help="Show no progress.")]
Seeds = Annotated[str, Option(help="Seeds, with commas between them.")]
TensorBoard = Annotated[bool, Option("--tensorboard", help="Write for TensorBoard.")]
MLflow = Annotated[bool, Option("--mlflow", help="Log to MLflow.")]
Trust = Annotated[bool, Option("--trust", help="Execute the code that FOLDER names.")]
RunFolder = Annotated[Path, Argument(metavar="FOLDER", help="A finished run's folder.")]


def _echo(text: str) -> None:
    """Print a text with names that files and other machines chose."""
    typer.echo(CONTROL.sub(" ", text))


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedntk {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command("run")
def run_command(
    conf: Annotated[
        Path | None, Argument(help="A TOML file, of yours or fedntk's, or a method, such as fedavg")
    ] = None,
    *,
    resume: Annotated[
        Path | None, Option(metavar="FOLDER", help="Go on with the interrupted run in this folder.")
    ] = None,
    out: Annotated[str, Option(help="Folder of the results.")] = "",
    seed: Annotated[int | None, Option(help="Seed, as --set seed=N.")] = None,
    settings: Settings = None,
    engine: EngineOption = "local",
    workers: Workers = 1,
    again: Again = False,
    trust: Trust = False,
    quiet: Quiet = False,
    tensorboard: TensorBoard = False,
    mlflow: MLflow = False,
) -> None:
    """Run one configuration.

    Without CONF, all settings are defaults or given with --set. A finished run is not run again; an
    interrupted one continues from its newest checkpoint. Files that come with fedntk are found by
    their names: ntk_fl_digits.toml is simulations/conf/ntk_fl_digits.toml of the repository.

    [b]Examples[/]

      fedntk run ntk_fl_digits.toml

      fedntk run fedavg_digits.toml --set rounds=40 --out runs/a

      fedntk run --resume runs/a --set rounds=100

      fedntk run --set dataset=fashion-mnist --set num-clients=300 --engine ray
    """
    from . import Config, run
    from .report.results import read_records

    base: Any = conf or {}
    if resume is not None:
        if conf is not None or out or again:
            raise ConfigError("--resume FOLDER takes its settings and folder from that run")
        base = Config.of_run(resume, trust=trust)
    overrides = _parse_settings(settings, conf)
    overrides |= ({} if seed is None else {"seed": seed}) | ({"out": out} if out else {})
    result = run(
        base,
        engine=engine,  # type: ignore[arg-type]
        workers=workers,
        progress=not quiet,
        again=again,
        resume=resume is not None,
        writers=["tensorboard"] * tensorboard + ["mlflow"] * mlflow,
        **overrides,
    )
    headline = result.summary["headline"]
    curve = [row[headline] for row in read_records(result.folder) if headline in row]
    reached = f"{100 * curve[-1]:.1f} %" if curve else f"no {headline} was measured"
    _echo(f"{reached} after round {result.summary['rounds']}: {result.folder}")
    _require_replies([result.folder])


def _require_replies(folders: Iterable[Path]) -> None:
    """Fail, after the results are shown, if most clients of most rounds of a run failed."""
    from .report.results import MOSTLY_FAILED, describe_replies, read_summary

    summaries = {folder: read_summary(folder) for folder in folders}
    if bad := [
        f"{folder}: {describe_replies(summary)}"
        for folder, summary in summaries.items()
        if summary["status"] == MOSTLY_FAILED
    ]:
        raise RunFailed("; ".join(bad))


@app.command("compare")
def compare_command(
    confs: Annotated[list[Path], Argument(help="TOML files, one for each method.")],
    *,
    seeds: Seeds = "0",
    out: Annotated[Path, Option(help="Folder of the comparison.")] = Path("runs/compare"),
    settings: Settings = None,
    engine: EngineOption = "local",
    workers: Workers = 1,
    again: Again = False,
    quiet: Quiet = False,
    tensorboard: TensorBoard = False,
    mlflow: MLflow = False,
) -> None:
    """Run several configurations with several seeds, and report on them.

    Each of CONFS names a run by its file or by its own key name. Give the same command again to go
    on with a comparison that was interrupted.

    [b]Examples[/]

      fedntk compare ntk_fl_digits.toml fedavg_digits.toml --seeds 0,1,2 --out runs/digits

      fedntk compare a.toml b.toml --set rounds=10 --engine ray
    """
    from . import Config, compare, write_report
    from .config.config import CONF

    if folders := [conf for conf in confs if conf.is_dir()]:
        raise ConfigError(
            f"expected TOML files, got the folder {folders[0]}; name its files, such as "
            f"{folders[0]}/*.toml, or show finished runs with fedntk report {folders[0]}"
        )
    # a pattern is of files that come with fedntk
    files = [sorted(CONF.glob(conf.name)) if "*" in conf.name else [conf] for conf in confs]
    confs = [*itertools.chain.from_iterable(files)]
    overrides = _parse_settings(settings, *confs)
    named = [(conf.stem, Config.load(conf)) for conf in confs]
    configs = {config.name or stem: config for stem, config in named}
    if len(configs) < len(confs):
        raise ConfigError("expected files of different names, which become the runs' names")
    compare(
        configs,
        seeds=seeds,
        out=out,
        engine=engine,  # type: ignore[arg-type]
        workers=workers,
        progress=not quiet,
        again=again,
        writers=["tensorboard"] * tensorboard + ["mlflow"] * mlflow,
        **overrides,
    )
    _show(write_report(out))
    _require_replies(path.parent for path in out.rglob("summary.json"))


@app.command("tune")
def tune_command(
    conf: Annotated[Path, Argument(help="A TOML file of all other settings.")],
    *,
    grid: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=V1,V2,...",
            help="Try these values; may be repeated. With semicolons if values have commas.",
        ),
    ] = None,
    random: Annotated[
        list[str] | None,
        Option(metavar="KEY=LOW:HIGH[:log]", help="Or V1,V2,...: draw; may be repeated."),
    ] = None,
    trials: Annotated[int, Option(help="Combinations to draw.")] = 20,
    sampler: Annotated[str, Option(help="How to draw: random or tpe.")] = "random",
    sampler_seed: Annotated[int, Option(help="Seed of the draws.")] = 0,
    seeds: Seeds = "0",
    metric: Annotated[str, Option(help="accuracy, loss, client-accuracy-mean, ...")] = "accuracy",
    last: Annotated[int, Option(help="Rounds at the end whose mean is the value.")] = 5,
    prune: Annotated[str, Option(help="End bad trials early: median or halving.")] = "none",
    parallel: Annotated[int, Option(help="Trials at a time, each in a process.")] = 1,
    out: Annotated[Path, Option(help="Folder of the search.")] = Path("runs/tune"),
    settings: Settings = None,
    again: Again = False,
    quiet: Quiet = False,
) -> None:
    """Search for settings on validation examples or validation clients, never on the test set.

    CONF, or --set, holds out validation-examples or validation-clients. Give the same command again
    to go on with a search that was interrupted. best.toml in the folder is for fedntk run.

    [b]Examples[/]

      fedntk tune a.toml --set validation-examples=200 --grid learning-rate=0.1,0.03 --seeds 0,1

      fedntk tune a.toml --grid learning-rate=0.1,0.01 --grid local-epochs=1,5,20 --parallel 4

      fedntk tune a.toml --random learning-rate=0.001:1:log --trials 30 --sampler tpe --prune median
    """
    from . import tune

    overrides = _parse_settings(settings, conf)
    config = _config_knowing(settings, conf)
    tuning = tune(
        conf,
        grid=dict(_parse_values(config, text) for text in grid or []),
        random=dict(_parse_values(config, text, ranged=True) for text in random or []),
        trials=trials,
        sampler=sampler,  # type: ignore[arg-type]
        sampler_seed=sampler_seed,
        seeds=seeds,
        metric=metric,
        last=last,
        prune=prune,  # type: ignore[arg-type]
        parallel=parallel,
        out=out,
        progress=not quiet,
        again=again,
        **overrides,
    )
    _show(tuning.folder / "report" / "report.md")
    typer.echo(f"Best: {tuning.folder / 'best.toml'}")


@app.command("report")
def report_command(
    folder: Annotated[Path, Argument(help="A run, or a folder of runs at any depth.")],
    *,
    out: Annotated[Path | None, Option(help="FOLDER/report by default.")] = None,
    targets: Annotated[
        str, Option(help="Accuracies for the table, such as 0.8,0.9; the runs' by default.")
    ] = "",
    trust: Trust = False,
) -> None:
    """Write tables (Markdown, LaTeX), pictures and report.html of finished runs.

    [b]Examples[/]

      fedntk report runs/digits

      fedntk report runs --out report --targets 0.5,0.9
    """
    from . import Config, write_report

    wanted = Config(targets=targets).targets if targets else None
    _show(write_report(folder, out, targets=wanted, trust=trust))


@app.command("assess")
def assess_command(
    folder: RunFolder,
    *,
    unfamiliar: Annotated[
        str, Option(metavar="DATASET", help="Data of which the model should be uncertain.")
    ] = "",
    coverage: Annotated[
        float | None,
        Option(help="Make prediction sets that hold the true class so often, such as 0.9."),
    ] = None,
    score: Annotated[
        str, Option(metavar="[threshold|adaptive]", help="Smallest sets, or adapted to examples.")
    ] = "threshold",
    calibrate_on: Annotated[
        str,
        Option(
            metavar="[clients|examples]",
            help="The run's validation-clients (by default, if there are any) or -examples.",
        ),
    ] = "",
    which: Annotated[
        str, Option(metavar="[model|best]", help="The last model, or the best one.")
    ] = "model",
    out: Annotated[Path | None, Option(help="FOLDER/uncertainty by default.")] = None,
    trust: Trust = False,
) -> None:
    """Say how far a run's predictions can be trusted, on its test examples.

    Calibration (NLL, Brier score, ECE), accuracy when uncertain examples are rejected, and as
    options unfamiliar data and prediction sets. For models with the loss cross-entropy.

    [b]Examples[/]

      fedntk assess runs/a --unfamiliar mnist --coverage 0.9
    """
    from . import assess

    assessment = assess(
        folder,
        unfamiliar=unfamiliar or None,
        coverage=coverage,
        score=score,  # type: ignore[arg-type]
        calibrate_on=calibrate_on or None,  # type: ignore[arg-type]
        which=which,  # type: ignore[arg-type]
        trust=trust,
    )
    _show(assessment.write(out))


@app.command("unlearn")
def unlearn_command(
    folder: RunFolder,
    clients: Annotated[list[int], Argument(metavar="CLIENT...", help="Partitions to take out.")],
    *,
    out: Annotated[Path | None, Option(help="FOLDER/without-CLIENT-... by default.")] = None,
    forget: Annotated[
        bool, Option("--forget", help="Then remove what the run keeps of them.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Take clients out of what a run learned, as if they had never taken part; no round is run.

    For models that are solved from sums that the run has kept: tct with tct.sums and
    tct.storage = true. A network that these clients helped to train stays. Accuracies are of the
    test set.

    [b]Examples[/]

      fedntk unlearn runs/a 3 5 --forget
    """
    from . import unlearn

    _echo("\n".join(unlearn(folder, clients, out=out, forget=forget, trust=trust).lines()))


@app.command("delete")
def delete_command(
    folder: RunFolder,
    rows: Annotated[
        list[int], Argument(metavar="ROW...", help="Places among its training examples, from 0.")
    ],
    *,
    client: Annotated[int, Option(help="Partition whose rows they are.")],
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Delete some of a client's training examples, and go on for a round, which solves without.

    For runs of one-exchange with one-exchange.changes = true. The model in FOLDER becomes that of a
    run that never had these rows, to the bit, and a signed record says so: see fedntk verify.

    [b]Examples[/]

      fedntk delete runs/a --client 3 0 17
    """
    from . import delete

    result = delete(folder, client, rows, trust=trust, progress=not quiet)
    (record,) = (result.folder / "details" / "changes").glob("*.jsonl")
    _echo(f"{len(rows)} rows of client {client} are deleted; signed in {record}")


@app.command("ledger")
def ledger_command(
    folder: RunFolder,
    *,
    shapley: Annotated[
        int, Option(help="Orders, 2 or more, by which Shapley values are estimated; 0: none.")
    ] = 0,
    rows: Annotated[int, Option(help="Clients that are shown.")] = 20,
    trust: Trust = False,
) -> None:
    """Show each client's part in what a run learned from sums, the most harmful first.

    For runs of one-exchange with one-exchange.storage = true and validation-examples. Writes
    ledger.parquet, with all clients, and ledger.png into the run's folder.

    [b]Examples[/]

      fedntk ledger runs/a --shapley 10
    """
    from rich.console import Console
    from rich.table import Table

    from . import ledger

    parts = ledger(folder, shapley=shapley, trust=trust)
    shown = parts.loc[:, ~parts.columns.str.startswith("class-")].head(rows)
    table = Table(*shown.columns)
    for row in shown.itertuples(index=False):
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)
    _echo(f"All {len(parts)} clients: {folder / 'ledger.parquet'}")


@app.command("schema")
def schema_command(
    table: Annotated[Path, Argument(metavar="FILE", help="A csv or parquet file.")],
    *,
    target: Annotated[str, Option(help="Column of the labels, or of real targets.")] = "label",
    client_column: Annotated[str, Option(help="Column that says whose a row is.")] = "",
    separator: Annotated[str, Option(help="comma, semicolon, tab or bar.")] = "comma",
    decimal: Annotated[str, Option(help="point or comma.")] = "point",
    encoding: Annotated[str, Option(help="Encoding of a csv file.")] = "utf-8",
    out: Annotated[Path | None, Option(help="Write it here.")] = None,
    again: Annotated[bool, Option("--again", help="Replace the file that is there.")] = False,
) -> None:
    """Propose what the columns of a table mean: kinds, ranges, categories, and what gaps become.

    It is for the setting schema, after you have checked it: what to check is said in it.

    [b]Examples[/]

      fedntk schema patients.csv --target outcome --out schema.toml
    """
    from .config.data import DatasetSettings
    from .data.schema import propose_schema

    how: dict[str, Any] = {"separator": separator, "decimal": decimal, "encoding": encoding}
    settings = DatasetSettings(target=target, client_column=client_column, **how)
    text = propose_schema(table, settings)
    if out is None:
        _echo(text)
        return
    if out.exists() and not again:
        raise ConfigError(f"{out} exists; choose another name, or replace it with --again")
    out.write_text(text, encoding="utf-8")
    checks = [line for line in text.splitlines() if line.startswith("# check")]
    _echo(f"{out}: check it, above all {len(checks)} lines that begin with '# check'")


@app.command("privacy-ledger")
def privacy_ledger_command(
    ledger: Annotated[Path, Argument(help="The ledger's file, for its owner only.")],
    *,
    new: Annotated[bool, Option("--new", help="Make it, for data that gave nothing yet.")] = False,
) -> None:
    """Show what a data set has given in sums that are masked or have noise, or make its ledger."""
    from fedntk.clients import PrivacyLedger

    with naming("privacy-ledger", ValueError):
        opened = PrivacyLedger.create(ledger) if new else PrivacyLedger(ledger)
        for release in opened.releases():
            _echo(f"{release.run}: epsilon {release.epsilon:g}, delta {release.delta:g}")


@app.command("deploy")
def deploy_command(
    conf: Annotated[Path, Argument(help="A TOML file of the run, whose data set nodes' are like.")],
    *,
    host: Annotated[
        list[str], Option(help="Name or address of the server; nodes use the first of several.")
    ],
    port: Annotated[int, Option(min=1, max=65535, help="Port of the server.")] = 8000,
    out: Annotated[Path, Option(help="Folder of all folders.")] = Path("deployment"),
    settings: Settings = None,
    again: Annotated[bool, Option("--again", help="Replace the keys that are there.")] = False,
) -> None:
    """Write a folder for the server and one for each of num-clients nodes: keys, settings, README.

    A node's folder has its key, what the run knows of its columns and classes, and mine.toml: where
    its rows are, and what their owner allows. It has no row of the run's data set.

    [b]Examples[/]

      fedntk deploy trees.toml --host fl.example.org
    """
    from . import Config
    from .deploy.deployment import write_deployment

    config = Config.load(conf, **_parse_settings(settings, conf))
    for path in write_deployment(config, out, host, port=port, again=again):
        _echo(str(path))


@app.command("serve")
def serve_command(
    folder: Annotated[Path, Argument(help="The server's folder of fedntk deploy.")],
    *,
    port: Annotated[int, Option(min=1, max=65535, help="Port, as nodes know it.")] = 8000,
) -> None:
    """Wait for the nodes of a deployment, run what its config.toml says, and stop."""
    from .deploy.deployment import serve

    _echo(f"results: {serve(folder, port=port, say=_echo)}")


@app.command("node")
def node_command(
    conf: Annotated[Path, Argument(help="A node's mine.toml, in its folder of fedntk deploy.")],
    *,
    check: Annotated[
        bool, Option("--check", help="Only check files and rows, without the server.")
    ] = False,
    recount: Annotated[
        bool, Option("--recount", help="Delete and add rows: those of the file count from now on.")
    ] = False,
) -> None:
    """Check a node's rows and its server, and answer the server's runs until Ctrl-C."""
    from .deploy.node import check_node, count_rows, run_node

    if recount:
        _echo(f"{conf}: {count_rows(conf)} rows count from the next round on")
    elif check:
        check_node(conf)
        _echo(f"{conf}: the files and the rows fit")
    else:
        run_node(conf, say=_echo)


@app.command("check")
def check_command(
    method: Annotated[
        str, Argument(help="Such as mymethod.py:FedAvgM, or a TOML file with its settings.")
    ],
    *,
    settings: Settings = None,
) -> None:
    """Check a method by the contract that all methods here keep, with the cure of each failure.

    Hostile replies, their order, resumed runs, dtypes, seeds, settings. The exit code is 1 if a
    check fails.

    [b]Examples[/]

      fedntk check mymethod.py:FedAvgM --set model=simple-cnn
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from .check import check_method

    results = check_method(method, **_parse_settings(settings, method))
    table = Table("check", "", "what to do")
    for name, passed, cure in results.itertuples(index=False):
        table.add_row(name, "passed" if passed else "[red]failed[/]", escape(cure))
    Console().print(table)
    raise typer.Exit(int(not results.passed.all()))


@app.command("reproduce")
def reproduce_command(
    table: Annotated[
        str, Argument(help="Such as tct/table-2, or a TOML file; without it, all are listed.")
    ] = "",
    *,
    method: Annotated[
        str, Option(help="One more row, such as mymethod.py:Mine; only it is run.")
    ] = "",
    rows: Annotated[str, Option(help="Rows, with commas; may be patterns.")] = "*",
    columns: Annotated[str, Option(help="Columns, with commas; may be patterns.")] = "*",
    seeds: Annotated[str, Option(help="Seeds, such as 0,1 or 0-2; the table's by default.")] = "",
    small: Annotated[bool, Option("--small", help="The stated form of a few minutes.")] = False,
    smaller: Annotated[
        bool, Option("--smaller", help="The stated form that one machine runs in hours.")
    ] = False,
    out: Annotated[Path, Option(help="Folder of the results.")] = Path("runs/reproduce"),
    data_dir: Annotated[str, Option(help="Folder of the data sets.")] = "",
    workers: Annotated[int, Option(min=1, help="Cells that run at a time, each in a process.")] = 2,
    cost: Annotated[bool, Option("--cost", help="Only say what it will cost.")] = False,
    quiet: Quiet = False,
) -> None:
    """Make a table or figure of a paper again: all its runs, its figures, the table, the picture.

    What it will cost is said first, from one round of each row and data set on this machine. Give
    the same command again to go on after an interruption.

    [b]Examples[/]

      fedntk reproduce

      fedntk reproduce tct/table-2 --rows fedavg,tct --seeds 0-2 --out results

      fedntk reproduce ntk-fl/table-1 --small

      fedntk reproduce board --method mymethod.py:Mine
    """
    from .reproduction import reproduce, show_listing

    if not table:
        show_listing()
        return
    page = reproduce(
        table,
        method=method,
        rows=rows.split(","),
        columns=columns.split(","),
        seeds=seeds,
        form="small" if small else "smaller" if smaller else "paper",
        out=out,
        data_dir=data_dir,
        workers=workers,
        progress=not quiet,
        say=_echo,
        cost=cost,
    )
    if not cost:
        _show(page)


@app.command("verify")
def verify_command(
    result: Annotated[
        str,
        Argument(
            help="A folder of fedntk reproduce, or a table's name: what fedntk shows. Or a file of "
            "signed records, .jsonl."
        ),
    ],
    *,
    key: Annotated[
        str, Option(help="Public key of the records' signer, in hexadecimal digits.")
    ] = "",
    cells: Annotated[str, Option(help="row/column/seed, with commas; may be patterns.")] = "",
    count: Annotated[int, Option(min=1, help="Else so many cells, the quickest.")] = 1,
    data_dir: Annotated[str, Option(help="Folder of the data sets.")] = "",
) -> None:
    """Run cells of a result again: their figures are equal to the bit, near, or different.

    Near means within the tolerance of the table. The exit code is 1 if a figure is different.

    Signed records of deleted rows, which nothing can run again, are checked for signature, order
    and gaps; without --key, the first record says who signs.

    [b]Examples[/]

      fedntk verify results/tct-table-2

      fedntk verify ntk-fl/table-1 --cells fedavg/0

      fedntk verify runs/a/details/changes/changes-0f1e.jsonl
    """
    if result.endswith(".jsonl"):
        _verify_records(result, key)
        return
    from .reproduction.verifying import DIFFERENT, describe, verify

    table = verify(result, cells=_list(cells), count=count, data_dir=data_dir)
    _echo(describe(table))
    raise typer.Exit(int((table.verdict == DIFFERENT).any()))


def _verify_records(path: str, key: str) -> None:
    from fedntk.trust import verify_records

    with naming("verify", ValueError, OSError):
        records = verify_records(path, key)
    for record in records:
        names = [n for n in ("round", "time", "deleted", "added", "rows") if n in record]
        _echo(", ".join(f"{name} {record[name]}" for name in names))
    last = records[-1]
    _echo(
        f"{len(records)} records of run {last.get('run', '')} signed by {last['key']}; the model "
        f"is now {last['after']}"
    )


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@app.command("settings")
def settings_command(
    method: Annotated[str, Argument(help="Only its own settings, such as tct.")] = "",
) -> None:
    """List all settings with their defaults and meanings."""
    from . import Config

    typer.echo("\n".join(Config.describe(method)) or f"{method} has no settings of its own")


@app.command("demo")
def demo_command(
    out: Annotated[Path, Option(help="Folder of the results.")] = Path("runs/demo"),
) -> None:
    """Compare NTK-FL with FedAvg on real digits, on Ray: tables and a picture in 2 to 3 minutes.

    It needs no download, and replaces what is in its folder.
    """
    from .demo import demo

    demo(out)


def _show(report: Path) -> None:
    from rich.console import Console
    from rich.markdown import Markdown, TableElement

    class Table(TableElement):
        """A table that folds long words where the console is narrow, and cuts none."""

        def __rich_console__(self, console: Any, options: Any) -> Any:
            for table in super().__rich_console__(console, options):
                columns = getattr(table, "columns", [])
                for column in columns:
                    column.overflow = "fold"
                for first in columns[:1]:  # names
                    first.width = min(18, max(map(len, [first.header, *first.cells])))
                yield table

    class Folding(Markdown):
        elements: ClassVar = {**Markdown.elements, "table_open": Table}

    text = report.read_text(encoding="utf-8")
    tables = [line for line in text.splitlines() if not line.startswith("!")]
    Console().print(Folding("\n".join(tables)))
    _echo(f"Report: {report}")
    if (page := report.with_suffix(".html")).exists():
        _echo(f"In a browser: {page}")


def _parse_settings(settings: list[str] | None, *named: Path | str | None) -> dict[str, Any]:
    """Parse ``key=value`` as the key's type."""
    config = _config_knowing(settings, *named)
    pairs = [_split("--set", "KEY=VALUE", setting) for setting in settings or []]
    return {key.replace("-", "_"): config.convert(key, text) for key, text in pairs}


def _config_knowing(settings: list[str] | None, *named: Path | str | None) -> Any:
    """Return a configuration that knows a user's methods in the settings, or in what is named."""
    from . import Config
    from .engine.runs import read_config

    config = Config()
    methods = [text.partition("=")[2] for text in settings or [] if text.startswith("method=")]
    for method in (*named, *methods):
        with contextlib.suppress(ConfigError):
            if method:
                config = config.replace(methods=read_config(method, {}).methods)
    return config


def _split(option: str, expected: str, argument: str) -> tuple[str, str]:
    key, sign, text = argument.partition("=")
    if not sign:
        raise ConfigError(f"{option}: expected {expected}, got {argument!r}")
    return key.strip(), text.strip()


def _parse_values(config: Any, argument: str, *, ranged: bool = False) -> tuple[str, Sequence[Any]]:
    """Parse ``key=v1,v2``, ``key=v1;v2`` if values have commas, or ``key=low:high[:log]``."""
    option, expected = "--grid", "KEY=V1,V2,..."
    if ranged:
        option, expected = "--random", f"KEY=LOW:HIGH[:log] or {expected}"
    key, text = _split(option, expected, argument)
    if ranged and ":" in text:
        low, high, *log = text.split(":")
        return key, (config.convert(key, low), config.convert(key, high), *log)
    values = text.split(";" if ";" in text else ",")
    return key, [config.convert(key, value.strip()) for value in values]


if __name__ == "__main__":
    app()

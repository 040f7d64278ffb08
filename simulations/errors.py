"""What goes wrong in ways that users are to read: wrong settings, failed runs, missing modules."""

import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import LogRecord, getLogger
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup, TyperOption

CONTROL = re.compile(r"[^\n -~\xa0-\U0010ffff]")  # characters, such as escape codes of terminals
logger = getLogger("flwr")


class ConfigError(ValueError):
    """A setting that cannot work; the message says which, what was expected and what came."""


def place_in(folder: Path, name: str) -> Path:
    """Return a place to write to in a run's folder; ConfigError if it is a link to elsewhere."""
    place = folder / name
    if not place.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"{place}: leads out of the run's folder, to {place.resolve()}; remove the link"
        )
    return place


def _without_control(record: LogRecord) -> bool:
    """Take control characters out of what is logged: files and other machines name things."""
    if (shown := CONTROL.sub(" ", whole := record.getMessage())) != whole:
        record.given = record.msg, record.args
        record.msg, record.args = shown, ()
    return True


logger.addFilter(_without_control)


class RunFailed(RuntimeError):  # noqa: N818
    """A run that ended before its last round; the message says why."""


class Stopped(RunFailed):
    """Raised by a caller's `on_round` to end a run, which may go on later."""


class Tracebacks:
    """Logs the tracebacks of clients, those of one kind and place once a run."""

    def __init__(self) -> None:
        self._counts = Counter[Any]()  # by run, kind and place
        self._lock = threading.Lock()

    def log(self, context: Any, error: BaseException) -> None:
        """Log the error of the client that Flower's context is of, unless its like was logged."""
        frames = traceback.extract_tb(error.__traceback__)
        places = tuple((frame.filename, frame.lineno) for frame in frames)
        key = context.run_id, type(error).__name__, places
        with self._lock:
            self._counts[key] += 1
            is_first = self._counts[key] == 1
        if is_first:
            client = context.node_config.get("partition-id", context.node_id)
            text = "".join(traceback.format_exception(error))
            logger.warning("client %s: %s", client, text)

    def end(self, run_id: int) -> None:
        """Log how often each error of a run came, and forget them."""
        for key in [key for key in self._counts if key[0] == run_id]:
            if (count := self._counts.pop(key)) > 1:
                logger.warning("%s, whose traceback is above, came %d times", key[1], count)


TRACEBACKS = Tracebacks()


@contextmanager
def naming(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn ConfigErrors and errors of some kinds into a ConfigError that begins with `what`."""
    told: tuple[type[Exception], ...] = (ConfigError, *kinds)
    try:
        yield
    except told as error:
        raise ConfigError(f"{what}: {error}") from error


def first_line(error: BaseException) -> str:
    """Return the kind of an error, the first line of what it says, and where in a user's file."""
    said = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0]
    installed = tuple(filter(None, map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))))
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if not module.startswith("fedntk.") and not file.startswith(("<", *installed)):
            name = "a notebook's cell" if "ipykernel" in file else Path(file).name
            place = f" ({name}, line {line})"
    return said if place.strip() in said else said + place


def with_extra_named(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error with the extra that brings the missing module; fedntk's own errors stay."""
    if (error.name or "").partition(".")[0] == "fedntk" or "pip install" in str(error):
        return error
    return ModuleNotFoundError(
        f"the simulations need {error.name}, which is not installed; install the extra with "
        "pip install 'fedntk[simulation]'",
        name=error.name,
    )


def command_line(name: str, meaning: str) -> typer.Typer:
    """Make an app for commands; `name` begins each of its errors, which are one line."""

    class Commands(TyperGroup):
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """Give each command the option ``--debug``."""
            command = super().get_command(ctx, cmd_name)
            if command is not None:
                debug = TyperOption(
                    param_decls=["--debug"],
                    is_flag=True,
                    expose_value=False,
                    callback=lambda ctx, _, value: ctx.meta.update(debug=value),
                    help="Show the whole traceback of an error.",
                )
                others = [option for option in command.params if option.name != "debug"]
                command.params = [*others, debug]
            return command

        def invoke(self, ctx: Any) -> Any:
            with _errors_in_one_line(name, ctx.meta):
                return super().invoke(ctx)

    return typer.Typer(
        cls=Commands,
        help=meaning,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=False,
    )


@contextmanager
def _errors_in_one_line(command: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Say what is wrong; exit codes: 2 for settings, 1 for failures."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (ConfigError, RunFailed, OSError, ModuleNotFoundError) as error:
        if options.get("debug"):
            traceback.print_exception(error)
        shown = with_extra_named(error) if isinstance(error, ModuleNotFoundError) else error
        typer.echo(CONTROL.sub(" ", f"{command}: {shown}"), err=True)
        sys.exit(2 if isinstance(error, ConfigError | FileNotFoundError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)

"""What goes wrong in ways that users are to read: wrong settings, failed runs, missing modules."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup


class ConfigError(ValueError):
    """A setting that cannot work; the message says which, what was expected and what came."""


class RunFailed(RuntimeError):  # noqa: N818
    """A run that ended before its last round; the message says why."""


class Stopped(RunFailed):
    """Raised by a caller's `on_round` to end a run, which may go on later."""


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0]


def with_extra_named(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error with the extra that brings the missing module; fedntk's own errors stay."""
    if (error.name or "").partition(".")[0] == "fedntk":
        return error
    return ModuleNotFoundError(
        f"the simulations need {error.name}, which is not installed; install the extra with "
        "pip install 'fedntk[simulation]'",
        name=error.name,
    )


def command_line(name: str, meaning: str) -> typer.Typer:
    """Make an app for commands; `name` begins each of its errors, which are one line."""

    class Commands(TyperGroup):
        def invoke(self, ctx: Any) -> Any:
            with _errors_in_one_line(name):
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
def _errors_in_one_line(command: str) -> Iterator[None]:
    """Say what is wrong without a traceback; exit codes: 2 for settings, 1 for failures.

    A request to terminate saves what there is, as Ctrl-C does.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (ConfigError, RunFailed, OSError, ModuleNotFoundError) as error:
        shown = with_extra_named(error) if isinstance(error, ModuleNotFoundError) else error
        typer.echo(f"{command}: {shown}", err=True)
        sys.exit(2 if isinstance(error, ConfigError | FileNotFoundError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)

"""Runs that failed, and what to install where a module is missing."""

__all__ = ["RunFailed", "with_extra_named"]


class RunFailed(RuntimeError):  # noqa: N818
    """A run that ended before its last round; the message says why."""


def with_extra_named(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error with the extra that brings the missing module; ours are left alone."""
    if (error.name or "").partition(".")[0] == "fedntk":
        return error
    return ModuleNotFoundError(
        f"the simulations need {error.name}, which is not installed; install the extra with "
        "pip install 'fedntk[simulation]'",
        name=error.name,
    )

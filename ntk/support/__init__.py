"""Memory, files, threads, precision and array checks: what all of the mathematics uses."""

from . import threads  # noqa: F401 - when this is imported: it sets how torch's threads wait

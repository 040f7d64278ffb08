"""Memory, files, threads, precision and array checks: what all of the mathematics uses."""

"""Memory, files, precision and array checks: what all of the mathematics uses."""

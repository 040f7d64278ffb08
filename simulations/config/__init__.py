"""Settings of a run: declared, read, checked, written."""

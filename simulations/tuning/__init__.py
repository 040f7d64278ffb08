"""Search for settings on validation examples."""

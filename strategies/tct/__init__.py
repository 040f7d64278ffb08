"""TCT: the server half."""

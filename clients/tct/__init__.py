"""TCT: the client half."""

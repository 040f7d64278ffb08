"""A model for each client: the client half."""

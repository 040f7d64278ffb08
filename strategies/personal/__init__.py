"""A model for each client: the server half."""

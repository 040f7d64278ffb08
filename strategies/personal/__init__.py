"""Methods with a model for each client: the server half."""

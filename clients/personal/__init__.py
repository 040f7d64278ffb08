"""Methods with a model for each client: the client half."""

"""Methods that predict with many models: the server half."""

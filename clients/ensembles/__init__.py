"""Methods that predict with many models: the client half."""

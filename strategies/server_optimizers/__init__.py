"""Optimizers on the server: the server half."""

"""Predictions by many models: the server half."""

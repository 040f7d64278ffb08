"""Predictions by many models: the client half."""

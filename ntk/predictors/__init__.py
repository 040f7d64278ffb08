"""Learned models: networks, linear models, ensembles, prototypes; conformal sets."""

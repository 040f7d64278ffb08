"""What was learned: networks, linear models, ensembles, prototypes; conformal sets."""

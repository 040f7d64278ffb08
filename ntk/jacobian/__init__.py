"""Per-example Jacobians: the operator, its blocks, a rule for each kind of layer."""

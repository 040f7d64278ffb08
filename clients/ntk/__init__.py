"""NTK-FL and CP-NTK-FL: the client half."""

"""NTK-FL and CP-NTK-FL: the server half."""

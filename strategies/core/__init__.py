"""What all methods share in the server half."""

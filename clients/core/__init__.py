"""What all methods share in the client half."""

"""What a finished run is asked: uncertainty, unlearning, selections of models."""

"""TCT (Yu et al., NeurIPS 2022) on handwritten digits."""

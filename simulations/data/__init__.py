"""Data sets, and their split over the clients."""

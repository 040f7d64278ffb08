"""Features of examples: their map, rows on disk, normaliser, projections."""

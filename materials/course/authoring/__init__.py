"""Build the notebooks from their text sources."""

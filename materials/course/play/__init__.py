"""What lessons draw and run."""

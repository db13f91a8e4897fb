"""Checkpoints by name: files, folders and URLs, read lazily, with nothing in them ever run."""

"""What the notebooks share: figures, exercise checks, mutation cards.  Not part of the library."""

"""Token files and the memory-mapped datasets over them."""

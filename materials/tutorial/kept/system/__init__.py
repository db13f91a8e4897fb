"""What the parts need from the system: page cache advice, atomic writes, progress bars."""

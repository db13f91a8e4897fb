"""What the parts need from the system: page cache, atomic writes, accelerator, threads, output."""

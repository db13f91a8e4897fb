"""Your measurements: where the time of a run went, and what a faster part of it would bring."""

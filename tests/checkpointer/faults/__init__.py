"""Ways to make a save fail or die at every step, and what must hold afterwards."""

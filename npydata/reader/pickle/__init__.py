"""Pickles as inert descriptions: the machine, and what torch's names and calls stand for in it."""

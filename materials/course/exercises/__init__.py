"""The exercises of each lesson: `nbNN.py`."""

"""The exercises of each notebook: every module here holds a list `EXERCISES`."""

"""The exercises of each notebook: a module has its `PART`, `BUILDS`, `PROMISES` and `CARDS`."""

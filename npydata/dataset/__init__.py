"""The dataset: token files, samples of them, packed rows, mixtures, and what prepares them."""

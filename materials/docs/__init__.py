"""The site that `make docs` builds: pages, rendered notebooks, API reference, link checker."""

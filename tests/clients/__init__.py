"""Tests with the real packages of the frameworks that others train in: `make nightly`."""

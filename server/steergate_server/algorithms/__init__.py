"""Steering algorithms: the extension API, the registry, and one file for each algorithm."""

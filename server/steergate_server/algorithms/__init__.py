"""Steering algorithms: the extension API, the registry, and one file for each algorithm."""

from steergate_server.algorithms import direct as direct

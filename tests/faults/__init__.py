"""What must be survived: a fault ends the request that it belongs to, and nothing else."""

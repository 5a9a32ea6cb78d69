"""What the engine and HTTP tests share."""

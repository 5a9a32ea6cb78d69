"""Real engines against the reference interpreter, and against stock vLLM."""

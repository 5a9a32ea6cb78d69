"""SteerGate server: typed, contract-first activation steering for stock vLLM."""

"""Client SDK for SteerGate: typed activation steering over HTTP."""

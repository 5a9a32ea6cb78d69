"""What steering costs, measured beside stock vLLM: run with `make bench`. See docs/benchmarks.md."""

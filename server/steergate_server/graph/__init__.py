"""Table families, lowering of payloads into persistent pools, and the in-graph operators."""

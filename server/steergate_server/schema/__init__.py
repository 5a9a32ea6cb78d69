"""The wire language: msgspec structs, decoding with precise errors, and the pure rules."""

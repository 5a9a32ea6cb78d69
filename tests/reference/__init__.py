"""The oracle: a plain-PyTorch interpreter of steering requests, written from the design documents alone."""

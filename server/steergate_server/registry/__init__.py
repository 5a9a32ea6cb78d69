"""Names, digests and the payload spool."""

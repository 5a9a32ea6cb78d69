"""The contract's version: MAJOR.MINOR. A change that breaks clients raises the first, an addition the second."""

__all__ = ["CONTRACT_VERSION"]

CONTRACT_VERSION = "1.0"

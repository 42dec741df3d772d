"""Robust accuracy that can be trusted: attacks over a data set, what they found, and the card."""

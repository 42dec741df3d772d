"""Evaluation that can be trusted: suites of attacks, checks and the card."""

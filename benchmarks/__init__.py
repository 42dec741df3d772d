"""Cost ratios: see cost.py."""

"""Cost ratios, and studies whose results are in records/."""

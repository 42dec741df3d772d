"""The report: one self-contained page from run folders alone."""

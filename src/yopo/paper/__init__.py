"""The paper's tables as data, and what `yopo reproduce` runs for each of their rows."""

"""The page that shows runs: read from their folders, no network is built and nothing is run."""

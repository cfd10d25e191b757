"""Named runs: what the command line offers."""

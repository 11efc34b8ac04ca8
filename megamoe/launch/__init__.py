"""Where bytes lie, and what a launch is told about that."""

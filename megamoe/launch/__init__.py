"""Where bytes lie, and what a launch is told of it."""

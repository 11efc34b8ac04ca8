"""Run the persistent kernel on a GPU."""

"""The persistent kernel on a GPU."""

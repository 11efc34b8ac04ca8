"""Compute where bytes are in memory, and fill the launch arguments."""

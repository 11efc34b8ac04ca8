"""Hooks of other libraries, one file each; none is imported by default."""

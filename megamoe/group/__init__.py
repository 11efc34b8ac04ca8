"""Coordinate the ranks of a layer outside of the kernel."""

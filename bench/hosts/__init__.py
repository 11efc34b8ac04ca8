"""Layers over several hosts: what they would take, by a model and one GPU; what a fabric gives; a fabric that spins."""

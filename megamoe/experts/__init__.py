"""Determine which experts a tensor holds: on this rank, in checkpoints, in the slots of a placement."""

"""Which experts a tensor holds: shards, placements, checkpoints."""

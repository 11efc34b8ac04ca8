"""The layer as users have it: over given weights, and with its own."""

"""tools/rank_check.py: the layer on every rank against the fp32 oracle."""

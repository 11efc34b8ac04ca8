"""A model of what a forward launch reads from DRAM, on a CPU."""

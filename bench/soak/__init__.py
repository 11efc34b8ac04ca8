"""tools/soak.py: long runs of the kernel, and runs in which something goes wrong."""

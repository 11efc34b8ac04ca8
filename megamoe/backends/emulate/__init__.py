"""The kernel's own source on CPU fibers."""

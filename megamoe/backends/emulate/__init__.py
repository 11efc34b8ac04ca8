"""Run the kernel's own source on CPU fibers."""

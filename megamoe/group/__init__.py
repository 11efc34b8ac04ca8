"""How ranks agree, and meet, off the kernel."""

"""One backend inside each of several hosts, and rows between them."""

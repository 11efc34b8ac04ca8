"""Run a layer over several hosts: one backend inside each host, and rows sent between the hosts."""

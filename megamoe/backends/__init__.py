"""What runs the layer: the kernel, torch.distributed, the emulator, the oracle."""

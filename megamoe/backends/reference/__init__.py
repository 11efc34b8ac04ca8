"""Implement the oracle: the layer in plain torch, all ranks in one process, one small file per stage.

route -> dispatch -> gemm1 -> act (+ quantize) -> gemm2 -> reduce -> combine; `layer.forward` reads as that list. It
shares no arithmetic with the other backends (it has its own quantizer), and every intermediate has the name that it has
in the kernel. `backward.backward` does the same for the gradients.
"""

from megamoe.backends.reference.backend import ReferenceBackend
from megamoe.backends.reference.backward import activation_gradient, backward
from megamoe.backends.reference.layer import forward

__all__ = ["ReferenceBackend", "activation_gradient", "backward", "forward"]

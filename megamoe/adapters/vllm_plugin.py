"""What vLLM loads in every process where megamoe is installed; by itself, since vllm.py imports much of vLLM."""

from __future__ import annotations

import logging

log = logging.getLogger("megamoe")

NAME = "megamoe"


def plugin() -> None:
    """Call install() where VLLM_PLUGINS names megamoe: installing the package alone changes nothing."""
    import vllm.envs as envs

    if NAME not in (envs.VLLM_PLUGINS or ()):
        return
    from megamoe.adapters import vllm as adapter

    if adapter.installed() is None:
        adapter.install()
        log.info("vLLM's MoE layers in BF16 and FP8 are megamoe layers")

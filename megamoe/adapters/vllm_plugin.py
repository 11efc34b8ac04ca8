"""Install the vLLM adapter in every process in which vLLM loads plugins. It does not import vllm.py before that."""

from __future__ import annotations

import logging

log = logging.getLogger("megamoe")

NAME = "megamoe"


def plugin() -> None:
    """Call install() if VLLM_PLUGINS contains megamoe."""
    import vllm.envs as envs

    if NAME not in (envs.VLLM_PLUGINS or ()):
        return
    from megamoe.adapters import vllm as adapter

    if adapter.installed() is None:
        adapter.install()
        log.info("vLLM's MoE layers in BF16 and FP8 are megamoe layers")

// Chooses the machine: PTX on Hopper, fibers on a CPU. arch/README.md says what both have in common.
#pragma once
#if defined(MEGAMOE_EMULATE)
#include "megamoe/arch/host/ops.h"
#else
#include "megamoe/arch/sm90/ops.cuh"
#endif

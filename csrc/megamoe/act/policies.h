// Activation policies, fp32, element by element: h = apply(gate, up) for gated ones, h = apply(up) otherwise.
// Run-time parameters (alpha, limit, up_offset) come from Args. megamoe/config.py::Activation is the torch
// twin.
#pragma once
#include "megamoe/arch/arch.h"
#include "megamoe/layout/args.h"

namespace megamoe {

MEGAMOE_DEVICE float sigmoid(float v) { return arch::fast_div(1.0f, 1.0f + arch::fast_exp(-v)); }

struct SwiGlu {
    static constexpr bool gated = true;
    static MEGAMOE_DEVICE float apply(const Args&, float gate, float up) { return gate * sigmoid(gate) * up; }
};

// GPT-OSS: gate clamped from above, up from both sides, sigmoid(alpha * gate), up shifted.
struct ClampedSwiGlu {
    static constexpr bool gated = true;
    static MEGAMOE_DEVICE float apply(const Args& args, float gate, float up) {
        gate = gate < args.act_limit ? gate : args.act_limit;
        up = up < args.act_limit ? up : args.act_limit;
        up = up > -args.act_limit ? up : -args.act_limit;
        return gate * sigmoid(args.act_alpha * gate) * (up + args.act_up_offset);
    }
};

// GELU in its exact form, erf by Abramowitz & Stegun 7.1.26 (|error| < 1.5e-7): no call into a math library.
struct GeGlu {
    static constexpr bool gated = true;
    static MEGAMOE_DEVICE float apply(const Args&, float gate, float up) {
        float z = gate * 0.70710678f;
        float a = z < 0 ? -z : z;
        float t = arch::fast_div(1.0f, 1.0f + 0.3275911f * a);
        float poly = t * (0.254829592f +
                          t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
        float erf_a = 1.0f - poly * arch::fast_exp(-a * a);
        return 0.5f * gate * (1.0f + (z < 0 ? -erf_a : erf_a)) * up;
    }
};

struct Relu2 {
    static constexpr bool gated = false;
    static MEGAMOE_DEVICE float apply(const Args&, float up, float) {
        float r = up > 0 ? up : 0;
        return r * r;
    }
};

}  // namespace megamoe

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
        gate = gate > args.act_limit ? args.act_limit : gate;  // so that NaN stays NaN
        up = up > args.act_limit ? args.act_limit : up;
        up = up < -args.act_limit ? -args.act_limit : up;
        return gate * sigmoid(args.act_alpha * gate) * (up + args.act_up_offset);
    }
};

// GELU in its exact form, gate * Phi(gate). Phi's tail is half of erfc by Abramowitz & Stegun 7.1.26 (|error|
// < 1e-7), with their coefficients halved: no call into a math library, and few registers.
struct GeGlu {
    static constexpr bool gated = true;
    static MEGAMOE_DEVICE float apply(const Args&, float gate, float up) {
        float z = gate * 0.70710678f;
        float t = arch::fast_div(1.0f, 1.0f + 0.3275911f * (z < 0 ? -z : z));
        float tail = t * arch::fast_exp(-z * z) *
                     (0.127414796f +
                      t * (-0.142248368f + t * (0.7107068705f + t * (-0.7265760135f + t * 0.5307027145f))));
        return gate * up * (gate < 0 ? tail : 1.0f - tail);
    }
};

// GELU by tanh, as 0.5 * (1 + tanh(u)) = sigmoid(2 u) with u = sqrt(2 / pi) * (gate + 0.044715 gate^3): no
// cancellation left of zero.
struct GeGluTanh {
    static constexpr bool gated = true;
    static MEGAMOE_DEVICE float apply(const Args&, float gate, float up) {
        return gate * sigmoid(gate * (1.5957691216f + 0.0713548163f * gate * gate)) * up;
    }
};

struct Relu2 {
    static constexpr bool gated = false;
    static MEGAMOE_DEVICE float apply(const Args&, float up, float) {
        float r = up < 0 ? 0 : up;  // NaN stays NaN
        return r * r;
    }
};

}  // namespace megamoe

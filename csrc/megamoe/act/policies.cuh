// Activation policies: fp32 functions of single elements. Gated ones have h = apply(gate, up), others h =
// apply(up). Run-time parameters (alpha, limit, up_offset) come from Args. megamoe/core/config.py::Activation
// is the same in torch.
//
// gradient(gate, up, dh) computes dgate = dh * dh/dgate, dup = dh * dh/dup, and h again. Without a gate,
// gradient(up, unused, dh) computes dup in the place of dgate. A clamp passes the gradient at its limit, as
// torch.clamp does. A NaN gate or up makes h NaN, and the gradients, except that of its linear factor. The
// backward epilogue runs gradient() 32,768 times per tile. So it uses forms that flush subnormals: sigmoid
// and its derivative share one ex2 and one rcp.
#pragma once
#include "megamoe/arch/arch.cuh"
#include "megamoe/layout/args.h"

namespace megamoe {

constexpr float log2_e = 1.44269504f;
// The sigmoid of -v ln 2.
MEGAMOE_DEVICE float sigmoid_ex2(float v) { return arch::rcp(1.0f + arch::ex2(v)); }
MEGAMOE_DEVICE float sigmoid(float v) { return sigmoid_ex2(v * -log2_e); }
// The outputs of a policy h = f(gate) * up, given f and f' at gate.
MEGAMOE_DEVICE void gradient_of_product(float f, float slope, float up, float dh, float& dgate, float& dup,
                                        float& h) {
    h = f * up;
    dgate = dh * up * slope;
    dup = dh * f;
}

struct SwiGlu {
    static constexpr bool gated = true;
    static MEGAMOE_DEVICE float apply(const Args&, float gate, float up) { return gate * sigmoid(gate) * up; }
    static MEGAMOE_DEVICE void gradient(const Args&, float gate, float up, float dh, float& dgate, float& dup,
                                        float& h) {
        float s = sigmoid_ex2(gate * -log2_e), f = gate * s;
        gradient_of_product(f, s + f * (1.0f - s), up, dh, dgate, dup, h);
    }
};

// GPT-OSS: gate clamped from above, up from both sides, sigmoid(alpha * gate), up shifted.
struct ClampedSwiGlu {
    static constexpr bool gated = true;
    static MEGAMOE_DEVICE float apply(const Args& args, float gate, float up) {
        gate = arch::smaller_or_nan(gate, args.act_limit);
        up = arch::larger_or_nan(arch::smaller_or_nan(up, args.act_limit), -args.act_limit);
        return gate * sigmoid_ex2(gate * (args.act_alpha * -log2_e)) * (up + args.act_up_offset);
    }
    static MEGAMOE_DEVICE void gradient(const Args& args, float gate, float up, float dh, float& dgate,
                                        float& dup, float& h) {
        bool gate_clamped = gate > args.act_limit;
        bool up_clamped = fabsf(up) > args.act_limit;
        gate = gate_clamped ? args.act_limit : gate;
        up = (up_clamped ? copysignf(args.act_limit, up) : up) + args.act_up_offset;
        float s = sigmoid_ex2(gate * (args.act_alpha * -log2_e)), f = gate * s;
        gradient_of_product(f, s + args.act_alpha * f * (1.0f - s), up, dh, dgate, dup, h);
        dgate = gate_clamped ? 0 : dgate;
        dup = up_clamped ? 0 : dup;
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
    // The same tail as 26.2.17 has it, phi(gate) * polynomial: the derivative is Phi + gate * phi.
    // Coefficients for t without the factor p = 0.2316419 of its denominator, phi with its constant in the
    // exponent.
    static MEGAMOE_DEVICE void gradient(const Args&, float gate, float up, float dh, float& dgate, float& dup,
                                        float& h) {
        float t = arch::rcp(4.31700828f + fabsf(gate));
        float phi = arch::ex2(gate * gate * (-0.5f * log2_e) - 1.32574806f);
        float tail =
            phi * t *
            (1.37877271f + t * (-6.64512249f + t * (143.327357f + t * (-632.561151f + t * 1994.59925f))));
        float cdf = gate < 0 ? tail : 1.0f - tail;
        gradient_of_product(gate * cdf, cdf + gate * phi, up, dh, dgate, dup, h);
    }
};

// GELU by tanh, as 0.5 * (1 + tanh(u)) = sigmoid(2 u) with u = sqrt(2 / pi) * (gate + 0.044715 gate^3): no
// cancellation left of zero.
struct GeGluTanh {
    static constexpr bool gated = true;
    static MEGAMOE_DEVICE float apply(const Args&, float gate, float up) {
        return gate * sigmoid(gate * (1.5957691216f + 0.0713548163f * gate * gate)) * up;
    }
    static MEGAMOE_DEVICE void gradient(const Args&, float gate, float up, float dh, float& dgate, float& dup,
                                        float& h) {
        float square = gate * gate;
        float s = sigmoid_ex2(gate * (1.5957691216f * -log2_e + 0.0713548163f * -log2_e * square));
        float f = gate * s;
        float slope = s + f * (1.0f - s) * (1.5957691216f + 3.0f * 0.0713548163f * square);
        gradient_of_product(f, slope, up, dh, dgate, dup, h);
    }
};

struct Relu2 {
    static constexpr bool gated = false;
    static MEGAMOE_DEVICE float apply(const Args&, float up, float) {
        float r = up < 0 ? 0 : up;  // NaN stays NaN
        return r * r;
    }
    static MEGAMOE_DEVICE void gradient(const Args&, float up, float, float dh, float& dup, float&,
                                        float& h) {
        float r = up < 0 ? 0 : up;
        h = r * r;
        dup = dh * (r + r);
    }
};

// One of these, of gate and up columns that alternate, gate first, in weights and pre-activations.
template <class Activation>
struct Interleaved : Activation {};
template <class Activation>
constexpr bool is_interleaved = false;
template <class Activation>
constexpr bool is_interleaved<Interleaved<Activation>> = true;
// And one whose code an epilogue has once, for half of its sums at a time: else that would be too long.
template <class Activation>
struct Rolled : Activation {};
template <class Activation>
constexpr int copies_of = 2;
template <class Activation>
constexpr int copies_of<Rolled<Activation>> = 1;

}  // namespace megamoe

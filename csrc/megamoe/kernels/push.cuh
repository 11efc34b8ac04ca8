// The kernel of few.cuh for several ranks. If a rank has more tokens, it runs the ordinary kernel instead.
#pragma once
#include "megamoe/kernels/few.cuh"
#include "megamoe/rows/push.cuh"

namespace megamoe {

template <class P, class Activation, class S>
struct PushLayer : FewLayer<P, Activation, S> {
    using LaunchArgs = PushArgs;  // which begins as that of Ordinary
    using Way = Pushed;
    using Ordinary = ForwardLayer<P, Activation, S>;
};
template <class T>
struct OrdinaryOf : T::Ordinary {
    static constexpr bool profile = T::profile;
};

template <class T>
MEGAMOE_DEVICE void push(const Args& args) {
    if (run_few<T>(args)) two_gemm<OrdinaryOf<T>>(args);
}

}  // namespace megamoe

// The forward layer of a training step, which also saves a state for backward.
#pragma once
#include "megamoe/epilogue/pre_activation.cuh"
#include "megamoe/kernels/forward.cuh"

namespace megamoe {

template <class P, class Activation, class S>
struct TrainLayer : ForwardLayer<P, Activation, S, false, TrainKind> {
    using Gemm1 = GemmOf<typename P::X, typename P::W, SavingEpilogue<S, Activation, typename P::H>>;
};

}  // namespace megamoe

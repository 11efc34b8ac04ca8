// How every kernel of tiles begins, and how it is exported.
#pragma once
#include "megamoe/gemm/mainloop.cuh"
#include "megamoe/gemm/tiles.cuh"

namespace megamoe {

template <class T>
MEGAMOE_DEVICE void init_barriers() {
    static_assert(sizeof(CtaSmem<typename T::Tiling>) <= max_smem_bytes, "more than a CTA can have");
    using S = typename T::Tiling;
    auto& smem = tile_smem<T>();
    if (arch::thread_idx() == 0) {
        for (int s = 0; s < S::num_slots; ++s) {
            arch::mbar_init(&smem.pipeline.full[s], 2);  // load_a and load_b
            // every math warp of the pair
            arch::mbar_init(&smem.pipeline.empty[s].bits, pair_ctas * math_role.num_warps);
            Forms<T>::each_barrier(s, arch::mbar_init);
        }
        for (int g = 0; g < num_math_warpgroups; ++g) {
            for (int s = 0; s < S::num_output_slots; ++s) {
                arch::mbar_init(&smem.outputs[g].full[s], 128);  // the warpgroup's threads
                arch::mbar_init(&smem.outputs[g].empty[s], 1);   // the store thread
            }
        }
        SchedulerSmem& scheduled = cta_smem<T>().common.scheduler;
        for (int s = 0; s < num_scheduled; ++s) {
            if constexpr (T::Scheduling::for_pair) {
                arch::mbar_init(&scheduled.pair.full[s].bits, 1);
                arch::mbar_init(&scheduled.pair.empty[s].bits, pair_ctas * num_scheduled_to);
            } else {
                arch::mbar_init(&scheduled.own.full[s], 1);
                arch::mbar_init(&scheduled.own.empty[s], num_scheduled_to);
            }
        }
        arch::mbar_fence_init();
    }
    arch::warp_sync();
    arch::cluster_sync();
}

// What a launch asks for. A layer that has an Ordinary one runs either.
template <class T, class Ordinary = typename T::Ordinary>
constexpr size_t smem_bytes_of(int) {
    return max_of(sizeof(CtaSmem<typename T::Tiling>), sizeof(CtaSmem<typename Ordinary::Tiling>));
}
template <class T>
constexpr size_t smem_bytes_of(...) {
    return sizeof(CtaSmem<typename T::Tiling>);
}

}  // namespace megamoe

// `body`: a function template of such a traits type, called with the arguments by all threads.
#if defined(MEGAMOE_EMULATE)
#include "megamoe/arch/host/entry.h"
#define MEGAMOE_KERNEL(name, body, traits)                                                        \
    MEGAMOE_HOST_ENTRY(name, traits::LaunchArgs, body<traits>, megamoe::smem_bytes_of<traits>(0), \
                       megamoe::num_threads);
#else
#define MEGAMOE_KERNEL(name, body, traits)                                                                 \
    extern "C" __device__ const uint32_t megamoe_args_bytes = sizeof(traits::LaunchArgs);                  \
    extern "C" __device__ const uint32_t megamoe_smem_bytes = megamoe::smem_bytes_of<traits>(0);           \
    extern "C" __global__ void __launch_bounds__(megamoe::num_threads, 1)                                  \
        __cluster_dims__(megamoe::pair_ctas, 1, 1) name(const __grid_constant__ traits::LaunchArgs args) { \
        body<traits>(args.args);                                                                           \
    }
#endif

// The kinds of launch. A layer derives from one. Roles and rows ask its policies; no code asks which kind it
// is.
#pragma once
#include "megamoe/cta/blocks.cuh"
#include "megamoe/gemm/gemm.cuh"
#include "megamoe/roles/scheduler.cuh"
#include "megamoe/rows/kept.cuh"
#include "megamoe/rows/restore.cuh"
#include "megamoe/rows/route.cuh"
#include "megamoe/rows/sorted.cuh"
#include "megamoe/rows/state.cuh"
#include "megamoe/rows/sum.cuh"
#include "megamoe/rows/transpose.cuh"

namespace megamoe {

// row_gemms: how many GEMMs have rows for outputs.
template <int row_gemms, class LaunchArgs_, class Blocks_, class Routes_, class Pool_, class Scheduling_,
          class Sums_, class State_, class WeightTiles_>
struct Kind {
    static constexpr int num_row_gemms = row_gemms;
    using LaunchArgs = LaunchArgs_;    // what it is given
    using Blocks = Blocks_;            // whose rows stand where
    using Routes = Routes_;            // where routes come from
    using Pool = Pool_;                // who fills it
    using Scheduling = Scheduling_;    // how units come to pairs of CTAs
    using Sums = Sums_;                // what reduce and combine make of rows
    using State = State_;              // what becomes of the call's state
    using WeightTiles = WeightTiles_;  // behind those of rows, alone, or none
};

// For launches without a pool, whose operands are whole.
struct NoPool {
    static constexpr bool padded = true, saved = false, restored = false, quantized = false;
};

// clang-format off: a table
//                       GEMMs arguments           blocks        routes           pool          scheduling sums          state       weight tiles
using ForwardKind        = Kind<2, ForwardArgs,        PoolBlocks,   ExchangedRoutes, PulledRows,   Evenly,    WeightedSums, StateUnchanged,  NoWeightTiles>;
using TrainKind          = Kind<2, TrainArgs,          PoolBlocks,   ExchangedRoutes, SavedRows,    Evenly,    WeightedSums, StateSaved, NoWeightTiles>;
using BackwardKind       = Kind<2, BackwardArgs,       PoolBlocks,   RoutesOfState,   RestoredRows, ByTickets, GradientSums, StateUnchanged,  WeightTilesBehindRows>;
using TransposedKind     = Kind<2, BackwardArgs,       PoolBlocks,   RoutesOfState,   TransposedRows, ByTickets, GradientSums, StateUnchanged,  TransposedWeightTiles>;
using GroupedKind        = Kind<1, GroupedArgs,        SortedBlocks, RoutesByExpert,  NoPool,       InTurns,   NoSums,       StateUnchanged,  NoWeightTiles>;
using GroupedScalingKind = Kind<1, GroupedArgs,        SortedBlocks, RoutesByExpert,  NoPool,       InTurns,   RowSums,      StateUnchanged,  NoWeightTiles>;
using GroupedTransposedKind = Kind<1, GroupedArgs,     SortedBlocks, RoutesByExpert,  NoPool,       InTurns,   NoSums,       StateUnchanged,  TransposedOutputs>;
using GroupedScalingTransposedKind = Kind<1, GroupedArgs, SortedBlocks, RoutesByExpert, NoPool,     InTurns,   RowSums,      StateUnchanged,  TransposedOutputs>;
using GroupedE4m3WeightsKind = Kind<0, GroupedWeightsArgs, TransposedBlocks, RoutesByExpert, NoPool, InTurns,   NoSums,       StateUnchanged,  TransposedTilesAlone>;
using GroupedWeightsKind = Kind<0, GroupedWeightsArgs, SortedBlocks, RoutesByExpert,  NoPool,       InTurns,   NoSums,       StateUnchanged,  WeightTilesAlone>;
using StashedWeightsKind = Kind<0, StashedWeightsArgs, StashedBlocks<false>, RoutesOfPasses, NoPool,   InTurns,   NoSums,       StateUnchanged,  WeightTilesAlone>;
using StashedE4m3Kind    = Kind<0, StashedWeightsArgs, StashedBlocks<true>,  RoutesOfPasses, NoPool,   InTurns,   NoSums,       StateUnchanged,  TransposedTilesAlone>;
// clang-format on

}  // namespace megamoe

// The skeleton of the products of few rows whose weight TMA brings: the loads before the main loop, the producer, and
// the loop over stages that are all in flight. `a16w8_tiles.cu`, `splitk_a16w8.cu` and `mx_tiles.cu` use it.
//
// A kernel passes functions: `load(stage, step)` loads K tile `step` of the weight, `load_rows(stage, step)` that of the
// rows, and `prefetch(step)` prefetches a K tile of the weight to the L2.
//
// Pipeline. A producer warp keeps STAGES K tiles in flight. Where the stages hold the block's whole part of K (HELD),
// there is no producer warp: warp 0 fills them once.
//
// Overlap. The kernels use programmatic dependent launch. Before the wait the weight is prefetched to the L2, or, if it
// is constant (W_CONSTANT: no launch that may still run writes the weight or its scales), fills the stages. The next
// launch may start at once, or, where its loads would delay this one (LATE), when the launch before this one has ended.
//
// Macros: those of few_rows.cuh; STAGES, W_CONSTANT, LATE; HELD, stages whose weight is held in registers, or 0 (or not
// defined).
#pragma once
#include "few_rows.cuh"
#include "ring.cuh"

#ifndef HELD
#define HELD 0
#endif

constexpr int BK = 128;  // the K tile of a stage
constexpr int MULTIPLYING = 32 * WARPS;  // threads of the consumers
static_assert(TILES == 1 && WARPS_N % 4 == 0);

constexpr int INITIALIZING = HELD > 0 ? 0 : MULTIPLYING;  // the thread that initializes the mbarriers

// Prologue, once the mbarriers are initialized: without a producer warp, load the weight or prefetch it.
template <typename Load, typename Prefetch>
INLINE void begin_loads(int warp, const Load& load, const Prefetch& prefetch) {
    if (HELD > 0 && warp == 0) {
        __syncwarp();
        if (elect()) {
            for (int step = 0; step < STAGES; ++step) {
                if constexpr (W_CONSTANT)
                    load(step, step);
                else
                    prefetch(step);
            }
        }
        __syncwarp();
    }
    if constexpr (CLUSTER > 1) cluster_arrive();
    __syncthreads();
}

// Producer: one thread keeps the stages full, each once the consumers have arrived at the mbarrier `empty(stage)`. It
// waits for the launches before this one if it loads what they may write, the rows (LOADS_ROWS) or the weight.
template <bool LOADS_ROWS, typename Empty, typename Load, typename LoadRows, typename Prefetch>
INLINE void produce(int count, int prefetched, const Empty& empty, const Load& load, const LoadRows& load_rows,
                    const Prefetch& prefetch) {
    const int ahead = min(STAGES, count);
    for (int step = 0; step < (W_CONSTANT ? ahead : 0); ++step) load(step, step);
    for (int step = W_CONSTANT ? ahead : 0; step < min(prefetched, count); ++step) prefetch(step);
    if constexpr (LOADS_ROWS || !W_CONSTANT) wait_for_launches();
    for (int step = 0; step < ahead; ++step) {
        if constexpr (!W_CONSTANT) load(step, step);
        load_rows(step, step);
    }
    Ring ring;
    for (int step = ahead; step < count; ++step, ring.advance()) {
        barrier_wait(empty(ring.stage), ring.parity);
        load(ring.stage, step);
        load_rows(ring.stage, step);
    }
}

// Main loop over stages that are all in flight: two products of SUMS accumulators run at a time. `multiply(d, step)`
// starts one, `promote(d, step)` takes the result.
template <int SUMS, typename Multiply, typename Promote>
INLINE void multiply_stages(Multiply multiply, Promote promote) {
    float d[2][SUMS];
#pragma unroll
    for (int step = 0; step <= STAGES; ++step) {
        if (step < STAGES) multiply(d[step % 2], step);
        if (step == 0) continue;
        if (step < STAGES)
            wgmma_wait<1>();
        else
            wgmma_wait<0>();
        promote(d[(step - 1) % 2], step - 1);
    }
}

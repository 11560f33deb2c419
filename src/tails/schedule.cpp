#include "tails/schedule.h"

namespace latent_moe {

Schedule portable_schedule(Tail tail) noexcept {
    switch (tail) {
        case Tail::replicated: return &replicated_tail;
        case Tail::overlap: return &overlap_tail;
        case Tail::column_parallel: return &column_parallel_tail;
        case Tail::token_parallel: return &token_parallel_tail;
        case Tail::late_reduce: return &late_reduce_tail;
        case Tail::fused: return nullptr;
    }
    return nullptr;
}

}  // namespace latent_moe

// late_reduce: without a norm the projection is linear, so the ranks' partials may be summed after it, once, with the shared
// ones.
//
//     whole W_up on the rank's own routed partial, shared partial added in the epilogue → all-reduce
#include "tails/schedule.h"

namespace latent_moe {

void late_reduce_tail(Backend& backend, const TailCall& whole_call) {
    for_each_block(backend, whole_call, [&](const TailCall& call) {
        Lane& lane = backend.main();
        const Matrix partial = call.before_prefix(backend);
        lane.project(call.routed, call.layer, WeightPart::whole, {call.shared, {}}, partial);
        lane.all_reduce(Step::reduce_output, partial, call.out, call.prefix);
    });
}

}  // namespace latent_moe

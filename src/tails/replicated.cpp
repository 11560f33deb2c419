// replicated: what engines do today.
//
//     main lane:  all-reduce latent + norm → all-reduce shared → whole W_up, shared and prefix added in the epilogue
#include "tails/schedule.h"

namespace latent_moe {

void replicated_tail(Backend& backend, const TailCall& whole_call) {
    for_each_block(backend, whole_call, [&](const TailCall& call) {
        Lane& lane = backend.main();
        const Matrix latent = backend.scratch(Scratch::latent, call.tokens);
        lane.all_reduce_norm(Step::reduce_latent, call.routed, backend.gamma(call.layer), latent);
        ConstMatrix shared = call.shared;
        if (call.reduces_shared()) {
            const Matrix sum = call.before_prefix(backend);
            lane.all_reduce(Step::reduce_shared, call.shared, sum, {});
            shared = sum;
        }
        lane.project(latent, call.layer, WeightPart::whole, {shared, call.prefix}, call.out);
    });
}

}  // namespace latent_moe

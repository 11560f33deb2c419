// overlap: the shared reduction hides under the projection.
//
//     side lane:  ├─ all-reduce shared ─────────────────────┐
//     main lane:  all-reduce latent + norm → whole W_up ────┴→ add (sum, product, prefix)
#include "tails/schedule.h"

namespace latent_moe {

void overlap_tail(Backend& backend, const TailCall& whole_call) {
    for_each_block(backend, whole_call, [&](const TailCall& call) {
        const Matrix sum = call.before_prefix(backend);
        const auto reduce_shared = [&](Lane& lane) { lane.all_reduce(Step::reduce_shared, call.shared, sum, {}); };
        Fork side(backend, reduce_shared);

        Lane& lane = backend.main();
        const Matrix latent = backend.scratch(Scratch::latent, call.tokens);
        const Matrix product = backend.scratch(Scratch::product, call.tokens);
        lane.all_reduce_norm(Step::reduce_latent, call.routed, backend.gamma(call.layer), latent);
        lane.project(latent, call.layer, WeightPart::whole, {}, product);
        side.join();
        lane.add(sum, product, call.prefix, call.out);
    });
}

}  // namespace latent_moe

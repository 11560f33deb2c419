// The shortest whole program: two ranks as threads, one layer, one tail.
#include <latent_moe/latent_moe.h>

#include <cstdio>
#include <random>
#include <vector>

using latent_moe::Bootstrap;
using latent_moe::Context;
using latent_moe::Dtype;
using latent_moe::Layer;
using latent_moe::Shape;
using latent_moe::Status;

namespace {

std::vector<float> random_floats(std::size_t count, unsigned seed, float deviation) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> values(count);
    for (float& value : values) value = normal(generator);
    return values;
}

}  // namespace

int main() {
    // float32 keeps the example short; models use bf16.
    const Shape shape{.hidden = 1024, .latent = 512, .activations = Dtype::f32};
    const auto hidden = static_cast<std::size_t>(shape.hidden);
    const auto latent = static_cast<std::size_t>(shape.latent);
    constexpr std::size_t tokens = 4;

    // What a checkpoint holds: W_up [hidden, latent] and the norm's weights. Every rank may be given all of it.
    const std::vector<float> up_projection = random_floats(hidden * latent, 1, 0.04F);
    const std::vector<float> gamma(latent, 1.0F);

    latent_moe::run_thread_ranks(2, [&](const Bootstrap& bootstrap) {
        Context context = Context::create(shape, bootstrap);
        const Layer layer =
            context.add_layer(0, {.data = up_projection.data(), .rows = shape.hidden, .dtype = Dtype::f32}, gamma.data());
        context.seal();

        // This rank's summands of the routed and of the shared experts.
        const auto seed = static_cast<unsigned>(10 + bootstrap.rank);
        const std::vector<float> routed = random_floats(tokens * latent, seed, 1);
        const std::vector<float> shared = random_floats(tokens * hidden, seed + 10, 1);
        std::vector<float> out(tokens * hidden);

        const Status status = layer.run({.routed = routed.data(), .shared = shared.data(), .tokens = tokens}, out.data());
        if (!status.ok()) throw std::runtime_error(status.message());
        if (bootstrap.rank == 0) {
            std::printf("tail %s on %d ranks: out[0][0..3] = %.4f %.4f %.4f %.4f\n", name(context.plan(tokens).tail),
                        context.world(), static_cast<double>(out[0]), static_cast<double>(out[1]),
                        static_cast<double>(out[2]), static_cast<double>(out[3]));
        }
    });
    return 0;
}

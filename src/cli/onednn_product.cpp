#include "cli/onednn_product.h"

#include <fmt/format.h>

#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

// From OpenMP's standard interface; its header belongs to the compiler and other tools do not find it.
extern "C" void omp_set_num_threads(int count);

namespace latent_moe::cli {
namespace {

using Type = dnnl::memory::data_type;
using Tag = dnnl::memory::format_tag;

dnnl::memory filled(const dnnl::memory::desc& description, const dnnl::engine& engine, const dnnl::stream& stream) {
    dnnl::memory to(description, engine);
    const dnnl::memory::dims dims = description.dims();
    // Values do not matter for the time, but subnormals and zeros would.
    std::vector<float> values(static_cast<std::size_t>(dims[0] * dims[1]));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251) / 251.0F - 0.5F;
    dnnl::memory from({dims, Type::f32, Tag::ab}, engine, values.data());
    dnnl::reorder(from, to).execute(stream, from, to);
    dnnl::stream(stream).wait();
    return to;
}

}  // namespace

class OnednnProduct::State {
public:
    State(std::int64_t tokens, std::int64_t depth, std::int64_t columns, int layers, int threads)
        : engine_(dnnl::engine::kind::cpu, 0) {
        omp_set_num_threads(threads);  // of the calling thread's products
        stream_ = dnnl::stream(engine_);
        try {
            make(tokens, depth, columns, Type::bf16);
            bf16_ = true;
        } catch (const dnnl::error&) {  // no AVX-512 here
            make(tokens, depth, columns, Type::f32);
        }
        left_ = filled(description_.src_desc(), engine_, stream_);
        out_ = dnnl::memory(description_.dst_desc(), engine_);
        for (int layer = 0; layer < layers; ++layer)
            weights_.push_back(filled(description_.weights_desc(), engine_, stream_));
    }

    void run(int layer) {
        matmul_.execute(
            stream_,
            {{DNNL_ARG_SRC, left_}, {DNNL_ARG_WEIGHTS, weights_[static_cast<std::size_t>(layer)]}, {DNNL_ARG_DST, out_}});
        stream_.wait();
    }

    int layers() const noexcept { return static_cast<int>(weights_.size()); }
    const char* dtype() const noexcept { return bf16_ ? "bf16" : "f32"; }

private:
    void make(std::int64_t tokens, std::int64_t depth, std::int64_t columns, Type type) {
        const dnnl::memory::desc left({tokens, depth}, type, Tag::ab);
        const dnnl::memory::desc right({depth, columns}, type, Tag::any);
        const dnnl::memory::desc out({tokens, columns}, type, Tag::ab);
        description_ = {dnnl::matmul::desc(left, right, out), engine_};
        matmul_ = dnnl::matmul(description_);
    }

    dnnl::engine engine_;
    dnnl::stream stream_;
    dnnl::matmul::primitive_desc description_;
    dnnl::matmul matmul_;
    dnnl::memory left_;
    dnnl::memory out_;
    std::vector<dnnl::memory> weights_;
    bool bf16_ = false;
};

OnednnProduct::OnednnProduct(std::int64_t tokens, std::int64_t depth, std::int64_t columns, int layers, int threads)
    : state_(std::make_unique<State>(tokens, depth, columns, layers, threads)) {}
OnednnProduct::~OnednnProduct() = default;
void OnednnProduct::run(int layer) {
    state_->run(layer);
}
int OnednnProduct::layers() const noexcept {
    return state_->layers();
}
const char* OnednnProduct::dtype() const noexcept {
    return state_->dtype();
}

std::string onednn_version() {
    const dnnl_version_t* version = dnnl_version();
    return fmt::format("{}.{}.{}", version->major, version->minor, version->patch);
}

}  // namespace latent_moe::cli

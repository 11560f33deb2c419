#include "cpu/product.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <utility>
#include <vector>

#include "core/numeric.h"
#include "cpu/row_math.h"
#include "latent_moe/status.h"

// From OpenMP's standard interface; its header belongs to the compiler and other tools do not find it.
extern "C" {
int omp_get_max_threads();
void omp_set_num_threads(int count);
}

namespace latent_moe {
namespace {

/// Columns at a time: 128 rows of W_up, widened, stay in the second-level cache at the latent sizes of today's models.
constexpr std::int64_t block_columns = 128;

using DnnlType = dnnl::memory::data_type;
using DnnlTag = dnnl::memory::format_tag;

/// oneDNN's own threads are off while this lives; the calling thread's OpenMP setting is put back.
class OneThread {
public:
    OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
    ~OneThread() { omp_set_num_threads(before_); }
    OneThread(const OneThread&) = delete;
    OneThread& operator=(const OneThread&) = delete;

private:
    int before_;
};

dnnl::memory::desc matrix_desc(std::int64_t rows, std::int64_t columns, DnnlType type, DnnlTag tag) {
    return {{rows, columns}, type, tag};
}

}  // namespace

class Product::State {
public:
    State(Workers& workers, std::int64_t most_tokens, std::int64_t depth, Arithmetic arithmetic, bool row_by_row)
        : workers_(workers),
          depth_(depth),
          engine_(dnnl::engine::kind::cpu, 0),
          most_tokens_(most_tokens),
          row_by_row_(row_by_row) {
        native_bf16_ = arithmetic == Arithmetic::automatic && can_multiply_bf16();
        x_.resize(static_cast<std::size_t>(most_tokens * depth));
        for (int worker = 0; worker < workers.count(); ++worker) {
            PerWorker& own = per_worker_.emplace_back(engine_);
            own.weights.resize(static_cast<std::size_t>(block_columns * depth));
            own.product.resize(static_cast<std::size_t>(block_columns * most_tokens));
            own.row.resize(static_cast<std::size_t>(block_columns));
        }
    }

    bool native_bf16() const noexcept { return native_bf16_; }

    std::size_t workspace_bytes() const noexcept {
        std::size_t bytes = x_.size() * sizeof(float);
        for (const PerWorker& own : per_worker_)
            bytes += (own.weights.size() + own.product.size() + own.row.size()) * sizeof(float);
        return bytes;
    }

    void run(const ConstMatrix& x, const ProductWeights& weights, const Epilogue& epilogue, const Matrix& out) {
        if (x.rows == 0) return;
        if (x.rows > most_tokens_ || x.columns != depth_ || weights.rows.columns != depth_ ||
            weights.rows.rows != out.columns) {
            throw Error(StatusCode::internal,
                        fmt::format("product of [{}, {}] and [{}, {}] into {} columns does not fit", x.rows, x.columns,
                                    weights.rows.rows, weights.rows.columns, out.columns));
        }
        const bool bf16 = native_bf16_ && x.dtype == Dtype::bf16 &&
                          (weights.rows.dtype == Dtype::bf16 || weights.rows.dtype == Dtype::e4m3);
        const void* left = bf16 ? packed_bf16(x) : widened(x);
        const std::int64_t columns = weights.rows.rows;
        const std::int64_t blocks = (columns + block_columns - 1) / block_columns;
        const std::int64_t rows_at_once = row_by_row_ ? 1 : x.rows;
        const Primitive& full = primitive(rows_at_once, std::min(block_columns, columns), bf16);
        const Primitive& last = primitive(rows_at_once, columns - (blocks - 1) * block_columns, bf16);
        workers_.for_each(blocks, [&](int worker, std::int64_t block) {
            const std::int64_t first = block * block_columns;
            const std::int64_t width = std::min(block_columns, columns - first);
            multiply(worker, width == block_columns ? full : last, left, x.rows / rows_at_once,
                     weights.rows.row_range(first, width), bf16);
            finish(worker, x.rows, first, width, weights, epilogue, out);
        });
    }

private:
    struct Primitive {
        dnnl::matmul::primitive_desc description;
        dnnl::matmul matmul;
        dnnl::memory::desc left;
        dnnl::memory::desc right;
        dnnl::memory::desc product;
    };

    struct PerWorker {
        explicit PerWorker(const dnnl::engine& engine) : stream(engine) {}

        dnnl::stream stream;
        std::vector<float> weights;
        std::vector<float> product;
        std::vector<float> row;
        std::vector<std::byte> scratchpad;
    };

    Primitive make_primitive(std::int64_t tokens, std::int64_t columns, bool bf16) const {
        const DnnlType type = bf16 ? DnnlType::bf16 : DnnlType::f32;
        Primitive made{.left = matrix_desc(tokens, depth_, type, DnnlTag::ab),
                       .right = matrix_desc(depth_, columns, type, DnnlTag::ba),
                       .product = matrix_desc(tokens, columns, DnnlType::f32, DnnlTag::ab)};
        dnnl::primitive_attr attributes;
        attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
        made.description = {dnnl::matmul::desc(made.left, made.right, made.product), attributes, engine_};
        made.matmul = dnnl::matmul(made.description);
        return made;
    }

    bool can_multiply_bf16() const {
        try {
            make_primitive(1, 8, true);
            return true;
        } catch (const dnnl::error&) {  // no AVX-512 here
            return false;
        }
    }

    const Primitive& primitive(std::int64_t tokens, std::int64_t columns, bool bf16) {
        const auto key = std::pair(tokens * 2 + (bf16 ? 1 : 0), columns);
        auto found = primitives_.find(key);
        if (found == primitives_.end()) {
            const OneThread one_thread;
            found = primitives_.emplace(key, make_primitive(tokens, columns, bf16)).first;
        }
        return found->second;
    }

    const void* packed_bf16(const ConstMatrix& x) {
        if (x.stride == x.columns) return x.data;
        for (std::int64_t row = 0; row < x.rows; ++row) {
            std::memcpy(reinterpret_cast<std::byte*>(x_.data()) + row * x.row_bytes(), x.row(row),
                        static_cast<std::size_t>(x.row_bytes()));
        }
        return x_.data();
    }

    const void* widened(const ConstMatrix& x) {
        workers_.for_each(x.rows,
                          [&](int, std::int64_t row) { widen(x.row(row), x.dtype, x_.data() + row * depth_, depth_); });
        return x_.data();
    }

    /// `times` times as many rows as the primitive has.
    void multiply(int worker, const Primitive& with, const void* left, std::int64_t times, const ConstMatrix& weights,
                  bool bf16) {
        PerWorker& own = per_worker_[static_cast<std::size_t>(worker)];
        const void* right = weights.data;
        if (bf16 && weights.dtype == Dtype::e4m3) {
            bf16_from_e4m3(weights.data, own.weights.data(), weights.rows * depth_);
            right = own.weights.data();
        } else if (!bf16 && weights.dtype != Dtype::f32) {
            widen(weights.data, weights.dtype, own.weights.data(), weights.rows * depth_);
            right = own.weights.data();
        }
        const dnnl::memory::desc scratchpad = with.description.scratchpad_desc();
        own.scratchpad.resize(std::max(own.scratchpad.size(), scratchpad.get_size()));
        const OneThread one_thread;
        for (std::int64_t time = 0; time < times; ++time) {
            const auto* x = static_cast<const std::byte*>(left) + static_cast<std::size_t>(time) * with.left.get_size();
            float* product = own.product.data() + time * weights.rows;
            with.matmul.execute(own.stream, {{DNNL_ARG_SRC, {with.left, engine_, const_cast<std::byte*>(x)}},
                                             {DNNL_ARG_WEIGHTS, {with.right, engine_, const_cast<void*>(right)}},
                                             {DNNL_ARG_DST, {with.product, engine_, product}},
                                             {DNNL_ARG_SCRATCHPAD, {scratchpad, engine_, own.scratchpad.data()}}});
            own.stream.wait();
        }
    }

    void finish(int worker, std::int64_t tokens, std::int64_t first, std::int64_t width, const ProductWeights& weights,
                const Epilogue& epilogue, const Matrix& out) {
        PerWorker& own = per_worker_[static_cast<std::size_t>(worker)];
        const ConstMatrix addend = epilogue.addend.column_range(first, width);
        const ConstMatrix prefix = epilogue.prefix.column_range(first, width);
        const Matrix to = out.column_range(first, width);
        for (std::int64_t row = 0; row < tokens; ++row) {
            float* values = own.product.data() + row * width;
            if (weights.row_scales != nullptr) {
                for (std::int64_t n = 0; n < width; ++n) values[n] *= weights.scale * weights.row_scales[first + n];
            } else if (weights.scale != 1) {
                for (std::int64_t n = 0; n < width; ++n) values[n] *= weights.scale;
            }
            if (addend.present()) {
                widen(addend.row(row), out.dtype, own.row.data(), width);
#pragma omp simd
                for (std::int64_t n = 0; n < width; ++n) values[n] += own.row[static_cast<std::size_t>(n)];
            }
            finish_row(values, out.dtype, prefix.present() ? prefix.row(row) : nullptr, to.row(row), own.row.data(), width);
        }
    }

    Workers& workers_;
    std::int64_t depth_;
    dnnl::engine engine_;
    std::int64_t most_tokens_;
    bool row_by_row_;
    bool native_bf16_ = false;
    std::vector<float> x_;
    std::vector<PerWorker> per_worker_;
    std::map<std::pair<std::int64_t, std::int64_t>, Primitive> primitives_;
};

Product::Product(Workers& workers, std::int64_t most_tokens, std::int64_t depth, Arithmetic arithmetic, bool row_by_row)
    : state_(std::make_unique<State>(workers, most_tokens, depth, arithmetic, row_by_row)) {}
Product::~Product() = default;

void Product::run(const ConstMatrix& x, const ProductWeights& weights, const Epilogue& epilogue, const Matrix& out) {
    state_->run(x, weights, epilogue, out);
}

bool Product::native_bf16() const noexcept {
    return state_->native_bf16();
}
std::size_t Product::workspace_bytes() const noexcept {
    return state_->workspace_bytes();
}

}  // namespace latent_moe

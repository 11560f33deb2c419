#include "gpu/external_tails.h"

#include <fmt/format.h>

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "core/partition.h"
#include "gpu/collective_setup.h"
#include "gpu/gemm.h"
#include "gpu/kernels/kernels.h"
#include "gpu/nccl_communicator.h"
#include "gpu/runtime/resources.h"
#include "gpu/topology.h"
#include "gpu/views.h"
#include "latent_moe/status.h"

namespace latent_moe::gpu {
namespace {

#ifdef LATENT_MOE_HIP
constexpr const char* libraries_name = "rccl+hipblaslt";
#else
constexpr const char* libraries_name = "nccl+cublaslt";
#endif

enum class Order : std::uint8_t {
    native,   ///< all-reduce latent, norm, whole product, all-reduce shared, add
    overlap,  ///< the same, the shared all-reduce on a second stream beside norm and product
    column,   ///< all-reduce latent, norm, own columns accumulated into shared, all-reduce shared
};

const char* name(Order order) {
    switch (order) {
        case Order::native: return "native";
        case Order::overlap: return "overlap";
        case Order::column: return "column";
    }
    return "unknown";
}

ncclDataType_t type_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16: return ncclBfloat16;
        case Dtype::f16: return ncclFloat16;
        default: return ncclFloat32;
    }
}

#ifndef LATENT_MOE_HIP

/// Memory in windows that all ranks registered together.
class WindowMemory final : public Memory {
public:
    WindowMemory(NcclCommunicator& communicator, Device& device, int device_number)
        : communicator_(communicator), device_(device), device_number_(device_number) {}

    /// Collective.
    void* allocate(std::size_t bytes) override {
        const CurrentDevice current(device_number_);
        const Nccl& api = nccl();
        void* memory = nullptr;
        check(api.MemAlloc(&memory, bytes), "ncclMemAlloc");
        ncclWindow_t window = nullptr;
        check(api.CommWindowRegister(communicator_.get(), memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC),
              "ncclCommWindowRegister");
        if (window == nullptr) {
            static_cast<void>(api.MemFree(memory));
            throw Error(StatusCode::unavailable, "NCCL gave no symmetric window");
        }
        windows_[memory] = window;
        return memory;
    }
    void release(void* memory) noexcept override {
        const auto found = windows_.find(memory);
        if (found == windows_.end()) return;
        static_cast<void>(nccl().CommWindowDeregister(communicator_.get(), found->second));
        static_cast<void>(nccl().MemFree(memory));
        windows_.erase(found);
    }
    void upload(void* to, const void* from, std::size_t bytes) override { device_.upload(to, from, bytes); }
    void download(void* to, const void* from, std::size_t bytes) override { device_.download(to, from, bytes); }

private:
    NcclCommunicator& communicator_;
    Device& device_;
    int device_number_;
    std::map<void*, ncclWindow_t> windows_;
};

#endif

/// A buffer of some kind of memory.
class Buffer {
public:
    Buffer(Memory& memory, std::size_t bytes) : memory_(&memory), data_(memory.allocate(bytes)) {}
    Buffer(Buffer&& other) noexcept : memory_(other.memory_), data_(std::exchange(other.data_, nullptr)) {}
    Buffer& operator=(Buffer&&) = delete;
    ~Buffer() {
        if (data_ != nullptr) memory_->release(data_);
    }
    void* get() const noexcept { return data_; }

private:
    Memory* memory_;
    void* data_;
};

class NcclCublasLt final : public ExternalTails {
public:
    NcclCublasLt(const Shape& shape, const Bootstrap& bootstrap, const Options& options, Device& device)
        : shape_(shape), bootstrap_(bootstrap), options_(options), device_(device) {
        const Topology topology = discover(bootstrap, options);
        device_number_ = topology.device;
        if (const std::string reason = why_none(topology); !reason.empty()) {
            for (const char* kind : {"", ", symmetric"}) {
                for (const Order order : {Order::native, Order::overlap, Order::column})
                    refused_.push_back({full_name(order, kind), reason});
            }
            return;
        }
        const CurrentDevice current(device_number_);
        together(bootstrap, "streams", [&] {
            side_stream_ = make_stream();
            forked_ = make_event();
            joined_ = make_event();
            setup_stream_ = make_stream();
        });
        communicator_.emplace(bootstrap, device_number_, options.timeout_ms);
        normed_ = DeviceMemory(bytes_of_rows(shape.latent), "buffers of other libraries");
        product_ = DeviceMemory(bytes_of_rows(shape.hidden), "buffers of other libraries");
        add_kind("", device);
        add_symmetric();
    }

    void add_layer(const WeightView& view, const void* gamma) override {
        if (tails_.empty()) return;
        const CurrentDevice current(device_number_);
        if (view.dtype != shape_.activations || view.row_scales != nullptr || view.rows != shape_.hidden) {
            return drop_all(fmt::format("its product takes {} weights without row scales, and all rows of them",
                                        latent_moe::name(shape_.activations)));
        }
        const std::size_t width = static_cast<std::size_t>(shape_.latent) * bytes_of(view.dtype);
        const std::size_t pitch = view.stride == 0 ? width : static_cast<std::size_t>(view.stride) * bytes_of(view.dtype);
        DeviceLayer& layer = layers_.emplace_back();
        layer.weights = DeviceMemory(width * static_cast<std::size_t>(shape_.hidden), "W_up of other libraries");
        layer.scale = view.scale * shape_.routed_scale;
        check(cudaMemcpy2DAsync(layer.weights.get(), width, view.data, pitch, width, static_cast<std::size_t>(shape_.hidden),
                                cudaMemcpyDefault, setup_stream_.get()),
              "copy of W_up to the device");
        if (gamma != nullptr) {
            layer.gamma = DeviceMemory(width, "gamma of other libraries");
            check(cudaMemcpyAsync(layer.gamma.get(), gamma, width, cudaMemcpyDefault, setup_stream_.get()), "copy of gamma");
        }
        check(cudaStreamSynchronize(setup_stream_.get()), "copy of W_up to the device");
    }

    void prepare(std::int64_t tokens) override {
        if (tails_.empty()) return;
        const CurrentDevice current(device_number_);
        std::vector<std::int64_t> widths{shape_.hidden};
        if (shape_.hidden % bootstrap_.world == 0) widths.push_back(shape_.hidden / bootstrap_.world);
        together(bootstrap_, "cuBLASLt", [&] { gemm_.emplace(shape_.latent); });
        gemm_->choose(bootstrap_, widths, tokens, tokens, shape_.activations);
    }

    std::vector<ExternalTail*> tails() override {
        std::vector<ExternalTail*> all;
        for (const std::unique_ptr<Composed>& tail : tails_) all.push_back(tail.get());
        return all;
    }
    const std::vector<Refused>& refused() const noexcept override { return refused_; }

private:
    struct DeviceLayer {
        DeviceMemory weights;
        DeviceMemory gamma;
        float scale = 1;
    };

    /// Of one kind of memory: what NCCL writes.
    struct Kind {
        Memory* memory;
        Buffer latent;
        Buffer shared;
    };

    class Composed final : public ExternalTail {
    public:
        Composed(NcclCublasLt& owner, Order order, const Kind& kind, std::string name)
            : owner_(owner), order_(order), kind_(kind), name_(std::move(name)) {}
        const std::string& name() const noexcept override { return name_; }
        const char* libraries() const noexcept override { return libraries_name; }
        Tail like() const noexcept override {
            switch (order_) {
                case Order::native: return Tail::replicated;
                case Order::overlap: return Tail::overlap;
                default: return Tail::column_parallel;
            }
        }
        Memory& memory() noexcept override { return *kind_.memory; }
        void run(std::size_t layer, const TailInput& input, Rows out, latent_moe::Stream stream) override {
            owner_.run(order_, kind_, owner_.layers_[layer], input, out, static_cast<cudaStream_t>(stream));
        }

    private:
        NcclCublasLt& owner_;
        Order order_;
        const Kind& kind_;
        std::string name_;
    };

    static std::string full_name(Order order, const char* kind) {
        return fmt::format("external:{} {}{}", libraries_name, gpu::name(order), kind);
    }

    std::string why_none(const Topology& topology) const {
        if (bootstrap_.world == 1) return "there is one rank";
        if (topology.shares_devices()) return "NCCL refuses ranks that share a GPU";
        if (options_.shared != SharedState::partial) return "it is timed with partial shared rows only";
        if (options_.sequence_parallel) return "it gives every rank the whole output";
        // One rank that lacks it is enough.
        const int here = look_for_nccl().missing.empty() ? 1 : 0;
        for (const int each : gather(bootstrap_, here)) {
            if (each == 0) return here == 1 ? "a rank has no NCCL" : look_for_nccl().missing;
        }
        return {};
    }

    std::size_t bytes_of_rows(std::int64_t width) const {
        return static_cast<std::size_t>(options_.max_tokens * width) * bytes_of(shape_.activations);
    }

    void add_kind(const char* suffix, Memory& memory) {
        kinds_.push_back(std::make_unique<Kind>(
            Kind{&memory, Buffer(memory, bytes_of_rows(shape_.latent)), Buffer(memory, bytes_of_rows(shape_.hidden))}));
        for (const Order order : {Order::native, Order::overlap, Order::column}) {
            if (order == Order::column && shape_.hidden % bootstrap_.world != 0) {
                refused_.push_back({full_name(order, suffix), "hidden is not divisible by the ranks"});
                continue;
            }
            tails_.push_back(std::make_unique<Composed>(*this, order, *kinds_.back(), full_name(order, suffix)));
        }
    }

    void add_symmetric() {
        constexpr const char* suffix = ", symmetric";
        std::string reason = look_for_nccl().window_missing;
#ifndef LATENT_MOE_HIP
        if (reason.empty()) {
            windows_.emplace(*communicator_, device_, device_number_);
            try {
                return add_kind(suffix, *windows_);
            } catch (const Error& error) {  // alike on all ranks: registration is collective
                reason = error.what();
            }
        }
#endif
        for (const Order order : {Order::native, Order::overlap, Order::column})
            refused_.push_back({full_name(order, suffix), reason});
    }

    void drop_all(const std::string& reason) {
        for (const std::unique_ptr<Composed>& tail : tails_) refused_.push_back({tail->name(), reason});
        tails_.clear();
    }

    void all_reduce(const void* from, void* to, std::int64_t elements, cudaStream_t stream) {
        communicator_->before(stream);
        check(nccl().AllReduce(from, to, static_cast<std::size_t>(elements), type_of(shape_.activations), ncclSum,
                               communicator_->get(), stream),
              "ncclAllReduce");
        communicator_->after(stream);
    }

    void run(Order order, const Kind& kind, const DeviceLayer& layer, const TailInput& input, Rows out,
             cudaStream_t stream) {
        const CurrentDevice current(device_number_);
        const std::int64_t tokens = input.tokens;
        const std::int64_t latent = shape_.latent;
        const std::int64_t hidden = shape_.hidden;
        all_reduce(input.routed.data, kind.latent.get(), tokens * latent, stream);
        if (order == Order::overlap) {
            check(cudaEventRecord(forked_.get(), stream), "fork");
            check(cudaStreamWaitEvent(side_stream_.get(), forked_.get(), 0), "fork");
            all_reduce(input.shared.data, kind.shared.get(), tokens * hidden, side_stream_.get());
            check(cudaEventRecord(joined_.get(), side_stream_.get()), "join");
        }
        const void* x = kind.latent.get();
        if (shape_.norm == Norm::rms) {
            check(rms_norm({.x = {x},
                            .gamma = layer.gamma.get(),
                            .epsilon = shape_.epsilon,
                            .y = {normed_.get()},
                            .tokens = tokens,
                            .width = latent,
                            .dtype = shape_.activations},
                           stream),
                  "norm kernel");
            x = normed_.get();
        }
        if (order == Order::column) return finish_columns(layer, x, input, out, stream);

        multiply(layer, x, nullptr, product_.get(), {0, hidden}, tokens, stream);
        if (order == Order::native) all_reduce(input.shared.data, kind.shared.get(), tokens * hidden, stream);
        if (order == Order::overlap) check(cudaStreamWaitEvent(stream, joined_.get(), 0), "join");
        add_rows({kind.shared.get()}, {product_.get()}, input.prefix, out, tokens, stream);
    }

    /// The caller lets `shared` be overwritten, as an engine's would be.
    void finish_columns(const DeviceLayer& layer, const void* x, const TailInput& input, Rows out, cudaStream_t stream) {
        const TokenRange columns = even_part(shape_.hidden, bootstrap_.world, bootstrap_.rank);
        auto* slice = static_cast<std::byte*>(const_cast<void*>(input.shared.data)) +
                      static_cast<std::size_t>(columns.first) * bytes_of(shape_.activations);
        multiply(layer, x, slice, slice, columns, input.tokens, stream);
        all_reduce(input.shared.data, out.data, input.tokens * shape_.hidden, stream);
        if (input.prefix.data != nullptr) add_rows({out.data}, input.prefix, {}, out, input.tokens, stream);
    }

    void multiply(const DeviceLayer& layer, const void* x, const void* c, void* d, TokenRange rows, std::int64_t tokens,
                  cudaStream_t stream) {
        const std::size_t row_bytes = static_cast<std::size_t>(shape_.latent) * bytes_of(shape_.activations);
        gemm_->run({.x = x,
                    .x_stride = shape_.latent,
                    .w = layer.weights.get() + static_cast<std::size_t>(rows.first) * row_bytes,
                    .c = c,
                    .c_stride = shape_.hidden,
                    .d = d,
                    .d_stride = shape_.hidden,
                    .m = tokens,
                    .n = rows.count,
                    .in = shape_.activations,
                    .out = shape_.activations,
                    .alpha = layer.scale},
                   stream);
    }

    void add_rows(ConstRows a, ConstRows b, ConstRows prefix, Rows out, std::int64_t tokens, cudaStream_t stream) {
        check(add({.a = a,
                   .b = b,
                   .prefix = prefix,
                   .y = out,
                   .tokens = tokens,
                   .width = shape_.hidden,
                   .dtype = shape_.activations},
                  stream),
              "addition kernel");
    }

    Shape shape_;
    Bootstrap bootstrap_;
    Options options_;
    Device& device_;
    int device_number_ = 0;
    Stream setup_stream_;
    Stream side_stream_;
    Event forked_;
    Event joined_;
    std::optional<NcclCommunicator> communicator_;
#ifndef LATENT_MOE_HIP
    std::optional<WindowMemory> windows_;
#endif
    std::optional<Gemm> gemm_;
    DeviceMemory normed_;
    DeviceMemory product_;
    std::vector<DeviceLayer> layers_;
    std::vector<std::unique_ptr<Kind>> kinds_;
    std::vector<std::unique_ptr<Composed>> tails_;
    std::vector<Refused> refused_;
};

}  // namespace

std::unique_ptr<ExternalTails> make_external_tails(const Shape& shape, const Bootstrap& bootstrap, const Options& options,
                                                   Device& device) {
    return std::make_unique<NcclCublasLt>(shape, bootstrap, options, device);
}

}  // namespace latent_moe::gpu

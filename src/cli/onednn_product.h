// oneDNN's product alone, as an outside peer of the CPU tails in `bench`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace latent_moe::cli {

/// [tokens, depth] · [columns, depth]ᵀ through oneDNN with its own threads and its own choice of weight layout, over several
/// weight matrices in turn, so that they are cold. bf16 where the CPU has it, else float32, widened beforehand.
class OnednnProduct {
public:
    OnednnProduct(std::int64_t tokens, std::int64_t depth, std::int64_t columns, int layers, int threads);
    ~OnednnProduct();

    void run(int layer);
    int layers() const noexcept;
    const char* dtype() const noexcept;

private:
    class State;
    std::unique_ptr<State> state_;
};

std::string onednn_version();

}  // namespace latent_moe::cli
